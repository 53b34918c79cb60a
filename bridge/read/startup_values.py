"""`apply_startup_values`: a reading with the values that its framework sets when the run starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bridge.preflight.file_reading import (
    MEGATRON_BRIDGE,
    MEGATRON_LM,
    PRECISION_BRIDGE,
    FileReading,
)
from bridge.read.debug_features import find_debugger_no_plan_reason
from bridge.read.layer_source import find_kitchen_no_plan_reason
from bridge.read.startup_rows import StartupRow, StartupSettings, apply_startup_rows
from bridge.target.target import Target


def apply_startup_values(
    reading: FileReading, sections: dict[str, Any], target: Target
) -> FileReading:
    """Write into sections the values that the framework sets at the start of a run with them.

    Args:
        reading: The file as it was read.
        sections: Its sections with the overrides; they are changed.
        target: Where the run will run.

    Returns:
        The reading with these values, and with the sentences about values that stay unknown.
    """
    if reading.framework == PRECISION_BRIDGE:
        return reading
    rows = _get_startup_rows(reading, sections)
    if reading.base:
        from bridge.read.framework import start_rows as framework_start

        reading = framework_start.add_framework_variables(reading, target)
        rows = framework_start.add_framework_rows(reading.framework, rows, sections)
    values = apply_startup_rows(sections, reading.own_fields, target.count, rows)
    start = StartupSettings(sections=sections, own_fields={}, gpus=target.count)
    unknown = [
        sentence
        for sentence in _list_unknown_values(reading, target)
        if not _is_about_stated_setting(sentence, start)
    ]
    no_plan_reason = reading.no_plan_reason
    if no_plan_reason is not None and _is_about_stated_setting(no_plan_reason, start):
        no_plan_reason = None
    no_plan_reason = (
        no_plan_reason
        or find_debugger_no_plan_reason(sections)
        or find_kitchen_no_plan_reason(sections)
    )
    return replace(reading, derived=values, unknown=tuple(unknown), no_plan_reason=no_plan_reason)


def _get_startup_rows(reading: FileReading, sections: dict[str, Any]) -> list[StartupRow]:
    """Return the rows of the program whose arguments or classes the settings are."""
    if reading.settings_of == MEGATRON_BRIDGE:
        from bridge.read.megatron_bridge import start_rows as megatron_bridge_start

        return list(megatron_bridge_start.START_ROWS)
    if reading.settings_of == MEGATRON_LM:
        from bridge.read.megatron_lm import start_rows as megatron_lm_start

        return megatron_lm_start.select_rows(sections)
    return []


def _list_unknown_values(reading: FileReading, target: Target) -> Sequence[str]:
    """Return the sentences about values that neither the file nor the framework decides."""
    if reading.settings_of != MEGATRON_LM:
        return reading.unknown
    from bridge.read.megatron_lm import start_rows as megatron_lm_start

    return [
        *reading.unknown,
        *megatron_lm_start.describe_open_settings(reading.own_fields, target.count),
    ]


def _is_about_stated_setting(sentence: str, start: StartupSettings) -> bool:
    """Return whether a sentence begins with a setting that an override states now."""
    setting = sentence.partition(":")[0]
    return start.stated(setting) is not None
