"""`find_precision_file`: the per-module recipe that a run names by its path.

    file = find_precision_file("--te-precision-config-file", "conf/te_quant.yaml", "runs/train.sh")
    file.content, file.sentence

Scripts name paths of the machine on which they run. So the file is searched in three places: from
the folder of the run's file, at its own path, and by its name next to the run's file. A file in the
third place counts only if it has the form of such a recipe.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bridge.errors import PayloadError, RunConfigError
from bridge.read.launch.shell_word import OPEN_PIECE_PATTERN
from bridge.read.megatron_lm.module_recipe import te_precision_file
from bridge.read.megatron_lm.recognition import is_per_module_recipe
from bridge.read.text.document import Document

QUANT_RECIPE_FIELD = "model.quant_recipe"
"""The setting that holds the content."""
FILE_NOT_FOUND = (
    "{field}: {option} names {name}, which is not found; the precision of the layers that it "
    "selects is not known. Put the file next to the run's own."
)
FILE_WAS_READ = "{setting}: read from {path}."
INLINE_PREFIX = "base64:"
"""Beginning of a value that is the content, and no path.

Source: radixark/Megatron-LM 37f91617 of 2026-08-09, which miles installs.
"""
INLINE_WAS_READ = "{option}: read from the text behind {prefix}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionFile:
    """A per-module recipe that a run names."""

    setting: str
    """The option and the path, as they are written."""
    content: dict[str, object] | None
    """The content of the file; None if the file is not found."""
    sentence: str
    """A sentence that says where the file was read, or what is not known without it."""


def find_precision_file(option: str, name: str, run_path: str) -> PrecisionFile:
    """Return the per-module recipe that an option names.

    Args:
        option: The option, for messages.
        name: The path as it is written. A beginning that is known only when the run starts is ignored.
        run_path: Path of the run's file.

    Raises:
        RunConfigError: Megatron refuses the file.
    """
    if name.startswith(INLINE_PREFIX) and OPEN_PIECE_PATTERN.search(name) is None:
        return _read_inline(option, name.removeprefix(INLINE_PREFIX))
    setting = f"{option} {name}"
    for candidate in _iterate_candidate_paths(name, Path(run_path).parent):
        content = _load_content(candidate)
        if content is not None:
            sentence = FILE_WAS_READ.format(setting=setting, path=candidate.path)
            return PrecisionFile(setting=setting, content=content, sentence=sentence)
    sentence = FILE_NOT_FOUND.format(field=QUANT_RECIPE_FIELD, option=option, name=name)
    return PrecisionFile(setting=setting, content=None, sentence=sentence)


def _read_inline(option: str, text: str) -> PrecisionFile:
    """Return the per-module recipe whose content is the value of an option.

    Raises:
        RunConfigError: The text cannot be decoded, or Megatron refuses its content.
    """
    setting = f"{option} {INLINE_PREFIX}"
    try:
        decoded = base64.b64decode(text, validate=True).decode()
        content = te_precision_file.parse(decoded, option)
    except (ValueError, PayloadError) as error:
        raise RunConfigError(f"{option}: {error}") from None
    sentence = INLINE_WAS_READ.format(option=option, prefix=INLINE_PREFIX)
    return PrecisionFile(setting=setting, content=content, sentence=f"{sentence}.")


class _CandidatePath(NamedTuple):
    """A path where the file may be."""

    path: Path
    is_exact: bool
    """True if a file at this path is the one that the option names. Else its content has to have the
    form of a per-module recipe."""


def _iterate_candidate_paths(name: str, folder: Path) -> Iterator[_CandidatePath]:
    """Yield the paths where the file may be, the surest first.

    A path in a home folder, or with unprintable characters, has none.
    """
    open_pieces = list(OPEN_PIECE_PATTERN.finditer(name))
    known_path = name
    if open_pieces:
        known_path = name[open_pieces[-1].end() :].lstrip("/")
    if not known_path or known_path.startswith("~") or not known_path.isprintable():
        return
    yield _CandidatePath(folder / known_path, is_exact=True)
    yield _CandidatePath(Path(known_path), is_exact=not open_pieces)
    yield _CandidatePath(folder / Path(known_path).name, is_exact=False)


def _load_content(candidate: _CandidatePath) -> dict[str, object] | None:
    """Return the content of the file at a path; None without a file, or for a file of another form.

    Raises:
        RunConfigError: The file is the one that the option names, and Megatron refuses it.
    """
    if not os.path.isfile(candidate.path):  # noqa: PTH113  a path may be too long for Path.is_file
        return None
    try:
        if candidate.is_exact or is_per_module_recipe(Document.load(candidate.path).mapping):
            return te_precision_file.read(candidate.path)
    except PayloadError as error:
        if candidate.is_exact:
            raise RunConfigError(str(error)) from None
    return None
