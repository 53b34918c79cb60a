"""`find_other_model_kind`: whether a run of Megatron-LM is of a model other than a language model's decoder.

    other_kind(run, values)    # OtherKind(title="BERT", evidence="pretrain_bert.py")

Such a model has layers that cannot be planned here. An option that only it has shows it, or the
name of the program.
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
"""Model that has no plan here -> options that only it has."""
OPTIONS_WITHOUT_DEFAULT = (
    "decoder_num_layers",
    "retro_project_dir",
    "heterogeneous_layers_config_path",
)
"""Options of `OPTIONS` that a run without such a model prints as None; other options have defaults."""
PROGRAMS_OF_MODEL = {
    "BERT": r"bert",
    "an encoder and a decoder": r"t5",
    "a vision model": r"vlm|vision|multimodal|mimo|llava|clip",
    "RETRO": r"retro",
    "a retriever": r"ict|biencoder|realm",
}
"""Model that has no plan here -> the names of the programs that train it."""
NO_PLAN_REASON = (
    "{path}: describes {title}, whose layers cannot be planned, got {evidence!r}. "
    "Give a run of a language model."
)


class OtherModelKind(NamedTuple):
    """The kind of a model that is no language model."""

    title: str
    evidence: str
    """The option or the program that shows it."""

    def sentence(self, path: str) -> str:
        """Return why a run of this model has no plan."""
        return NO_PLAN_REASON.format(path=path, title=self.title, evidence=self.evidence)


def find_other_model_kind(run: WrittenArguments, values: ArgumentValues) -> OtherModelKind | None:
    """Return the kind of a model with other layers than a language model's decoder; None without one."""
    for title, options in OPTIONS_OF_MODEL.items():
        for name in options:
            # A run prints the options of every model, those of another one with their defaults.
            is_evidence = name in OPTIONS_WITHOUT_DEFAULT or run.printed is None
            if is_evidence and name in values.known:
                return OtherModelKind(title, format_option(name))
    program = PurePosixPath(run.launch.name).name
    provider = str(values.known.get("model_provider", ""))
    for title, pattern in PROGRAMS_OF_MODEL.items():
        for name in (program, provider):
            if re.search(rf"(?<![a-z])(?:{pattern})(?![a-z])", name):
                return OtherModelKind(title, name)
    return None
