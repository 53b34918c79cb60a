"""`apply_startup_rows`: the values that a framework sets when a run starts, as rows of a table.

    row = START_ROWS[0]
    row.path, row.because    # ddp.overlap_grad_reduce, comm_overlap
    row.source               # training/comm_overlap.py: ...
    apply_startup_rows(sections, own_fields, target, START_ROWS)

A row applies if its condition holds. Its value then replaces the value in the file. The rows are
applied in their order, so that a condition sees the values of the rows before it. A value that the
file has already is not reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.preflight.file_reading import DerivedValue
from bridge.target.fields import OWNER_DEFAULTS, parse_integer
from bridge.target.target import Target
from bridge.target.versions import Version


@dataclass(frozen=True, kw_only=True, slots=True)
class StartupSettings:
    """The settings of a run that the conditions and values of rows read."""

    sections: Mapping[str, Any]
    """model, optimizer and ddp with their fields."""
    own_fields: Mapping[str, Any]
    """Dotted key of a setting that only the framework has -> its value."""
    gpus: int | None
    """GPUs of the run; None if they are not known."""
    core_release: Version | None = None
    """Release of Megatron Core; None if it is not known."""

    def value(self, path: str) -> Any:
        """Return the value of a setting: as it is stated, or Megatron's default, or None."""
        owner_name, _, name = path.partition(".")
        stated = self.stated(path)
        if stated is not None:
            return stated
        return OWNER_DEFAULTS.get(owner_name, {}).get(name, self.own_fields.get(path))

    def stated(self, path: str) -> Any:
        """Return the value that the file, or an override, states for a setting; None if none does."""
        owner_name, _, name = path.partition(".")
        section = self.sections.get(owner_name)
        if not isinstance(section, Mapping):
            return None
        return section.get(name)

    def size(self, name: str) -> int:
        """Return a size of the model; 1 if it is not stated."""
        return max(1, parse_integer(self.value(f"model.{name}")) or 1)


def is_megatron_fsdp(settings: StartupSettings) -> bool:
    """Return whether version 1 of Megatron-FSDP runs, which is the default version."""
    is_on = settings.value("dist.use_megatron_fsdp") or settings.value("ddp.use_megatron_fsdp")
    return bool(is_on) and (settings.value("ddp.megatron_fsdp_version") or 1) == 1


Condition = str | Callable[[StartupSettings], object] | None
"""A setting that has to be on, or a function whose result has to be true. None: always."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartupRow:
    """One value that a framework sets when a run starts."""

    path: str
    """The setting, such as `ddp.overlap_grad_reduce`."""
    value: Any
    """The value, or a function of `StartupSettings` that returns it."""
    when: Condition = None
    because: str
    """The condition in words: a clause, or the name of a setting."""
    source: str
    """File and function of the framework that set the value."""
    is_default: bool = False
    """Whether the value is set only if nothing states the setting."""
    set_by: str = ""
    """The framework that sets the value; empty: the framework whose arguments the settings are."""

    def applies(self, settings: StartupSettings) -> bool:
        """Return whether the framework sets the value for a run with these settings."""
        if self.is_default and settings.stated(self.path) is not None:
            return False
        if self.when is None:
            return True
        if isinstance(self.when, str):
            return bool(settings.value(self.when))
        return bool(self.when(settings))


def make_startup_rows(
    values: Mapping[str, Any], when: Condition = None, *, because: str = "", **columns: Any
) -> tuple[StartupRow, ...]:
    """Return a row for each of several values with the same condition.

    Args:
        values: Setting -> the value that is set.
        because: The condition in words; empty: the name of the setting that has to be on.
        columns: The other columns, which are the same for each row.
    """
    reason = because or str(when).rpartition(".")[2]
    rows: list[StartupRow] = []
    for path, value in values.items():
        rows.append(StartupRow(path=path, value=value, when=when, because=reason, **columns))
    return tuple(rows)


def apply_startup_rows(
    sections: dict[str, Any],
    own_fields: Mapping[str, Any],
    target: Target,
    rows: Sequence[StartupRow],
) -> tuple[DerivedValue, ...]:
    """Write the values that a framework sets when a run starts into the sections of the run.

    Args:
        sections: The sections, which are changed.
        own_fields: Dotted key of a setting that only the framework has -> its value.
        target: The GPUs and the release of Megatron Core.
        rows: The rows of the framework.

    Returns:
        The values that differ from those of the file.
    """
    settings = StartupSettings(
        sections=sections,
        own_fields=own_fields,
        gpus=target.count,
        core_release=target.mcore,
    )
    values: dict[str, DerivedValue] = {}
    for row in rows:
        if not row.applies(settings):
            continue
        before = settings.value(row.path)
        value = row.value
        if callable(value):
            value = value(settings)
        if value == before:
            continue
        stated = before
        if row.path in values:  # an earlier row has replaced the value of the file
            stated = values[row.path].stated
        owner_name, _, name = row.path.partition(".")
        sections[owner_name] = {**(sections.get(owner_name) or {}), name: value}
        source = ""
        if row.set_by:
            source = row.source
        values[row.path] = DerivedValue(
            path=row.path,
            value=value,
            stated=stated,
            because=row.because,
            set_by=row.set_by,
            source=source,
        )
    return tuple(derived for derived in values.values() if derived.value != derived.stated)
