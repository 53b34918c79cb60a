"""`find_other_model_kind`: whether the model of a run of Megatron-LM is other than a language model's decoder.

    find_other_model_kind(written, values)    # OtherModelKind(title="BERT", evidence="pretrain_bert.py")

Such a model has layers that cannot be planned here. It is recognised by an option that only it has,
or by the name of the program.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import NamedTuple

from bridge.read.megatron_lm.argument_values import ArgumentValues
from bridge.read.megatron_lm.flags import format_option
from bridge.read.megatron_lm.written_arguments import WrittenArguments

OPTIONS_OF_MODEL: dict[str, tuple[str, ...]] = {
    "a vision model": (
        "img_h",
        "img_w",
        "patch_dim",
        "vision_pretraining",
        "freeze_ViT",
        "language_model_type",
    ),
    "BERT": ("bert_no_binary_head",),
    "an encoder and a decoder": ("encoder_num_layers", "decoder_num_layers", "decoder_seq_length"),
    "RETRO": ("retro_add_retriever", "retro_project_dir"),
    "a heterogeneous model": (
        "heterogeneous_layers_config_path",
        "heterogeneous_layers_config_encoded_json",
    ),
}
"""Kind of a model -> options that only this kind has."""
OPTIONS_WITHOUT_DEFAULT = (
    "decoder_num_layers",
    "retro_project_dir",
    "heterogeneous_layers_config_path",
)
"""Options of `OPTIONS_OF_MODEL` that a run of another model prints as None, so that a printed value is
evidence. The other options have defaults."""
PROGRAMS_OF_MODEL = {
    "BERT": r"bert",
    "an encoder and a decoder": r"t5",
    "a vision model": r"vlm|vision|multimodal|mimo|llava|clip",
    "RETRO": r"retro",
    "a retriever": r"ict|biencoder|realm",
}
"""Kind of a model -> a pattern for the names of the programs that train it."""
TASKS_OF_MODEL = {
    "BERT": ("RACE", "MNLI", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE"),
    "a retriever": ("ICT-ZEROSHOT-NQ", "RETRIEVER-EVAL", "RET-FINETUNE-NQ"),
}
"""Kind of a model -> values of `--task` of tasks/main.py that train or evaluate it.

Source: Megatron-LM of 2024-02 and Megatron-DeepSpeed 4efb479d tasks/main.py.
"""
NO_PLAN_REASON = (
    "{path}: describes {title}, whose layers cannot be planned, got {evidence!r}. "
    "Give a run of a language model."
)


class OtherModelKind(NamedTuple):
    """The kind of a model that is no language model's decoder."""

    title: str
    """The name of the kind in messages."""
    evidence: str
    """The option, or the name of the program, by which it is recognised."""

    def format_no_plan_reason(self, path: str) -> str:
        """Return the sentence that says why a run of this model has no plan.

        Args:
            path: Path of the run's file.
        """
        return NO_PLAN_REASON.format(path=path, title=self.title, evidence=self.evidence)


def find_other_model_kind(
    written: WrittenArguments, values: ArgumentValues
) -> OtherModelKind | None:
    """Return the kind of a model that is no language model's decoder; None for such a decoder.

    Args:
        written: The arguments as they are written.
        values: The arguments by their names.
    """
    kind = _find_kind_by_options(written, values)
    if kind is None:
        kind = _find_kind_by_task(values)
    if kind is None:
        kind = _find_kind_by_program(written, values)
    return kind


def _find_kind_by_options(
    written: WrittenArguments, values: ArgumentValues
) -> OtherModelKind | None:
    """Return the kind of model that has an option of the run.

    A run prints the options of every kind of model. So a printed option with a default is no
    evidence.
    """
    for title, options in OPTIONS_OF_MODEL.items():
        for name in options:
            is_evidence = name in OPTIONS_WITHOUT_DEFAULT or written.printed is None
            if is_evidence and name in values.known:
                return OtherModelKind(title, format_option(name))
    return None


def _find_kind_by_task(values: ArgumentValues) -> OtherModelKind | None:
    """Return the kind of model of the task that `--task` names."""
    task = values.all.get("task")
    for title, tasks in TASKS_OF_MODEL.items():
        if task in tasks:
            return OtherModelKind(title, f"--task {task}")
    return None


def _find_kind_by_program(
    written: WrittenArguments, values: ArgumentValues
) -> OtherModelKind | None:
    """Return the kind of model that the name of the program, or `--model-provider`, stands for."""
    program = PurePosixPath(written.launch.name).name
    provider = str(values.known.get("model_provider", ""))
    for title, pattern in PROGRAMS_OF_MODEL.items():
        for name in (program, provider):
            if re.search(rf"(?<![a-z])(?:{pattern})(?![a-z])", name):
                return OtherModelKind(title, name)
    return None
