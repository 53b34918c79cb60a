"""The release of Megatron Core that a run of the tests asks: the installed one, or a newer one (``--megatron next``).

``make setup`` unpacks the newer one into a folder of the environment, which is on no path unless it is asked for.
"""

from __future__ import annotations

import os
import sys
import typing
from pathlib import Path

import pytest
import typing_extensions

NEXT = Path(os.environ.get("BRIDGE_MEGATRON_NEXT") or Path(sys.prefix) / "megatron-next")
"""Folder with the newer release, and with what it needs beyond the environment."""
ABSENT = f"needs the newer Megatron Core in {NEXT}: run make setup"


def use_next() -> None:
    """Let this process, and those that it starts, import the newer release."""
    sys.path.insert(0, str(NEXT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(NEXT), os.environ.get("PYTHONPATH")]))
    if not hasattr(typing, "override"):  # as the folder's own sitecustomize.py does at the start of a process
        typing.override = typing_extensions.override


def is_next() -> bool:
    """Return whether this run of the tests asks the newer release."""
    return str(NEXT) in sys.path


def skip_all(items: list[pytest.Item]) -> None:
    """Skip every test where the folder is not there."""
    for item in items:
        item.add_marker(pytest.mark.skip(reason=ABSENT))
