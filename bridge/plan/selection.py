"""`select_modules`: the modules that each row of `modules`, or each foreign matcher, selects.

A row of `modules` matches names in the whole model. A matcher of Megatron's file matches names
within each model chunk of each pipeline stage: ``decoder.layers.0`` is the first layer of every
chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.errors import close_matches
from bridge.model.layout import ParallelLayout
from bridge.precision.matchers import Matcher, QuantRecipe, get_chunk_recipe
from bridge.precision.module_row import find_absent_layers
from bridge.precision.module_schemes import make_row_matchers
from bridge.rules.module_selection import (
    ModuleSelection,
    PlacedModule,
    RowSelection,
    StageDependentMatcher,
)

if TYPE_CHECKING:
    from bridge.plan.precision_plan import PrecisionPlan

UNREAD_KINDS = ("embedding", "router", "norm", "head")
COMPARED_STAGES = (1, 2, 4, 8)
"""Numbers of pipeline stages under which a foreign recipe is compared."""


def select_modules(plan: PrecisionPlan) -> ModuleSelection:
    """Return the modules that each row or matcher of a plan selects."""
    modules = _place_modules(plan, plan.parallel)
    num_layers = plan.shape.num_layers
    recipes = plan.settings.recipes
    if plan.module_rows:
        rows = make_row_matchers(plan.module_rows, num_layers, run=plan.settings.format)
        return _apply_matchers((rows,), modules, num_layers, is_foreign=False)
    selection = _apply_matchers(recipes, modules, num_layers, is_foreign=True)
    if len(recipes) != 1:
        return selection
    return replace(selection, other_stages=tuple(_compare_other_stages(plan, selection)))


def _place_modules(plan: PrecisionPlan, parallel: ParallelLayout) -> list[PlacedModule]:
    """Return every module of a plan, with its place under a layout."""
    places = parallel.split_layers(plan.shape.num_layers)
    place_of: dict[int, tuple[int, int]] = {}
    for chunk, place in enumerate(places):
        for local, index in enumerate(place.layers):
            place_of[index] = (chunk, local)
    last_chunk = len(places) - 1
    for chunk, place in enumerate(places):
        if place.mtp:
            last_chunk = chunk
            break
    modules: list[PlacedModule] = []
    for layer in plan.layers:
        number = None
        if layer.number is not None:
            number = layer.number - 1
            chunk, local = place_of[number]
        elif layer.label == "embedding":
            chunk, local = 0, 0
        else:
            chunk, local = last_chunk, 0
        for module in layer.modules:
            placed = PlacedModule(
                layer=layer.label,
                number=number,
                module=module.name,
                kind=module.kind,
                path=plan.paths.path(layer.label, number or 0, module.name),
                name_in_chunk=plan.paths.path(layer.label, local, module.name),
                chunk=chunk,
                is_low_precision=layer.low,
                scheme=module.scheme,
            )
            modules.append(placed)
    return modules


def _apply_matchers(
    recipes: Sequence[QuantRecipe],
    modules: Sequence[PlacedModule],
    num_layers: int,
    *,
    is_foreign: bool,
) -> ModuleSelection:
    """Return the modules that each matcher selects. The first matcher decides their precision."""
    by_module: dict[PlacedModule, list[str]] = {}
    unselected: list[PlacedModule] = []
    for module in modules:
        recipe = get_chunk_recipe(recipes, module.chunk)
        path = module.name_in_chunk if is_foreign else module.path
        names: list[str] = []
        if recipe is not None:
            names = [matcher.name for matcher in recipe.matchers if matcher.matches(path)]
        by_module[module] = names
        if module.kind == "linear" and not names:
            unselected.append(module)
    matchers: dict[str, Matcher] = {}
    for recipe in recipes:
        for matcher in recipe.matchers:
            matchers.setdefault(matcher.name, matcher)
    rows = []
    for matcher in matchers.values():
        rows.append(_collect_selected(matcher, by_module, num_layers))
    return ModuleSelection(
        rows=tuple(rows), is_foreign=is_foreign, unselected=tuple(unselected), num_layers=num_layers
    )


def _collect_selected(
    matcher: Matcher, by_module: Mapping[PlacedModule, Sequence[str]], num_layers: int
) -> RowSelection:
    """Return the modules of a row or matcher.

    `by_module` names the rows or matchers that select each module, in order.
    """
    taken: list[PlacedModule] = []
    shadowed: list[PlacedModule] = []
    shadowing: dict[str, None] = {}
    unread: list[PlacedModule] = []
    reached: set[int | None] = set()
    for module, names in by_module.items():
        if matcher.name not in names:
            continue
        reached.add(module.number)
        if module.kind in UNREAD_KINDS:
            unread.append(module)
        if module.kind != "linear":
            continue
        if names[0] == matcher.name:
            taken.append(module)
        else:
            shadowed.append(module)
            shadowing[names[0]] = None
    nearest: tuple[str, ...] = ()
    if not taken and not shadowed:
        nearest = _find_nearest(matcher.select, list(by_module))
    beyond = find_absent_layers(matcher.layers, num_layers)
    missed = []
    for layer in matcher.layers:
        if layer not in beyond and layer % num_layers not in reached:
            missed.append(layer)
    return RowSelection(
        matcher=matcher,
        taken=tuple(taken),
        shadowed=tuple(shadowed),
        shadowed_by=tuple(shadowing),
        unread=tuple(unread),
        similar_names=nearest,
        absent_layers=tuple(beyond),
        unmatched_layers=tuple(missed),
    )


def _find_nearest(pattern: str, modules: Sequence[PlacedModule]) -> tuple[str, ...]:
    """Return the names of linear layers that look like the last literal part of a pattern."""
    parts = pattern.replace("*", ".").replace(": ", ".").split(".")
    words = [part for part in parts if part and not part.isdecimal()]
    if not words:
        return ()
    names: dict[str, None] = {}
    for module in modules:
        if module.kind == "linear":
            names[module.path.rpartition(".")[2]] = None
    return tuple(close_matches(words[-1], list(names)))


def _compare_other_stages(
    plan: PrecisionPlan, here: ModuleSelection
) -> list[StageDependentMatcher]:
    """Return the matchers that mean other layers under another number of pipeline stages.

    The other number is 1. If the run has a single stage, the other number is greater.
    """
    num_layers = plan.shape.num_layers
    is_single = plan.parallel.pipeline * plan.parallel.virtual == 1
    stages = 0
    for size in COMPARED_STAGES:
        if (size > 1) == is_single and num_layers % size == 0:
            stages = size
            break
    if not stages:
        return []
    modules = _place_modules(plan, ParallelLayout(pipeline=stages))
    there = _apply_matchers(plan.settings.recipes, modules, num_layers, is_foreign=True)
    differing: list[StageDependentMatcher] = []
    for row, other_row in zip(here.rows, there.rows, strict=True):
        if row.numbers != other_row.numbers:
            differing.append(
                StageDependentMatcher(row=row, stages=stages, numbers=other_row.numbers)
            )
    return differing
