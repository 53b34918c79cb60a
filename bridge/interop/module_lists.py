"""Lists of module names: the filters of torchtitan and torchao, written from the rows of a precision and read as rows.

A name of such a list takes every module whose full name contains it, so that ``layers.1`` takes layer 12 too.
Source: torchtitan 0.3.0 components/quantization/utils.py and mx.py, torchao 0.18.0 float8/float8_linear_utils.py.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.errors import WrongValueError, close_matches, did_you_mean
from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ContextKey
from bridge.precision.foreign_names import DENSE, LATENT, SHARED
from bridge.precision.matchers import HIGH, Chosen
from bridge.precision.module_schemes import ModuleSchemes

ANY_LAYER = 9999
"""Stands for a layer that no name of a list mentions."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(\.?)")


NUM_LAYERS = ContextKey("num_layers", "layers of the model, where a precision chooses single layers", use=("export",))


def schemes_for(
    builder: ExportBuilder, num_layers: int | None, *, available: Collection[str], setting: str
) -> ModuleSchemes | None:
    """Return the schemes of a precision's linear layers, and map or report what chooses them.

    None where the choice cannot be written, which is reported. `available` are the schemes of the other system;
    `setting` will hold the choice.
    """
    config = builder.config
    fields = [name for name in ("modules", "first_last_layers_bf16") if builder.values[name]]
    try:
        schemes = ModuleSchemes.of(config, num_layers)
    except WrongValueError as error:
        for field in fields:
            detail = f"{error.rule}, got num_layers={num_layers!r}"
            builder.report(field, "unsupported", detail, "Give --context num_layers=32, say.")
        return None
    for field in fields:
        builder.map(field, setting)
    if config.first_last_layers_bf16:
        for count in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            builder.map(count, setting)
    report_rows(builder, schemes, available)
    return schemes


def report_rows(builder: ExportBuilder, schemes: ModuleSchemes, available: Collection[str]) -> None:
    """Report the rows that the other system runs in another precision, each with the choices that are left."""
    run = schemes.run.scheme if schemes.run is not None else HIGH
    for row in schemes.matchers.matchers:
        scheme = row.precision
        if scheme not in (HIGH, *available):
            detail = f"{row.select} is to run in {scheme}, which {builder.system} has no converter for; it is in BF16"
            builder.report("modules", "semantics", detail, f"BF16 there; drop the row for {run} there.")
        if row.evaluation not in (None, row.training):
            detail = f"{row.select} is to run in {row.outside} outside of training, and keeps {scheme} there"
            builder.report("modules", "semantics", detail, f"{scheme} there; drop `evaluation` to mean that.")


def name_lists(schemes: ModuleSchemes, names: Mapping[str, Sequence[str]]) -> dict[Chosen | None, list[str]]:
    """Return the names of the modules that run in each scheme, None standing for the dtype of the run.

    A name that would take modules of another scheme too, as ``wq`` takes ``wq_a``, is left out.

    `names` maps Megatron's name within a layer to the other system's.
    """
    layers = range(schemes.num_layers or 1)
    chosen = {name: tuple(schemes.chosen(layer, name) for layer in layers) for name in names}
    found: dict[Chosen | None, list[str]] = {}
    for name, theirs in names.items():
        alike = [other for other, others in names.items() if any(own in one for own in theirs for one in others)]
        if any(chosen[other] != chosen[name] for other in alike):
            continue
        for one in dict.fromkeys(chosen[name]):
            numbers = [layer for layer in layers if chosen[name][layer] == one]
            places = [""] if len(numbers) == len(layers) else [f"layers.{number}." for number in numbers]
            found.setdefault(one, []).extend(place + own for place in places for own in theirs)
    return found


@dataclass(frozen=True, kw_only=True)
class ListReading:
    """The modules that a list of names takes."""

    taken: tuple[tuple[int, str], ...]
    """Layer and Megatron's name, `ANY_LAYER` standing for all layers that no name mentions."""
    has_head: bool
    """The output layer is taken."""
    groups: tuple[tuple[str, ...], ...]
    """Of `DENSE`, `SHARED` and `LATENT`, the first and those that the list names by themselves."""

    def layers_of(self, name: str) -> tuple[int, ...]:
        """Return the layers in which a module is taken."""
        return tuple(layer for layer, own in self.taken if own == name)


