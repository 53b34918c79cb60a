"""`find_precision_file`: the per-module recipe that a run names by its path.

    found = precision_file("--te-precision-config-file", "conf/te_quant.yaml", "runs/train.sh")
    found.content, found.sentence

Scripts name paths of the machine on which they run. So the file is looked up in three places: from
the folder of the run's file, at its path, and by its name next to the run's file. In the third
place it counts where it has the form of such a recipe.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bridge.errors import PayloadError, RunConfigError
from bridge.read.launch.shell_word import UNKNOWN_PATTERN
from bridge.read.megatron_lm import te_precision_file
from bridge.read.megatron_lm.recognition import is_per_module_recipe
from bridge.read.text.document import Document

QUANT_RECIPE_FIELD = "model.quant_recipe"
"""The setting that holds the content."""
FILE_NOT_FOUND = (
    "{field}: {option} names {name}, which is not found; the precision of the layers that it "
    "selects is not known. Put the file next to the run's own."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionFile:
    """A per-module recipe that a run names."""

    content: dict[str, Any] | None
    """The content of the file; None where the file is not found."""
    sentence: str
    """The place where it was read, or what is not known without it, as a sentence."""


def find_precision_file(option: str, name: str, run_path: str) -> PrecisionFile:
    """Return the per-module recipe that an option names.

    Args:
        option: The option, for messages.
        name: The path as it is written; a beginning that only the run knows is left out.
        run_path: Path of the run's file.

    Raises:
        RunConfigError: Megatron refuses the file.
    """
    for place in _iterate_candidate_paths(name, Path(run_path).parent):
        content = _load_content(place)
        if content is not None:
            sentence = f"{option} {name}: read from {place.path}."
            return PrecisionFile(content=content, sentence=sentence)
    sentence = FILE_NOT_FOUND.format(field=QUANT_RECIPE_FIELD, option=option, name=name)
    return PrecisionFile(content=None, sentence=sentence)


class _CandidatePath(NamedTuple):
    """A path where the file may be."""

    path: Path
    is_exact: bool
    """A file at the path is the file that is named; else its content has to look like one."""


def _iterate_candidate_paths(name: str, folder: Path) -> Iterator[_CandidatePath]:
    """Yield the paths where a file may be, the surest first."""
    unknown = list(UNKNOWN_PATTERN.finditer(name))
    known = name
    if unknown:
        known = name[unknown[-1].end() :].lstrip("/")
    if not known or known.startswith("~") or not known.isprintable():
        return
    yield _CandidatePath(folder / known, is_exact=True)
    yield _CandidatePath(Path(known), is_exact=not unknown)
    yield _CandidatePath(folder / Path(known).name, is_exact=False)


def _load_content(candidate: _CandidatePath) -> dict[str, Any] | None:
    """Return the content of the file at a place; None without a file, or with a file of another form."""
    if not os.path.isfile(candidate.path):  # noqa: PTH113  a path may be too long for Path.is_file
        return None
    try:
        if candidate.is_exact or is_per_module_recipe(Document.load(candidate.path).mapping):
            return te_precision_file.read(candidate.path)
    except PayloadError as error:
        if candidate.is_exact:
            raise RunConfigError(str(error)) from None
    return None
