"""`derived`: the values that a framework sets at the start of a run, by rows of a table.

    row = ROWS[0]
    row.path, row.because, row.source      # ddp.overlap_grad_reduce, comm_overlap, training/comm_overlap.py: ...

A row applies where its condition holds, and its value takes the place of the one in the file. Rows are applied in
order; a value that is there already is not reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.preflight.file_reading import Derived
from bridge.target.fields import DEFAULTS, whole_number


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The settings of a run that the rows ask about."""

    sections: Mapping[str, Any]
    own_fields: Mapping[str, Any]
    gpus: int | None
    """GPUs of the run; None: not known."""

    def value(self, path: str) -> Any:
        """Return a setting's value, Megatron's default where there is none."""
        role, _, name = path.partition(".")
        given = self.stated(path)
        return (
            DEFAULTS.get(role, {}).get(name, self.own_fields.get(path)) if given is None else given
        )

    def stated(self, path: str) -> Any:
        """Return the value that the file, or an override, states for a setting; None where neither states one."""
        role, _, name = path.partition(".")
        held = self.sections.get(role)
        return held.get(name) if isinstance(held, Mapping) else None

    def size(self, name: str) -> int:
        """Return a size of the model, at least 1."""
        return max(1, whole_number(self.value(f"model.{name}")) or 1)


def is_fsdp(start: Start) -> bool:
    """Return whether Megatron-FSDP, the established version of it, runs."""
    on = start.value("dist.use_megatron_fsdp") or start.value("ddp.use_megatron_fsdp")
    return bool(on) and (start.value("ddp.megatron_fsdp_version") or 1) == 1


Condition = str | Callable[[Start], Any] | None
"""A setting that has to be on, a function, or None: always."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
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
    """It counts only where nothing states the setting."""
    set_by: str = ""
    """The framework that sets it; empty: the one whose arguments or classes the settings are."""

    def applies(self, start: Start) -> bool:
        """Return whether the value is set at the start of a run."""
        if self.is_default and start.stated(self.path) is not None:
            return False
        return self.when is None or bool(
            start.value(self.when) if isinstance(self.when, str) else self.when(start)
        )


def rows(
    values: Mapping[str, Any], when: Condition = None, *, because: str = "", **columns: Any
) -> tuple[Row, ...]:
    """Return a row for each of the values of one condition; the name of a setting that has to be on is the reason."""
    reason = because or str(when).rpartition(".")[2]
    return tuple(
        Row(path=path, value=value, when=when, because=reason, **columns)
        for path, value in values.items()
    )


def derived(
    sections: dict[str, Any],
    own_fields: Mapping[str, Any],
    gpus: int | None,
    applied: Sequence[Row],
) -> tuple[Derived, ...]:
    """Write into the sections what a framework sets at the start of a run with them, and return it."""
    start = Start(sections=sections, own_fields=own_fields, gpus=gpus)
    found: dict[str, Derived] = {}
    for row in applied:
        if not row.applies(start):
            continue
        before, value = (
            start.value(row.path),
            row.value(start) if callable(row.value) else row.value,
        )
        if value == before:
            continue
        role, _, name = row.path.partition(".")
        stated = found[row.path].stated if row.path in found else before
        sections[role] = {**(sections.get(role) or {}), name: value}
        is_framework = bool(row.set_by)
        source = row.source if is_framework else ""
        found[row.path] = Derived(
            path=row.path,
            value=value,
            stated=stated,
            because=row.because,
            set_by=row.set_by,
            source=source,
        )
    return tuple(one for one in found.values() if one.value != one.stated)
