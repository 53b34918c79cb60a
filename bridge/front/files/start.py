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

from bridge.front.files.reading import Derived
from bridge.rules.fields import DEFAULTS, whole_number


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
        held = self.sections.get(role)
        given = held.get(name) if isinstance(held, Mapping) else None
        return DEFAULTS.get(role, {}).get(name, self.own_fields.get(path)) if given is None else given

    def states(self, path: str) -> bool:
        """Return whether the file, or an override, states a setting."""
        role, _, name = path.partition(".")
        held = self.sections.get(role)
        return isinstance(held, Mapping) and held.get(name) is not None

    def has(self, section: str) -> bool:
        """Return whether a section is there and not empty."""
        return bool(self.sections.get(section))

    def size(self, name: str) -> int:
        """Return a size of the model's parallel layout, at least 1."""
        return max(1, whole_number(self.value(f"model.{name}")) or 1)

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks."""
        return self.size("tensor_model_parallel_size")

    @property
    def pipeline(self) -> int:
        """Pipeline stages."""
        return self.size("pipeline_model_parallel_size")

    @property
    def is_interleaved(self) -> bool:
        """Whether a stage has several chunks by the field itself; a layout that implies them is read later."""
        return self.pipeline > 1 and self.size("virtual_pipeline_model_parallel_size") > 1

    @property
    def is_replicated(self) -> bool:
        """Whether there is more than one data-parallel rank; without a number of GPUs, as the file or as usual."""
        if self.gpus is None:
            return (whole_number(self.value("comm_overlap.data_parallel_size")) or 2) > 1
        return self.gpus // (self.tensor * self.pipeline * self.size("context_parallel_size")) > 1

    @property
    def is_overlapped(self) -> bool:
        """Whether `comm_overlap` decides about the communication of data-parallel ranks."""
        return self.has("comm_overlap") and bool(self.value("ddp.use_distributed_optimizer"))

    @property
    def is_fsdp(self) -> bool:
        """Whether Megatron-FSDP, the established version of it, runs."""
        on = self.value("dist.use_megatron_fsdp") or self.value("ddp.use_megatron_fsdp")
        return bool(on) and (self.value("ddp.megatron_fsdp_version") or 1) == 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One value that a framework sets at start."""

    path: str
    when: Callable[[Start], bool]
    """The condition."""
    value: Any
    """The value, or a function of it."""
    because: str
    """The condition in words, as a clause or a setting's name."""
    source: str
    """File and function of the framework."""

    def value_at(self, start: Start) -> Any:
        """Return the value that is set."""
        return self.value(start) if callable(self.value) else self.value


def derived(
    sections: dict[str, Any],
    own_fields: Mapping[str, Any],
    gpus: int | None,
    *,
    framework: str,
    rows: Sequence[Row],
) -> tuple[Derived, ...]:
    """Write into the sections what a framework sets at the start of a run with them, and return it."""
    start = Start(sections=sections, own_fields=own_fields, gpus=gpus)
    found: dict[str, Derived] = {}
    for row in rows:
        before = start.value(row.path)
        if not row.when(start):
            continue
        value = row.value_at(start)
        if value == before:
            continue
        role, _, name = row.path.partition(".")
        stated = found[row.path].stated if row.path in found else before
        sections[role] = {**(sections.get(role) or {}), name: value}
        found[row.path] = Derived(path=row.path, value=value, stated=stated, because=row.because, framework=framework)
    return tuple(one for one in found.values() if one.value != one.stated)
