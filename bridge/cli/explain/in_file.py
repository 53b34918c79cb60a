"""`precision-bridge explain FIELD --config FILE`: a setting in the run that a file describes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from bridge.errors import UnknownFieldError, close_matches, did_you_mean
from bridge.rules.sync_row import SyncRow
from bridge.sync.field_routes import ROUTES
from bridge.target.fields import OWNER_FIELDS

if TYPE_CHECKING:
    from bridge.preflight.run import Run


def explain_in_file(key: str, run: Run) -> dict[str, Any]:
    """Return the values of a field of Megatron's configs in a run, and the source of each value.

    Args:
        key: The name of the field. The name of a config may precede it. A field of the precision
            means the fields of the configs that it is written to.
        run: The run that a file describes.

    Raises:
        UnknownFieldError: No config has such a field.
    """
    section, _, name = key.rpartition(".")
    config_fields = []
    for owner_name, field in _find_config_fields(name):
        if owner_name in OWNER_FIELDS and section in ("", "mixed_precision", owner_name):
            config_fields.append((owner_name, field))
    if not config_fields:
        raise _make_unknown_setting_error(key, name)
    rows = {(row.owner, row.attribute): row for row in run.prediction.rows}
    settings = []
    for owner_name, field in config_fields:
        row = rows.get((owner_name, field))
        settings.append(_setting_to_dict(owner_name, field, run, row))
    return {
        "field": key,
        "config": run.name,
        "settings": settings,
        "reading": run.reading.to_dict(),
    }


def _find_config_fields(name: str) -> list[tuple[str, str]]:
    """Return (config, field) for each config with a field.

    Args:
        name: A field of the precision, or a field of Megatron's configs.
    """
    written: list[tuple[str, str]] = []
    for route in ROUTES:
        if name == route.field and route.attribute:
            written.append((route.owner, route.attribute))
    if written:
        return written
    return [(owner_name, name) for owner_name in OWNER_FIELDS if name in OWNER_FIELDS[owner_name]]


def _setting_to_dict(owner_name: str, field: str, run: Run, row: SyncRow | None) -> dict[str, Any]:
    """Return the value of a field in a run, and its source, as plain data.

    Args:
        owner_name: The config that has the field.
        row: The row of the sync that writes the field. None: the sync does not write it.
    """
    path = f"{owner_name}.{field}"
    source = "default"
    if row is not None:
        source = row.by.name
    elif run.section(owner_name).get(field) is not None:
        source = run.origin_of(path)
    decider = None
    # A recipe decides its fields. Other values may come from a source that no file states.
    if row is None or row.by.name == owner_name:
        decider = run.find_decider(path)
    return {
        "key": path,
        "value": run.prediction.values[owner_name].get(field),
        "by": source,
        "decided_by": decider,
        "dropped": run.reading.describe_dropped(path),
    }


def _make_unknown_setting_error(key: str, name: str) -> UnknownFieldError:
    """Return the error about a key that names no field of Megatron's configs."""
    known: list[str] = []
    for fields in OWNER_FIELDS.values():
        known.extend(fields)
    matches = close_matches(name, known)
    hint = did_you_mean(matches) or "Name one of Megatron."
    return UnknownFieldError(f"Unknown field {key!r}. {hint}", matches)


def format_in_file(content: Mapping[str, Any], notes: Iterable[str]) -> str:
    """Return the sentences about a field in a run, and the notes on its file.

    Args:
        content: The result of `explain_in_file`.
        notes: The notes on the file.
    """
    lines = []
    for setting in content["settings"]:
        lines.append(_format_setting(setting, content["config"]))
    for note in notes:
        lines.append(f"  {note}")
    return "\n".join(lines)


def _format_setting(setting: Mapping[str, Any], config: str) -> str:
    """Return the sentences about one setting of a run."""
    key, value, decider = setting["key"], setting["value"], setting["decided_by"]
    sentence = f"{key} is {value!r} in {config}: {setting['by']}."
    if decider is not None:
        sentence = f"{key} is not known from {config}: {decider} may set it; {value!r} is assumed."
    return " ".join([sentence, *setting["dropped"]])
