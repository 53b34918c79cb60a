"""`refuse_without_sizes`: refuses a file that does not state the sizes of its model.

"train.sh: does not state model.num_layers, or only when it runs. Add model.num_layers=VALUE."
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.errors import RunConfigError
from bridge.preflight.file_reading import MEGATRON_LM, FileReading

REQUIRED_SIZES = ("num_layers", "hidden_size", "num_attention_heads")
"""Sizes without which nothing of a model can be computed."""


def refuse_without_sizes(reading: FileReading, model: Mapping[str, Any], path: str) -> None:
    """Refuse a model whose sizes a file of another framework does not state.

    Args:
        reading: The file as it was read.
        model: The section of the model, with the overrides.
        path: The name of the file in messages.

    Raises:
        RunConfigError: A size is not stated, or the layers are not those that the file describes.
    """
    if reading.uncertainty.other_model_kind is not None:
        raise RunConfigError(str(reading.uncertainty.no_plan_reason))
    absent = [f"model.{name}" for name in REQUIRED_SIZES if model.get(name) is None]
    if not absent:
        return
    names = ", ".join(absent)
    overrides = " ".join(f"{name}=VALUE" for name in absent)
    uncertainty = reading.uncertainty
    decider = uncertainty.unread_sources.get(absent[0]) or uncertainty.open_values.get(absent[0])
    if reading.settings_of == MEGATRON_LM:
        raise RunConfigError(
            f"{path}: does not state {names}, or only when it runs. Add {overrides}."
        )
    if decider is not None:
        remedy = f"Add {overrides}."
        no_sizes_reason = reading.checkpoint_model.no_sizes_reason
        if no_sizes_reason is not None:
            remedy = f"{no_sizes_reason} {remedy}"
        elif reading.checkpoint_model.may_be_stated:
            remedy = f"Add --context checkpoint=FOLDER, which has its config.json; or {overrides}."
        raise RunConfigError(f"{path}: does not state {names}, which {decider} decides. {remedy}")
