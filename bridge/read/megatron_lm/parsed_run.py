"""`ParsedRun`: a run of Megatron-LM by its arguments, before it is read as sections.

    written = list_written_arguments(document, variables)[0]
    parsed = ParsedRun.from_arguments(written, document)
    parsed.values.known, parsed.is_inference

`run_reader.py` makes the sections of it, and `open_points.py` the sentences about it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from bridge.errors import UnreadFileError
from bridge.precision.coercion import parse_number
from bridge.read.launch.notes import NoteKind
from bridge.read.megatron_lm.argument_values import ArgumentValues, parse_argument_values
from bridge.read.megatron_lm.flags import get_argument_fields
from bridge.read.megatron_lm.other_sources import READ_FILE_ARGUMENTS
from bridge.read.megatron_lm.written_arguments import INFERENCE_PROGRAMS, WrittenArguments
from bridge.read.text.document import Document

EVALUATION_PROGRAMS = re.compile(r"(?:^|/)eval_harness/|(?:^|/)eval(?:uate|uation)?\.py\Z")
"""Programs that evaluate a checkpoint."""
CHECKPOINT_SIZES = (
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedRun:
    """A run of a file, with its arguments by their names."""

    written: WrittenArguments
    """The arguments as they are written."""
    values: ArgumentValues
    """The arguments by their names."""
    replaced_sizes: Mapping[str, object]
    """Sizes below 1, which scripts of an evaluation pass as placeholders. Those of the checkpoint replace them."""
    is_started: bool
    """Whether the file starts a program with the arguments."""
    is_inference: bool
    """Whether the program trains nothing."""
    open_sources: tuple[str, ...]
    """Words and files that may hold further arguments."""

    @classmethod
    def from_arguments(cls, written: WrittenArguments, document: Document) -> Self:
        """Return a run of a file by its arguments.

        Args:
            written: The arguments as they are written.
            document: The file.
        """
        program = written.launch.program
        values = parse_argument_values(written.options)
        replaced_sizes = _find_replaced_sizes(values, program)
        for name in replaced_sizes:
            del values.known[name]
        is_shell = document.kind == "shell"
        open_sources: list[str] = []
        if is_shell:
            for source in written.sources:
                if source.file_argument not in READ_FILE_ARGUMENTS:
                    open_sources.append(source.noun)
            open_sources += map(str, written.launch.unread_sources)
        return cls(
            written=written,
            values=values,
            replaced_sizes=replaced_sizes,
            is_started=is_shell and bool(written.launch.line),
            is_inference=_trains_nothing(program, document),
            open_sources=tuple(dict.fromkeys(open_sources)),
        )

    def require_arguments(self, path: str) -> None:
        """Refuse a file without arguments of a training run.

        Raises:
            UnreadFileError: No argument is an argument of Megatron-LM's training.
        """
        values = self.values
        if self.open_sources and not values.known:
            rule = "takes all arguments of Megatron-LM from elsewhere"
            source = self.open_sources[0]
            location = f"{path}: {self.written.label}"
            sentence = f"{location}: {rule}, got {source!r:.80}. Give the log of the run."
            raise UnreadFileError(sentence, kind="all arguments come from elsewhere")
        is_described = any(get_argument_fields(name) for name in values.all)
        if not is_described and "yaml_cfg" in values.known:
            location = f"{path}: {self.written.label}"
            file = values.known["yaml_cfg"]
            sentence = (
                f"{location}: takes its arguments from the file of --yaml-cfg, got {file!r:.80}. "
                "Such files are not read. Give the log of the run."
            )
            raise UnreadFileError(sentence, kind="its arguments stand in a file of --yaml-cfg")
        if not is_described:
            rule = "must hold arguments of Megatron-LM's training"
            argument: object = next(iter(values.known), {})
            location = f"{path}: {self.written.label or 'arguments'}"
            sentence = f"{location}: {rule}, got {argument!r:.80}. Give a file of its arguments."
            for note in self.written.launch.notes:
                if note.kind is NoteKind.STRAY_OPTIONS:  # a backslash is missing
                    remedy = "End the line before it with a backslash, and nothing behind that."
                    sentence = f"{location}: {rule}, and ends before {note}. {remedy}"
            raise UnreadFileError(sentence, kind="no arguments of Megatron-LM's training")


def _trains_nothing(program: str, document: Document) -> bool:
    """Return whether a program evaluates a checkpoint or generates text, by its name."""
    is_by_name = (
        INFERENCE_PROGRAMS.search(program) is not None
        or EVALUATION_PROGRAMS.search(program) is not None
    )
    return is_by_name or document.mapping.get("MODE") == "inference"


def _find_replaced_sizes(values: ArgumentValues, program: str) -> dict[str, object]:
    """Return the sizes below 1 of an evaluation, which those of the checkpoint replace.

    Scripts pass 0 or -1 for them, since the parser requires the arguments.
    """
    sizes: dict[str, object] = {}
    if "load" in values.all and EVALUATION_PROGRAMS.search(program):
        for name in CHECKPOINT_SIZES:
            if _is_below_1(values.known.get(name)):
                sizes[name] = values.known[name]
    return sizes


def _is_below_1(value: object) -> bool:
    """Return whether a value, or the number that a text is, is below 1."""
    number = parse_number(str(value))
    return isinstance(number, int | float) and number < 1
