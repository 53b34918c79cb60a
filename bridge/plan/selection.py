"""Which modules each row of `modules`, or each matcher of a foreign per-module recipe, takes under a run's layout.

A row of `modules` is asked for names in the whole model, a matcher of Megatron's file for names within each model chunk
of each pipeline stage: ``decoder.layers.0`` of such a file is the first layer of every chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.errors import close_matches
from bridge.model.layout import Parallel
from bridge.precision.grouping import grouped
from bridge.precision.matchers import Matcher, Matchers, recipe_of
from bridge.precision.module_schemes import row_matchers
from bridge.precision.modules import layers_beyond
from bridge.rules.module_selection import Elsewhere, ModuleSelection, Selected, Taken

if TYPE_CHECKING:
    from bridge.plan.precision_plan import PrecisionPlan

UNREAD = ("embedding", "router", "norm", "head")
OTHER_STAGES = (1, 2, 4, 8)
"""Pipeline sizes that a foreign recipe is compared under."""


def module_selection(plan: PrecisionPlan) -> ModuleSelection:
    """Return which modules each row or matcher of a plan takes."""
    modules, num_layers = _modules(plan, plan.parallel), plan.shape.num_layers
    recipes = plan.settings.recipes
    if plan.module_rows:
        rows = row_matchers(plan.module_rows, num_layers, run=plan.settings.format)
        return _selection((rows,), modules, num_layers, is_foreign=False)
    found = _selection(recipes, modules, num_layers, is_foreign=True)
    return replace(found, elsewhere=tuple(_elsewhere(plan, found)) if len(recipes) == 1 else ())


def _modules(plan: PrecisionPlan, parallel: Parallel) -> list[Taken]:
    places = parallel.places(plan.shape.num_layers)
    at = {
        index: (chunk, local)
        for chunk, place in enumerate(places)
        for local, index in enumerate(place.layers)
    }
    mtp = [chunk for chunk, place in enumerate(places) if place.mtp] or [len(places) - 1]
    outside = {"embedding": (0, 0)}
    found: list[Taken] = []
    for layer in plan.layers:
        number = layer.number - 1 if layer.number is not None else None
        chunk, local = outside.get(layer.label, (mtp[0], 0)) if number is None else at[number]
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
                scheme=module.scheme,
            )
            for module in layer.modules
        )
    return found


def _selection(
    recipes: Sequence[Matchers], modules: Sequence[Taken], num_layers: int, *, is_foreign: bool
) -> ModuleSelection:
    by_module: dict[Taken, list[str]] = {}
    for module in modules:
        recipe, path = recipe_of(recipes, module.chunk), module.local if is_foreign else module.path
        by_module[module] = (
            [one.name for one in recipe.matchers if one.takes(path)] if recipe is not None else []
        )
    matchers = grouped((one.name, one) for recipe in recipes for one in recipe.matchers)
    return ModuleSelection(
        rows=tuple(_selected(same[0], by_module, num_layers) for same in matchers.values()),
        is_foreign=is_foreign,
        left=tuple(
            module for module, names in by_module.items() if module.kind == "linear" and not names
        ),
        num_layers=num_layers,
    )


def _selected(
    matcher: Matcher, by_module: Mapping[Taken, Sequence[str]], num_layers: int
) -> Selected:
    """Return the modules of one row or matcher; `by_module` names those that take each module, in order."""
    found = [module for module, names in by_module.items() if matcher.name in names]
    linears = [module for module in found if module.kind == "linear"]
    shadowed = [module for module in linears if by_module[module][0] != matcher.name]
    reached, beyond = {module.number for module in found}, layers_beyond(matcher.layers, num_layers)
    return Selected(
        matcher=matcher,
        taken=tuple(module for module in linears if module not in shadowed),
        shadowed=tuple(shadowed),
        by=tuple(dict.fromkeys(by_module[module][0] for module in shadowed)),
        unread=tuple(module for module in found if module.kind in UNREAD),
        nearest=() if linears else _nearest(matcher.select, list(by_module)),
        beyond=tuple(beyond),
        missed=tuple(
            one for one in matcher.layers if one not in beyond and one % num_layers not in reached
        ),
    )


def _nearest(pattern: str, modules: Sequence[Taken]) -> tuple[str, ...]:
    """Return the names of linear layers that look like the last literal part of a pattern."""
    names = list(
        dict.fromkeys(one.path.rpartition(".")[2] for one in modules if one.kind == "linear")
    )
    words = [
        word
        for word in pattern.replace("*", ".").replace(": ", ".").split(".")
        if word and not word.isdecimal()
    ]
    return tuple(close_matches(words[-1], names)) if words else ()


def _elsewhere(plan: PrecisionPlan, here: ModuleSelection) -> list[Elsewhere]:
    """Return the matchers that mean other layers in one stage, or in several where the run has one."""
    is_single = plan.parallel.pipeline * plan.parallel.virtual == 1
    others = [
        size
        for size in OTHER_STAGES
        if (size > 1) == is_single and plan.shape.num_layers % size == 0
    ]
    if not others:
        return []
    modules = _modules(plan, Parallel(pipeline=others[0]))
    there = _selection(plan.settings.recipes, modules, plan.shape.num_layers, is_foreign=True)
    return [
        Elsewhere(row=mine, stages=others[0], there=other.numbers)
        for mine, other in zip(here.rows, there.rows, strict=True)
        if mine.numbers != other.numbers
    ]
