"""`precision_file`: the per-module recipe that a run names by its path, read where it is found, and named where not.

    found = precision_file("--te-precision-config-file", "conf/te_quant.yaml", "runs/train.sh")
    found.content, found.sentence

The file is looked up from the folder of the run's file, then at its own path. One of the same name
next to the run's file counts too where it is such a recipe: scripts name paths of the machine on
which they run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.errors import PayloadError, RunConfigError
from bridge.read.launch.word import UNKNOWN
from bridge.read.megatron_lm import te_precision_file
from bridge.read.megatron_lm.recognition import is_per_module
from bridge.read.text.document import Document

FIELD = "model.quant_recipe"
"""The setting that holds the content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionFile:
    """The outcome of a search."""

    content: dict[str, Any] | None
    """What the file holds; None: it is not there."""
    sentence: str
    """Where it was read, or what is not known without it."""


def precision_file(option: str, name: str, beside: str) -> PrecisionFile:
    """Return the content of the file that an option names.

    RunConfigError for one that Megatron refuses.

    Args:
        option: The option, for messages.
        name: The path as it is written; a beginning that only the run knows is left out.
        beside: Path of the run's own file.
    """
    for path, is_exact in _places(name, Path(beside).parent):
        if not os.path.isfile(path):  # noqa: PTH113  a path may be too long for Path.is_file
            continue
        try:
            if is_exact or is_per_module(Document.load(path).mapping):
                content = te_precision_file.read(path)
                return PrecisionFile(
                    content=content, sentence=f"{option} {name}: read from {path}."
                )
        except PayloadError as error:
            if is_exact:
                raise RunConfigError(str(error)) from None
    rule = f"{option} names {name}, which is not found; the precision of the layers that it selects is not known"
    return PrecisionFile(
        content=None, sentence=f"{FIELD}: {rule}. Put the file next to the run's own."
    )


def _places(name: str, folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the paths where a file may be, and whether it is the one that is meant if it is there."""
    unknown = [*UNKNOWN.finditer(name)]
    known = name[unknown[-1].end() :].lstrip("/") if unknown else name
    if not known or known.startswith("~") or not known.isprintable():
        return
    yield folder / known, True
    yield Path(known), not unknown
    yield folder / Path(known).name, False
