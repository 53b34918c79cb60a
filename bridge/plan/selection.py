"""Which modules each row of `modules`, or each matcher of a foreign per-module recipe, takes under a run's layout.

A row of `modules` is asked for names in the whole model, a matcher of Megatron's file for names within each model chunk
of each pipeline stage: ``decoder.layers.0`` of such a file is the first layer of every chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from bridge.errors import close_matches
from bridge.plan.module_paths import recipe_of
from bridge.plan.modules import modules_of
from bridge.precision.modules import HIGH
from bridge.precision.quant_recipe import EVALUATION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.precision.modules import ModuleRow
    from bridge.precision.quant_recipe import QuantRecipe
    from bridge.rules.shape.parallel import Parallel

UNREAD = ("embedding", "router", "norm", "head")
OTHER_STAGES = (1, 2, 4, 8)
"""Pipeline sizes that a foreign recipe is compared under."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A module of a layer."""

    layer: str
    number: int | None
    """The layer's number from 0 over the whole model; None for embedding, MTP and output."""
    module: str
    kind: str
    path: str
    local: str
    """Its name within its model chunk."""
    chunk: int
    is_low: bool
    scheme: str | None
    """The scaling scheme of its GEMMs in the plan; None: none of them is in FP8 or FP4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A row or matcher."""

    name: str
    pattern: str
    precision: str
    """A scheme, bf16 for no FP8 and FP4, or kitchen for a payload of that library."""
    evaluation: str | None = None
    """The same outside of training; None: that of training."""
    takes: Callable[[Taken], bool]
    layers: tuple[int, ...] = ()
    """Numbers of the layers that it names, as they are stated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selected:
    """The modules that one row or matcher selects."""

    entry: Entry
    taken: tuple[Taken, ...]
    shadowed: tuple[Taken, ...]
    """Linear layers that it selects and an earlier one takes."""
    by: tuple[str, ...]
    unread: tuple[Taken, ...]
    """Modules that it selects and that read no per-module recipe."""
    nearest: tuple[str, ...]
    """Names of modules that look like the pattern, where it selects none."""
    missed: tuple[int, ...]
    """Layers that it names, as it states them, and in which it selects no module."""

    @property
    def name(self) -> str:
        """The row's number, or the matcher's name."""
        return self.entry.name

    @property
    def is_empty(self) -> bool:
        """Whether it selects no linear layer at all."""
        return not self.taken and not self.shadowed

    @property
    def is_hidden(self) -> bool:
        """Whether earlier ones take every linear layer that it selects."""
        return not self.taken and bool(self.shadowed)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the layers that it selects linear layers of."""
        return tuple(dict.fromkeys(one.number for one in (*self.taken, *self.shadowed) if one.number is not None))


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """A foreign matcher that means other layers under another pipeline size."""

    row: Selected
    stages: int
    there: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModuleSelection:
    """The rows or matchers of a run, in order."""

    rows: tuple[Selected, ...]
    is_foreign: bool
    """They are of a foreign recipe, whose names are those within a chunk."""
    left: tuple[Taken, ...]
    num_layers: int
    elsewhere: tuple[Elsewhere, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each row of `modules` that takes no linear layer, or none in a layer that it names."""
        found = []
        for row in () if self.is_foreign else self.rows:
            what = f"Row {row.name} of modules ({row.entry.pattern}) takes"
            if row.is_empty:
                found.append(f"{what} no linear layer of this model.")
            elif row.missed:
                found.append(f"{what} nothing in layer {', '.join(map(str, row.missed))}.")
        return tuple(found)


def module_selection(plan: PrecisionPlan) -> ModuleSelection:
    """Return which modules each row or matcher of a plan takes."""
    modules, num_layers = _modules(plan, plan.parallel), plan.shape.num_layers
    recipes = plan.settings.recipes
    if plan.module_rows:
        entries = [_row_entry(number, row, num_layers) for number, row in enumerate(plan.module_rows)]
        return _selection(entries, modules, num_layers)
    found = _selection(_entries(recipes), modules, num_layers, is_foreign=True)
    return replace(found, elsewhere=tuple(_elsewhere(plan, found)) if len(recipes) == 1 else ())


def _row_entry(number: int, row: ModuleRow, num_layers: int) -> Entry:
    patterns = row.patterns(num_layers)
    return Entry(
        name=str(number),
        pattern=str(row),
        precision=row.precision.scheme or HIGH,
        evaluation=(row.evaluation.scheme or HIGH) if row.evaluation is not None else None,
        takes=lambda module: any(fnmatchcase(module.path, pattern) for pattern in patterns),
        layers=row.layer_numbers,
    )


def _entries(recipes: Sequence[QuantRecipe]) -> list[Entry]:
    """Return the matchers of a foreign recipe; each chunk has its own where there are several recipes."""
    found: dict[str, Entry] = {}
    for recipe in recipes:
        for matcher in recipe.matchers:
            evaluation = recipe.effect_of(matcher.config, EVALUATION)
            entry = Entry(
                name=matcher.name,
                pattern=matcher.pattern,
                precision=_precision(recipe, matcher.config),
                evaluation=(evaluation.scheme or HIGH) if evaluation is not None else None,
                takes=_matching(recipes, matcher.name),
            )
            found.setdefault(matcher.name, entry)
    return list(found.values())


def _precision(recipe: QuantRecipe, config: str) -> str:
    effect = recipe.effect_of(config)
    if effect is not None:
        return effect.scheme or HIGH
    return "kitchen" if "kitchen_config_type" in (recipe.configs.get(config) or {}) else "unknown"


def _matching(recipes: Sequence[QuantRecipe], name: str) -> Callable[[Taken], bool]:
    def takes(module: Taken) -> bool:
        recipe = recipe_of(recipes, module.chunk)
        matchers = recipe.matchers if recipe is not None else ()
        return any(one.name == name and fnmatchcase(module.local, one.pattern) for one in matchers)

    return takes


def _modules(plan: PrecisionPlan, parallel: Parallel) -> list[Taken]:
    places = parallel.places(plan.shape.num_layers)
    at = {index: (chunk, local) for chunk, place in enumerate(places) for local, index in enumerate(place.layers)}
    mtp = next((chunk for chunk, place in enumerate(places) if place.mtp), len(places) - 1)
    found: list[Taken] = []
    for layer in plan.layers:
        schemes = {module.name: module.scheme for module in layer.modules}
        number = layer.number - 1 if layer.number is not None else None
        chunk, local = at[number] if number is not None else (0 if layer.label == "embedding" else mtp, 0)
        found.extend(
            Taken(
                layer=layer.label,
                number=number,
                module=module.name,
                kind=module.kind,
                path=plan.paths.path(layer.label, number or 0, module.name),
                local=plan.paths.path(layer.label, local, module.name),
                chunk=chunk,
                is_low=layer.low,
                scheme=schemes.get(module.name),
            )
            for module in modules_of(plan.shape, layer.label, layer.kind)
        )
    return found


def _selection(
    entries: Sequence[Entry], modules: Sequence[Taken], num_layers: int, *, is_foreign: bool = False
) -> ModuleSelection:
    selected = {entry.name: [module for module in modules if entry.takes(module)] for entry in entries}
    first: dict[Taken, str] = {}
    for name, found in selected.items():
        for module in found:
            if module.kind == "linear":
                first.setdefault(module, name)
    return ModuleSelection(
        rows=tuple(_selected(entry, selected[entry.name], first, modules, num_layers) for entry in entries),
        is_foreign=is_foreign,
        left=tuple(module for module in modules if module.kind == "linear" and module not in first),
        num_layers=num_layers,
    )


def _selected(
    entry: Entry, found: Sequence[Taken], first: dict[Taken, str], modules: Sequence[Taken], num_layers: int
) -> Selected:
    """Return one row: `found` is all that it selects, `first` says which row takes a linear layer."""
    linears = [module for module in found if module in first]
    shadowed = [module for module in linears if first[module] != entry.name]
    reached = {module.number for module in found}
    return Selected(
        entry=entry,
        taken=tuple(module for module in linears if first[module] == entry.name),
        shadowed=tuple(shadowed),
        by=tuple(dict.fromkeys(first[module] for module in shadowed)),
        unread=tuple(module for module in found if module.kind in UNREAD),
        nearest=() if linears else _nearest(entry.pattern, modules),
        missed=tuple(
            number
            for number in entry.layers
            if not -num_layers <= number < num_layers or number % num_layers not in reached
        ),
    )


def _nearest(pattern: str, modules: Sequence[Taken]) -> tuple[str, ...]:
    """Return the names of linear layers that look like the last literal part of a pattern."""
    names = list(dict.fromkeys(one.path.rpartition(".")[2] for one in modules if one.kind == "linear"))
    words = [word for word in pattern.replace("*", ".").replace(": ", ".").split(".") if word and not word.isdecimal()]
    return tuple(close_matches(words[-1], names)) if words else ()


def _elsewhere(plan: PrecisionPlan, here: ModuleSelection) -> list[Elsewhere]:
    """Return the matchers that mean other layers in one stage, or in several where the run has one."""
    is_single = plan.parallel.pipeline * plan.parallel.virtual == 1
    others = [size for size in OTHER_STAGES if (size > 1) == is_single and plan.shape.num_layers % size == 0]
    if not others:
        return []
    layout = replace(
        plan.parallel,
        pipeline=others[0],
        virtual=1,
        layout=None,
        first_stage_layers=None,
        last_stage_layers=None,
        embedding_counts=False,
        loss_counts=False,
    )
    there = _selection([row.entry for row in here.rows], _modules(plan, layout), plan.shape.num_layers)
    return [
        Elsewhere(row=mine, stages=others[0], there=other.numbers)
        for mine, other in zip(here.rows, there.rows, strict=True)
        if mine.numbers != other.numbers
    ]
