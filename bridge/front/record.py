"""The record of a run in its folder: the config after the sync, and the fields that the precision changed in it."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import TYPE_CHECKING, Any

import yaml

from bridge.front.run_folder import is_first_process
from bridge.precision.dtypes import dtype_token
from bridge.report.sync_table import render_sync

if TYPE_CHECKING:
    from pathlib import Path

    from bridge.sync.report import SyncReport
    from bridge.training.config import ConfigContainer

__all__ = ["plain_container", "plain_value", "record"]


def record(run_dir: Path, config: ConfigContainer, report: SyncReport | None) -> None:
    """Write ``config.yaml`` and, where there is a report, ``sync.txt`` and ``sync.json`` into the run's folder.

    Only the first process of a launch writes.

    Args:
        run_dir: Is made where it does not exist.
        config: The run after `runtime_config_update`.
        report: What that returned.
    """
    if not is_first_process():
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    text = "# The run as it was: every field, after the precision was written into it.\n"
    text += yaml.safe_dump(plain_container(config), sort_keys=False)
    (run_dir / "config.yaml").write_text(text)
    if report is not None:
        (run_dir / "sync.txt").write_text(render_sync(report))
        (run_dir / "sync.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")


def plain_container(config: ConfigContainer) -> dict[str, Any]:
    """Return every field of every section as plain data: dtypes as tokens, functions and enums by name."""
    sections = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    precision = sections.pop("mixed_precision")
    sections.pop("precision_choice")  # how it was chosen is in findings.json; this file says what to run
    stated = precision.to_dict() if hasattr(precision, "to_dict") else precision
    return {"mixed_precision": stated, **{name: plain_value(section) for name, section in sections.items()}}


def plain_value(value: Any) -> Any:
    """Return a value of a config as plain data."""
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value, str) else value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return dtype_token(value)
    if isinstance(value, dict):
        return {str(key): plain_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(inner) for inner in value]
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value) if not field.name.startswith("_"))
        return {name: plain_value(getattr(value, name)) for name in names}
    return getattr(value, "__name__", None) or repr(value)
