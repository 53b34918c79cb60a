"""Megatron Bridge's YAML of a run: a saved `ConfigContainer`, or the ``run_config.yaml`` of a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.front.files.reading import MEGATRON_BRIDGE, FileReading
from bridge.front.problems import KEYS

if TYPE_CHECKING:
    from collections.abc import Mapping


def is_of(whole: Mapping[str, Any]) -> bool:
    """Return whether Megatron Bridge wrote a file of these contents: it names the class of each object."""
    return "_target_" in whole


def read(whole: Mapping[str, Any]) -> FileReading:
    """Return what a file of these contents says of a run."""
    sections = {key: value for key, value in _data(whole).items() if key in KEYS}
    return FileReading(framework=MEGATRON_BRIDGE, sections=sections)


def _data(value: Any) -> Any:
    """Return the data of a Megatron Bridge YAML, with names for the functions, dtypes and enums it would build."""
    if isinstance(value, list):
        return [_data(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "_target_" in value and value.get("_call_") is False:
        return value["_target_"]
    if "_target_" in value and value.get("_args_"):
        return _data(value["_args_"][-1])  # an enum's value; the attribute that getattr reads
    return {str(key): _data(item) for key, item in value.items() if key not in ("_target_", "_call_", "_args_")}
