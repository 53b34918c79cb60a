"""Which modules each row of `modules`, or each matcher of a foreign per-module recipe, takes under a run's layout.

A row of `modules` is asked for names in the whole model, a matcher of Megatron's file for names within each model chunk
of each pipeline stage: ``decoder.layers.0`` of such a file is the first layer of every chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from bridge.errors import close_matches
from bridge.plan.module_paths import ModulePaths, recipe_of
from bridge.plan.modules import modules_of
from bridge.precision.modules import HIGH, module_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.precision.config import PrecisionConfig
    from bridge.precision.modules import ModulePrecision
    from bridge.precision.quant_recipe import ModuleEffect, QuantRecipe
    from bridge.rules.stages import Parallel

UNREAD = {"embedding": "the embedding", "router": "the router", "norm": "norms", "head": "the output layer"}
"""Kind of a module that reads no per-module recipe -> its name in messages."""
OTHER_STAGES = (1, 2, 4, 8)
"""Pipeline sizes that a foreign recipe is compared under."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A module of a layer."""

    layer: str
    """The layer's label in the plan."""
    number: int | None
    """The layer's number from 0 over the whole model; None for embedding, MTP and output."""
    module: str
    """Its name in the plan."""
    kind: str
    path: str
    """Its name in the whole model."""
    local: str
    """Its name within its model chunk."""
    chunk: int
    """Its chunk's place in the order of execution."""
    scheme: str | None = None
    """The scaling scheme of its GEMMs in the plan; None: none of them is in FP8 or FP4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """One row or matcher, and the modules that it selects."""

    name: str
    """The row's number, or the matcher's name."""
    pattern: str
    precision: str
    """A scheme, or bf16 for no FP8 and FP4."""
    taken: tuple[Taken, ...]
    """Linear layers that it decides for."""
    shadowed: tuple[Taken, ...] = ()
    """Linear layers that it selects and an earlier one takes."""
    by: tuple[str, ...] = ()
    """Names of those earlier ones."""
    unread: tuple[Taken, ...] = ()
    """Modules that it selects and that read no per-module recipe."""
    nearest: tuple[str, ...] = ()
    """Names of modules that look like the pattern, where it selects none."""
    missed: tuple[int, ...] = ()
    """Layers that it names, as it states them, and in which it selects no module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A row or matcher that can be asked."""

    name: str
    pattern: str
    precision: str
    takes: Callable[[Taken], bool]
    layers: tuple[int, ...] = ()
    """Numbers of the layers that it names, as they are stated."""


@dataclass(frozen=True, kw_only=True)
class ModuleSelection:
    """The rows or matchers of a run, in order."""

    rows: tuple[Selected, ...]
    is_foreign: bool
    """They are of a foreign recipe, whose names are those within a chunk."""
    left: tuple[Taken, ...]
    """Linear layers that nothing selects."""
    num_layers: int
    """Layers of the whole model."""
    layers_elsewhere: tuple[tuple[str, int, tuple[int, ...], tuple[int, ...]], ...] = ()
    """Foreign matchers that mean other layers in another pipeline: name, its stages, layers here, layers there."""

    @property
    def empty(self) -> tuple[Selected, ...]:
        """Rows that select no linear layer at all."""
        return tuple(row for row in self.rows if not row.taken and not row.shadowed)

    @property
    def hidden(self) -> tuple[Selected, ...]:
        """Rows that decide for nothing, since earlier ones take every module that they select."""
        return tuple(row for row in self.rows if not row.taken and row.shadowed)

    @property
    def beyond(self) -> tuple[Selected, ...]:
        """Rows that choose FP8 or FP4 and select modules too that read no per-module recipe, without naming them."""
        return tuple(row for row in self.rows if row.precision != HIGH and row.unread and (row.taken or row.shadowed))


def module_selection(plan: PrecisionPlan, precision: PrecisionConfig | None, model: Any) -> ModuleSelection | None:
    """Return which modules each row or matcher takes; None for a run without any.

    Args:
        plan: The plan of the run.
        precision: Its precision, whose `modules` count where they are stated.
        model: Its model's fields.
    """
    paths = ModulePaths.of(model)
    rows = module_rows(precision.reading("modules")) if precision is not None else ()
    if rows:
        entries = [
            Entry(
                name=str(number),
                pattern=str(row),
                precision=_spelled(row.precision),
                takes=_matching_any(row.patterns(plan.shape.num_layers)),
                layers=row.layer_numbers,
            )
            for number, row in enumerate(rows)
        ]
        return _selection(entries, _modules(plan, plan.parallel, paths), plan.shape.num_layers, is_foreign=False)
    recipes = plan.settings.recipes
    if not recipes:
        return None
    modules = _modules(plan, plan.parallel, paths)
    found = _selection(_entries(recipes), modules, plan.shape.num_layers, is_foreign=True)
    return replace(found, layers_elsewhere=tuple(_elsewhere(plan, paths, recipes, found)))


def rows_without_module(selection: ModuleSelection | None) -> tuple[str, ...]:
    """Return one sentence for each row of `modules` that takes no linear layer, or none in a layer that it names."""
    if selection is None or selection.is_foreign:
        return ()
    notes = []
    for row in selection.rows:
        if row in selection.empty:
            notes.append(f"Row {row.name} of modules ({row.pattern}) takes no linear layer of this model.")
        elif row.missed:
            layers = ", ".join(map(str, row.missed))
            notes.append(f"Row {row.name} of modules ({row.pattern}) takes nothing in layer {layers}.")
    return tuple(notes)


def linear_modules(plan: PrecisionPlan, model: Any) -> tuple[Taken, ...]:
    """Return the linear layers of a run, which read a per-module recipe."""
    modules = _modules(plan, plan.parallel, ModulePaths.of(model))
    return tuple(module for module in modules if module.kind == "linear")


def _matching_any(patterns: Sequence[str]) -> Callable[[Taken], bool]:
    return lambda module: any(fnmatchcase(module.path, pattern) for pattern in patterns)


def _entries(recipes: Sequence[QuantRecipe]) -> list[Entry]:
    """Return the matchers of a foreign recipe; each chunk has its own where there are several recipes."""
    first: dict[str, Entry] = {}
    for recipe in recipes:
        for matcher in recipe.matchers:
            name, pattern = matcher.name, matcher.pattern
            precision = _effect_name(recipe.effect_of(matcher.config))
            first.setdefault(
                name, Entry(name=name, pattern=pattern, precision=precision, takes=_matching(recipes, name))
            )
    return list(first.values())


def _matching(recipes: Sequence[QuantRecipe], name: str) -> Callable[[Taken], bool]:
    def takes(module: Taken) -> bool:
        recipe = recipe_of(recipes, module.chunk)
        patterns = [one.pattern for one in recipe.matchers if one.name == name] if recipe is not None else []
        return any(fnmatchcase(module.local, pattern) for pattern in patterns)

    return takes


def _modules(plan: PrecisionPlan, parallel: Parallel, paths: ModulePaths) -> list[Taken]:
    """Return every module of the model under a layout, in order."""
    places = parallel.places(plan.shape.num_layers)
    chunk_of = {
        index: (chunk, place.layers.index(index)) for chunk, place in enumerate(places) for index in place.layers
    }
    mtp = next((chunk for chunk, place in enumerate(places) if place.mtp), len(places) - 1)
    found: list[Taken] = []
    for layer in plan.layers:
        label, kind = layer.label, layer.kind
        schemes = {module.name: module.scheme for module in layer.modules}
        number = int(label) - 1 if label.isdecimal() else None
        chunk, local = chunk_of[number] if number is not None else (0 if label == "embedding" else mtp, 0)
        found.extend(
            Taken(
                layer=label,
                number=number,
                module=module.name,
                kind=module.kind,
                path=paths.path(label, number or 0, module.name),
                local=paths.path(label, local, module.name),
                chunk=chunk,
                scheme=schemes.get(module.name),
            )
            for module in modules_of(plan.shape, label, kind)
        )
    return found


def _selection(
    entries: Sequence[Entry], modules: Sequence[Taken], num_layers: int, *, is_foreign: bool
) -> ModuleSelection:
    taken: dict[str, list[Taken]] = {entry.name: [] for entry in entries}
    shadowed: dict[str, list[Taken]] = {entry.name: [] for entry in entries}
    unread: dict[str, list[Taken]] = {entry.name: [] for entry in entries}
    by: dict[str, dict[str, None]] = {entry.name: {} for entry in entries}
    reached: dict[str, set[int | None]] = {entry.name: set() for entry in entries}
    left = []
    for module in modules:
        found = [entry.name for entry in entries if entry.takes(module)]
        for name in found:
            reached[name].add(module.number)
        if module.kind in UNREAD:
            for name in found:
                unread[name].append(module)
        elif module.kind == "linear" and found:
            first, *later = found
            taken[first].append(module)
            for name in later:
                shadowed[name].append(module)
                by[name][first] = None
        elif module.kind == "linear":
            left.append(module)
    rows = tuple(
        Selected(
            name=entry.name,
            pattern=entry.pattern,
            precision=entry.precision,
            taken=tuple(taken[entry.name]),
            shadowed=tuple(shadowed[entry.name]),
            by=tuple(by[entry.name]),
            unread=tuple(unread[entry.name]),
            nearest=() if taken[entry.name] or shadowed[entry.name] else _nearest(entry.pattern, modules),
            missed=tuple(
                number
                for number in entry.layers
                if (number + num_layers if number < 0 else number) not in reached[entry.name]
            ),
        )
        for entry in entries
    )
    return ModuleSelection(rows=rows, is_foreign=is_foreign, left=tuple(left), num_layers=num_layers)


def _nearest(pattern: str, modules: Sequence[Taken]) -> tuple[str, ...]:
    """Return the names of linear layers that look like the last literal part of a pattern."""
    names = list(dict.fromkeys(one.path.rpartition(".")[2] for one in modules if one.kind == "linear"))
    words = [word for word in pattern.replace("*", ".").replace(": ", ".").split(".") if word and not word.isdecimal()]
    return tuple(close_matches(words[-1], names)) if words else ()


def _elsewhere(
    plan: PrecisionPlan, paths: ModulePaths, recipes: Sequence[QuantRecipe], here: ModuleSelection
) -> list[tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
    """Return the matchers that mean other layers in one stage, or in several where the run has one."""
    if len(recipes) > 1:
        return []
    single = plan.parallel.pipeline * plan.parallel.virtual == 1
    others = [size for size in OTHER_STAGES if (size > 1 if single else size == 1)]
    size = next((size for size in others if plan.shape.num_layers % size == 0), None)
    if size is None:
        return []
    layout = replace(
        plan.parallel,
        pipeline=size,
        virtual=1,
        layout=None,
        first_stage_layers=None,
        last_stage_layers=None,
        embedding_counts=False,
        loss_counts=False,
    )
    there = _selection(_entries(recipes), _modules(plan, layout, paths), plan.shape.num_layers, is_foreign=True)
    found = []
    for mine, other in zip(here.rows, there.rows, strict=True):
        layers = _layers(mine), _layers(other)
        if layers[0] != layers[1]:
            found.append((mine.name, size, *layers))
    return found


def _layers(row: Selected) -> tuple[int, ...]:
    return tuple(dict.fromkeys(one.number for one in (*row.taken, *row.shadowed) if one.number is not None))


def _spelled(precision: ModulePrecision) -> str:
    return precision.scheme or HIGH


def _effect_name(effect: ModuleEffect | None) -> str:
    return effect.scheme or HIGH if effect is not None else "unknown"
