"""`set_at_start`: a reading with the values that its framework sets when the run starts."""

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
from bridge.read.debug_features import unfollowed_features
from bridge.read.layer_source import unplanned_kitchen
from bridge.read.start import Row, Start, derived
from bridge.target.target import Target


def set_at_start(reading: FileReading, sections: dict[str, Any], target: Target) -> FileReading:
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
    rows = _rows_of_settings(reading, sections)
    if reading.base:
        from bridge.read.framework import start as framework_start

        reading = framework_start.with_variables(reading, target)
        rows = framework_start.with_framework(reading.framework, rows, sections)
    values = derived(sections, reading.own_fields, target.count, rows)
    start = Start(sections=sections, own_fields={}, gpus=target.count)
    unknown = [sentence for sentence in _unknown(reading, target) if not _is_about(sentence, start)]
    unplanned = reading.unplanned
    if unplanned is not None and _is_about(unplanned, start):
        unplanned = None
    unplanned = unplanned or unfollowed_features(sections) or unplanned_kitchen(sections)
    return replace(reading, derived=values, unknown=tuple(unknown), unplanned=unplanned)


def _rows_of_settings(reading: FileReading, sections: dict[str, Any]) -> list[Row]:
    """Return the rows of the program whose arguments or classes the settings are."""
    if reading.settings_of == MEGATRON_BRIDGE:
        from bridge.read.megatron_bridge import start as megatron_bridge_start

        return list(megatron_bridge_start.ROWS)
    if reading.settings_of == MEGATRON_LM:
        from bridge.read.megatron_lm import start as megatron_lm_start

        return megatron_lm_start.rows_of(sections)
    return []


def _unknown(reading: FileReading, target: Target) -> Sequence[str]:
    """Return the sentences about values that neither the file nor the framework decides."""
    if reading.settings_of != MEGATRON_LM:
        return reading.unknown
    from bridge.read.megatron_lm import start as megatron_lm_start

    return [*reading.unknown, *megatron_lm_start.left_open(reading.own_fields, target.count)]


def _is_about(sentence: str, start: Start) -> bool:
    """Return whether a sentence begins with a setting that an override states now."""
    setting = sentence.partition(":")[0]
    return start.stated(setting) is not None
