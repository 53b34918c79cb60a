"""`apply_startup_values`: adds the values that a framework sets when a run starts to its reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bridge.preflight.file_reading import (
    MEGATRON_BRIDGE,
    MEGATRON_CORE,
    MEGATRON_LM,
    PRECISION_BRIDGE,
    FileReading,
)
from bridge.read.debug_features import find_debugger_no_plan_reason
from bridge.read.layer_source import find_kitchen_no_plan_reason
from bridge.read.startup_rows import (
    StartupRow,
    StartupSettings,
    apply_startup_rows,
    make_startup_rows,
)
from bridge.target.target import Target

MEGATRON_CORE_SOURCE = "megatron-core 0.16.1 transformer_config.py __post_init__"
GPUS_SENTENCE = "The number of GPUs: "
"""Beginning of the sentences that ask for a target with a number of GPUs."""
OLD_SWITCH = "moe_layer_recompute"
"""Old switch of the recomputation of experts, which Megatron Core translates."""


def _recomputes_experts(settings: StartupSettings) -> bool:
    """Return whether the old switch is on. Megatron Core refuses it with full recomputation."""
    is_full = settings.value("model.recompute_granularity") == "full"
    return bool(settings.value(f"model.{OLD_SWITCH}")) and not is_full


def _add_experts(settings: StartupSettings) -> list[str]:
    """Return the recomputed modules with the layer of experts."""
    modules = list(settings.value("model.recompute_modules") or ["core_attn"])
    if "moe" not in modules:
        modules.append("moe")
    return modules


CORE_ROWS = make_startup_rows(
    {"model.recompute_granularity": "selective", "model.recompute_modules": _add_experts},
    _recomputes_experts,
    because=OLD_SWITCH,
    source=MEGATRON_CORE_SOURCE,
    set_by=MEGATRON_CORE,
)
"""Values that the classes of Megatron Core set themselves, whatever framework is above them."""


def apply_startup_values(
    reading: FileReading, sections: dict[str, Any], target: Target
) -> FileReading:
    """Write the values that the framework sets when the run starts into the sections of the run.

    Args:
        reading: The file as it was read.
        sections: Its sections with the overrides; they are changed.
        target: The GPUs and packages of the run.

    Returns:
        The reading with these values. Sentences about unknown values, and the reason against a
        plan, are dropped if an override now states their setting.
    """
    if reading.framework == PRECISION_BRIDGE:
        return reading
    rows = _get_startup_rows(reading, sections)
    if reading.underlying_framework:
        from bridge.read.framework import start_rows as framework_start

        reading = framework_start.add_framework_variables(reading, target)
        rows = framework_start.add_framework_rows(reading.framework, rows, sections)
    rows = [*rows, *CORE_ROWS]
    if target.mcore is None:
        target = replace(target, mcore=reading.release.version)
    values = apply_startup_rows(sections, reading.own_fields, target, rows)
    settings = StartupSettings(sections=sections, own_fields={}, gpus=target.count)
    unknown: list[str] = []
    for sentence in _list_unknown_values(reading, sections.get("model") or {}, target):
        asks_for_gpus = sentence.startswith(GPUS_SENTENCE)
        if asks_for_gpus and target.count is not None:
            continue
        if not _is_about_stated_setting(sentence, settings):
            unknown.append(sentence)
    no_plan_reason = reading.uncertainty.no_plan_reason
    if no_plan_reason is not None and _is_about_stated_setting(no_plan_reason, settings):
        no_plan_reason = None
    no_plan_reason = (
        no_plan_reason
        or find_debugger_no_plan_reason(sections)
        or find_kitchen_no_plan_reason(sections)
    )
    uncertainty = replace(
        reading.uncertainty, open_points=tuple(unknown), no_plan_reason=no_plan_reason
    )
    training_gpus = reading.training_gpus
    if reading.settings_of == MEGATRON_LM:
        from bridge.read.megatron_lm import start_rows as megatron_lm_start

        training_gpus = megatron_lm_start.find_stated_ranks(reading.own_fields)
    return replace(reading, derived=values, uncertainty=uncertainty, training_gpus=training_gpus)


def _get_startup_rows(reading: FileReading, sections: dict[str, Any]) -> list[StartupRow]:
    """Return the rows of Megatron Bridge or Megatron-LM, if the settings are those of it."""
    if reading.settings_of == MEGATRON_BRIDGE:
        from bridge.read.megatron_bridge import start_rows as megatron_bridge_start

        return list(megatron_bridge_start.START_ROWS)
    if reading.settings_of == MEGATRON_LM:
        from bridge.read.megatron_lm import start_rows as megatron_lm_start

        return megatron_lm_start.select_rows(sections)
    return []


def _list_unknown_values(
    reading: FileReading, model: Mapping[str, Any], target: Target
) -> Sequence[str]:
    """Return the sentences about values that only the run decides."""
    if reading.settings_of != MEGATRON_LM:
        return reading.uncertainty.open_points
    from bridge.read.megatron_lm import start_rows as megatron_lm_start

    return [
        *reading.uncertainty.open_points,
        *megatron_lm_start.describe_open_settings(reading.own_fields, model, target.count),
    ]


def _is_about_stated_setting(sentence: str, settings: StartupSettings) -> bool:
    """Return whether a sentence is about a setting that is stated now: "model.num_layers: ..."."""
    setting = sentence.partition(":")[0]
    return settings.stated(setting) is not None
