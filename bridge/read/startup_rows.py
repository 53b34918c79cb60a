"""`apply_startup_rows`: the values that a framework sets at the start of a run, by rows of a table.

    row = ROWS[0]
    row.path, row.because    # ddp.overlap_grad_reduce, comm_overlap
    row.source               # training/comm_overlap.py: ...
    derived(sections, own_fields, gpus, ROWS)

A row applies where its condition holds, and its value takes the place of the value in the file.
Rows are applied in order; a value that is there already is not reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.preflight.file_reading import DerivedValue
from bridge.target.fields import OWNER_DEFAULTS, parse_integer


@dataclass(frozen=True, kw_only=True, slots=True)
class StartupSettings:
    """The settings of a run that the rows ask about."""

    sections: Mapping[str, Any]
    """model, optimizer and ddp with their fields."""
    own_fields: Mapping[str, Any]
    """Setting of the framework that Megatron does not have, by its dotted key -> its value."""
    gpus: int | None
    """GPUs of the run, or None where they are not known."""

    def value(self, path: str) -> Any:
        """Return a setting's value, Megatron's default where there is none."""
        role, _, name = path.partition(".")
        stated = self.stated(path)
        if stated is not None:
            return stated
        return OWNER_DEFAULTS.get(role, {}).get(name, self.own_fields.get(path))

    def stated(self, path: str) -> Any:
        """Return the value that the file, or an override, states for a setting, or None."""
        role, _, name = path.partition(".")
        section = self.sections.get(role)
        if not isinstance(section, Mapping):
            return None
        return section.get(name)

    def size(self, name: str) -> int:
        """Return a size of the model, at least 1."""
        return max(1, parse_integer(self.value(f"model.{name}")) or 1)


def is_megatron_fsdp(start: StartupSettings) -> bool:
    """Return whether Megatron-FSDP, the established version of it, runs."""
    on = start.value("dist.use_megatron_fsdp") or start.value("ddp.use_megatron_fsdp")
    return bool(on) and (start.value("ddp.megatron_fsdp_version") or 1) == 1


Condition = str | Callable[[StartupSettings], Any] | None
"""A setting that has to be on, or a function that tells; None stands for always."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartupRow:
    """One value that a framework sets at start."""

    path: str
    value: Any
    """The value, or a function of `Start`."""
    when: Condition = None
    because: str
    """The condition in words, as a clause or a setting's name."""
    source: str
    """File and function of the framework."""
    is_default: bool = False
    """Whether it counts only where nothing states the setting."""
    set_by: str = ""
    """The framework that sets it; empty for the framework whose arguments the settings are."""

    def applies(self, start: StartupSettings) -> bool:
        """Return whether the value is set at the start of a run."""
        if self.is_default and start.stated(self.path) is not None:
            return False
        if self.when is None:
            return True
        if isinstance(self.when, str):
            return bool(start.value(self.when))
        return bool(self.when(start))


def make_startup_rows(
    values: Mapping[str, Any], when: Condition = None, *, because: str = "", **columns: Any
) -> tuple[StartupRow, ...]:
    """Return a row for each of several values with the same condition.

    The reason is `because`, or the name of the setting that has to be on.
    """
    reason = because or str(when).rpartition(".")[2]
    made: list[StartupRow] = []
    for path, value in values.items():
        made.append(StartupRow(path=path, value=value, when=when, because=reason, **columns))
    return tuple(made)


def apply_startup_rows(
    sections: dict[str, Any],
    own_fields: Mapping[str, Any],
    gpus: int | None,
    rows: Sequence[StartupRow],
) -> tuple[DerivedValue, ...]:
    """Write the values that a framework sets at the start of a run into its sections.

    Returns:
        The values that differ from those of the file.
    """
    start = StartupSettings(sections=sections, own_fields=own_fields, gpus=gpus)
    values: dict[str, DerivedValue] = {}
    for row in rows:
        if not row.applies(start):
            continue
        before = start.value(row.path)
        value = row.value
        if callable(value):
            value = value(start)
        if value == before:
            continue
        owner_name, _, name = row.path.partition(".")
        stated = before
        if row.path in values:
            stated = values[row.path].stated
        sections[owner_name] = {**(sections.get(owner_name) or {}), name: value}
        source = row.source if row.set_by else ""
        values[row.path] = DerivedValue(
            path=row.path,
            value=value,
            stated=stated,
            because=row.because,
            set_by=row.set_by,
            source=source,
        )
    return tuple(setting for setting in values.values() if setting.value != setting.stated)
