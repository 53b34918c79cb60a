"""The sentences of a report: rows of `rows/SYSTEM.yaml`, each whole, with the facts of a file in braces.

record_named("axolotl.documented-as-no-amp")        # reason, detail and remedy
"""

from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, NamedTuple

import yaml

FOLDER = files("bridge.interop").joinpath("rows")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""A tenth of the time of PyYAML's own where its C library is there."""


class Record(NamedTuple):
    """Why a setting cannot be converted exactly."""

    reason: str
    """One of `contract.REASONS`."""
    detail: str
    """The difference on the other side, as a clause without a full stop."""
    remedy: str


def record_named(row: str, **facts: object) -> Record:
    """Return the record of a row, "SYSTEM.ROW", with the facts of a file in it."""
    system, _, name = row.partition(".")
    found = rows_of(system)[name]
    return Record(found["reason"], found["detail"].format(**facts), found["remedy"].format(**facts))


@cache
def rows_of(system: str, folder: Traversable = FOLDER) -> dict[str, Any]:
    """Return the rows of a system's file."""
    text = folder.joinpath(f"{system}.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.load(text, LOADER)  # noqa: S506  a safe one
    return found
