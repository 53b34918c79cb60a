"""`FileRun`: a run of Megatron-LM that a file describes, before it is read as sections.

    run = FileRun.of(runs_of_file(document, variables)[0], document)
    run.values.known, run.is_inference

A file of Megatron-LM may hold several runs: the launches of a script, the groups of an argument
file, the blocks of a log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from bridge.errors import RunConfigError, UnreadFileError
from bridge.precision.values import number_of_text
from bridge.read.framework.miles import model_arguments
from bridge.read.framework.table import table_of_clone
from bridge.read.launch.alternatives import launches
from bridge.read.megatron_lm.argument_values import ArgumentValues, values_of
from bridge.read.megatron_lm.arguments import (
    INFERENCE,
    Arguments,
    argument_groups,
    runs_of,
    runs_printed,
)
from bridge.read.megatron_lm.elsewhere import is_named
from bridge.read.megatron_lm.flags import fields_of
from bridge.read.megatron_lm.printed import START, printed_arguments
from bridge.read.megatron_lm.recognition import is_megatron
from bridge.read.refusals import no_run_of_megatron
from bridge.read.text.document import Document

GROUP = "MODEL_ARGS"
"""Key of the arguments in the files of Megatron-LM's own tests."""
SLIME_OR_MILES = "slime_or_miles"
"""Table of a launch of one of two frameworks; the clone that the script lies in may show which."""
EVALUATION = re.compile(r"(?:^|/)eval_harness/|(?:^|/)eval(?:uate|uation)?\.py\Z")
"""Programs that evaluate a checkpoint."""
SIZES = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
)
"""Sizes that an evaluation reads from the checkpoint.

Source: Megatron-DeepSpeed of bigscience and Microsoft, examples of tasks/eval_harness/evaluate.py,
whose load_ds_checkpoint_and_setup_megatron takes the arguments of the checkpoint.
"""


def runs_of_file(document: Document, variables: Mapping[str, str]) -> list[Arguments]:
    """Return the arguments of each run of a file, in the file's order.

    Raises:
        RunConfigError: A script starts no run of Megatron-LM, or a group holds no arguments.
    """
    if START.search(document.text):
        blocks = printed_arguments(document.text)
        if blocks:
            return runs_printed(blocks)
    if document.kind == "shell":
        return _runs_of_script(document, variables)
    if argument_groups(document.mapping):
        return runs_of(document.mapping)
    if GROUP in document.mapping:
        raise RunConfigError.of(
            f"{document.path}: {GROUP}",
            "must be a mapping of arguments to their values",
            document.mapping[GROUP],
            "Write --num-layers: 4, for example.",
        )
    return [Arguments(label=GROUP)]


def _runs_of_script(document: Document, variables: Mapping[str, str]) -> list[Arguments]:
    model = model_arguments(document.text, document.path)
    started = launches(document.text, document.path, {**model.variables, **variables})
    runs: list[Arguments] = []
    for launch in started:
        if is_megatron(launch):
            runs += runs_of([launch])
    if not runs:
        raise no_run_of_megatron(document.path, started)
    for run in runs:
        run.path = document.path
        run.read_too = model.read_too
        if run.framework is not None and run.framework.name == SLIME_OR_MILES:
            run.framework = table_of_clone(Path(document.path)) or run.framework
    return runs


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRun:
    """A run of a file."""

    written: Arguments
    """The arguments as they are written."""
    values: ArgumentValues
    """The arguments by their names."""
    replaced: Mapping[str, Any]
    """Sizes below 1, which those of a checkpoint replace."""
    is_started: bool
    """Whether the file starts a program with the arguments."""
    is_inference: bool
    """Whether the program trains nothing."""
    open_ends: tuple[str, ...]
    """Words and files that may hold further arguments."""

    @classmethod
    def of(cls, written: Arguments, document: Document) -> Self:
        """Return a run of a file by its arguments."""
        program = written.launch.program
        values = values_of(written.options)
        replaced = _sizes_of_a_checkpoint(values, program)
        for name in replaced:
            del values.known[name]
        is_shell = document.kind == "shell"
        open_ends: list[str] = []
        if is_shell:
            open_ends += [source for source in written.elsewhere if not is_named(source)]
            open_ends += map(str, written.launch.unread_sources)
        return cls(
            written=written,
            values=values,
            replaced=replaced,
            is_started=is_shell and bool(written.launch.line),
            is_inference=_trains_nothing(program, document),
            open_ends=tuple(dict.fromkeys(open_ends)),
        )

    def require_arguments(self, path: str) -> None:
        """Refuse a file without arguments of a training; UnreadFileError."""
        values = self.values
        if self.open_ends and not values.known:
            rule = "takes all arguments of Megatron-LM from elsewhere"
            source = self.open_ends[0]
            place = f"{path}: {self.written.label}"
            sentence = f"{place}: {rule}, got {source!r:.80}. Give the log of the run."
            raise UnreadFileError(sentence, kind="all arguments come from elsewhere")
        if not any(fields_of(name) for name in values.all):
            rule = "must hold arguments of Megatron-LM's training"
            argument: object = next(iter(values.known), {})
            place = f"{path}: {self.written.label or 'arguments'}"
            sentence = f"{place}: {rule}, got {argument!r:.80}. Give a file of its arguments."
            raise UnreadFileError(sentence, kind="no arguments of Megatron-LM's training")


def _trains_nothing(program: str, document: Document) -> bool:
    """Return whether a program evaluates a checkpoint or generates text, by its name."""
    is_by_name = INFERENCE.search(program) is not None or EVALUATION.search(program) is not None
    return is_by_name or document.mapping.get("MODE") == "inference"


def _sizes_of_a_checkpoint(values: ArgumentValues, program: str) -> dict[str, Any]:
    """Return the sizes below 1 of an evaluation, which those of the checkpoint replace."""
    sizes: dict[str, Any] = {}
    if "load" in values.all and EVALUATION.search(program):
        for name in SIZES:
            if _is_below_1(values.known.get(name)):
                sizes[name] = values.known[name]
    return sizes


def _is_below_1(value: object) -> bool:
    number = number_of_text(str(value))
    return isinstance(number, int | float) and number < 1