def read_list(
    builder: ImportBuilder,
    setting: str,
    listed: Sequence[str],
    names: Mapping[str, Sequence[str]],
    others: Sequence[str],
    *,
    taken_in: str,
) -> ListReading:
    """Return the modules that a list takes, and report the names in it that take others than they seem to.

    `names` is as for `name_lists`; `others` are further linear layers of the other system, its output layer first;
    `taken_in` is the precision of what the list takes.
    """
    mentioned = sorted({int(found[1]) for one in listed for found in _LAYER.finditer(one)})
    taken: dict[tuple[int, str], None] = {}
    used: set[str] = set()
    for layer in (*mentioned, ANY_LAYER):
        for name, theirs in names.items():
            hits = {own: [one for one in listed if _takes(one, f"layers.{layer}.{own}")] for own in theirs}
            used.update(one for found in hits.values() for one in found)
            whole = [own for own, found in hits.items() if any(not _is_inside(one, own) for one in found)]
            if len(whole) == len(theirs):
                taken[layer, name] = None
            elif any(hits.values()):
                taken[layer, name] = None
                part = ", ".join(dict.fromkeys(one for found in hits.values() for one in found))
                end = name.rpartition(".")[2]
                detail = f"{part} is a part of {end}, which is one GEMM in Megatron; all of it was taken"
                remedy = f"All of {end} in {taken_in} here; drop its row for the precision of the others."
                builder.report(setting, list(listed), "semantics", detail, remedy)
    used.update(one for one in listed for other in others if one in other)
    for one in dict.fromkeys(listed):
        found = _LAYER.search(one)
        if found is not None and not found[2] and one.endswith(found[1]):
            detail = f"{one} takes layer {found[1]} and each whose number begins so, {found[1]}0 say"
            builder.report(setting, one, "semantics", detail, f"Write {one}. for that layer alone.")
        if one not in used:
            known = [own for theirs in names.values() for own in theirs]
            near = did_you_mean(close_matches(one, (*known, *others)))
            detail = f"no linear layer of {builder.system} has {one} in its name"
            builder.report(setting, one, "dead knob", detail, near or f"The output layer is {others[0]}.")
    alone = [group for group in (SHARED, LATENT) if any(_names_only(one, group, names) for one in listed)]
    return ListReading(taken=tuple(taken), has_head=any(one in others[0] for one in listed), groups=(DENSE, *alone))


def _names_only(listed: str, group: Sequence[str], names: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a name of a list takes modules of a group and none of another."""
    taken = {name for name, theirs in names.items() if any(listed.endswith(own) or listed in own for own in theirs)}
    return bool(taken) and taken.issubset(group)


def _takes(listed: str, name: str) -> bool:
    """Return whether a name of a list takes a module, or a part of it where `name` ends with a dot."""
    return listed in name or _is_inside(listed, name.partition(".")[2].partition(".")[2])


def _is_inside(listed: str, name: str) -> bool:
    """Return whether a name of a list takes only a part of the modules that `name` begins."""
    return name.endswith(".") and name in listed and not listed.endswith((name, f"{name}wqkv"))


def rows_of(reading: ListReading, *, taken: str, left: str, run: str) -> list[dict[str, Any]]:
    """Return rows of `modules` for a list, without rows for layers that only some models have.

    `taken` is the precision of what it takes, a scheme or bf16, `left` that of all others, and `run` that of a
    module which no row selects.
    """
    rows: list[dict[str, Any]] = []
    for name in (name for group in reading.groups for name in group):
        layers, module = reading.layers_of(name), _selected(reading, name)
        if module is None:
            continue
        everywhere = ANY_LAYER in layers
        numbers = [layer for layer in layers if layer != ANY_LAYER]
        if numbers and not everywhere:
            rows.append({"select": {"layers": numbers, "module": module}, "precision": taken})
        rest = taken if everywhere else left
        if rest != run:
            rows.append({"select": f"*.{module}", "precision": rest})
    return rows


def _selected(reading: ListReading, name: str) -> str | None:
    """Return the end of a module's name that selects it in a row; None where the row of its twin selects it too."""
    twin = {**dict(zip(DENSE[2:], SHARED, strict=True)), **dict(zip(SHARED, DENSE[2:], strict=True))}.get(name)
    end = name.rpartition(".")[2]
    if twin is None or SHARED not in reading.groups:
        return end
    if reading.layers_of(twin) != reading.layers_of(name):
        return name
    return end if name in DENSE else None
