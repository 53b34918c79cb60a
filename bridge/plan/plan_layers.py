"""`PlanLayer`: a layer of a precision plan with its modules, and the planner that makes the layers.

Layers whose modules cannot differ share the same tuple of planned modules. So the plan of a deep
model is fast, and so is the search for equal layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from bridge.errors import RunConfigError
from bridge.model.layout import ModelChunk
from bridge.model.module_paths import ModulePaths, MtpNumbers, is_mtp_label
from bridge.model.modules import Module, list_modules
from bridge.model.shape import ModelShape
from bridge.plan.adapters import Adapter
from bridge.plan.plan_rows import PlanRow, make_module_rows
from bridge.plan.plan_settings import PlanSettings
from bridge.precision.matchers import ModulePrecision, get_chunk_recipe
from bridge.precision.operand_copies import LayerCopies

if TYPE_CHECKING:
    from bridge.precision.debug_features import DebugFeatures, LayerChanges

LOW_FORMATS = frozenset({"e4m3", "e5m2", "e2m1", "custom"})
"""Formats of FP8 and FP4 operands. The format of a factory is "custom"."""
MULTIPLYING_ITEMS = frozenset({"fprop", "dgrad", "wgrad", "qk", "pv"})
"""Items of rows that are matrix multiplications."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanModule:
    """A module of a layer with its rows."""

    name: str
    kind: str
    module: Module = field(compare=False, repr=False)
    """The module with its sizes. Modules with equal rows are folded even if their sizes differ."""
    rows: tuple[PlanRow, ...]
    scheme: str | None = None
    """The scaling scheme of its GEMMs. None: none of its GEMMs is in FP8 or FP4."""
    copies: LayerCopies | None = field(default=None, compare=False, repr=False)
    """The copies of its operands. None: none of its GEMMs is in FP8 or FP4."""

    def row(self, item: str) -> PlanRow | None:
        """Return the row of a GEMM or tensor, or None."""
        for row in self.rows:
            if row.item == item:
                return row
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLayer:
    """A layer, or the embedding or output around the layers."""

    label: str
    """The number, "embedding", "mtp 1" or "output".

    A layer inside a prediction layer of a hybrid model has "mtp 1.1".
    """
    number: int | None
    """The number in the whole model, from 1. None: the embedding, an MTP layer or the output."""
    stage: int
    chunk: int
    kind: str
    low: bool
    modules: tuple[PlanModule, ...]

    @property
    def alike(self) -> int:
        """A key that layers with the same modules share.

        It is the identity of their tuple of modules, because the planner makes a tuple once.
        """
        return id(self.modules)

    @property
    def is_mtp(self) -> bool:
        """Whether it is a multi-token-prediction layer, or a layer inside one."""
        return is_mtp_label(self.label)


class _ModulesKey(NamedTuple):
    """Everything in which the modules of two layers of a plan can differ."""

    kind: str
    low: bool
    has_frozen_router: bool = False
    chunk: int = 0
    label: str = ""
    at: int = 0
    """The number of the layer within its chunk, from 0."""


@dataclass(kw_only=True)
class LayerPlanner:
    """Makes the layers of a plan. Layers whose modules cannot differ share them."""

    shape: ModelShape
    places: Sequence[ModelChunk]
    settings: PlanSettings
    paths: ModulePaths
    adapter: Adapter | None
    is_frozen: bool
    are_routers_frozen: bool = False
    """Whether the routers of the decoder's layers are not trained. Those of MTP layers are."""
    features: DebugFeatures | None = None
    """The features of Transformer Engine's debugger. None: the debugger is off."""
    planned: dict[_ModulesKey, tuple[PlanModule, ...]] = field(default_factory=dict)
    """The planned modules of the layers so far."""

    def layers(self) -> Iterator[PlanLayer]:
        """Yield the embedding, the layers in order, the MTP layers and the output."""
        shape, settings = self.shape, self.settings
        first, last = self.places[0], self.places[-1]
        mtp = None
        for place in reversed(self.places):
            if place.embedding:
                first = place
            if place.output:
                last = place
            if place.mtp:
                mtp = place
        if mtp is None:
            mtp = last
        is_fp8 = settings.family == "fp8"
        yield self._layer("embedding", first, "embedding")
        for place in self.places:
            for at, index in enumerate(place.layers):
                low = settings.is_low_precision_layer(index, shape.num_layers)
                yield self._layer(str(index + 1), place, shape.kinds[index], low=low, at=at)
        for number in range(1, shape.mtp_layers + 1):
            yield self._layer(MtpNumbers(number).label, mtp, "mtp", low=is_fp8)
            for index, kind in enumerate(shape.mtp_kinds):
                low = is_fp8 or settings.is_low_precision_layer(index, shape.num_layers)
                yield self._layer(MtpNumbers(number, index + 1).label, mtp, kind, low=low)
        yield self._layer("output", last, "output")

    def _layer(
        self, label: str, place: ModelChunk, kind: str, *, low: bool = False, at: int = 0
    ) -> PlanLayer:
        has_frozen_router = self.are_routers_frozen and not label.startswith("mtp")
        key = _ModulesKey(kind, low, has_frozen_router)
        if self.settings.recipes or self.adapter is not None or self.features is not None:
            # The precision of a module depends on its name, and so on its layer.
            key = _ModulesKey(kind, low, has_frozen_router, self.places.index(place), label, at)
        if key not in self.planned:
            self.planned[key] = self._modules(key)
        number = None
        if label.isdigit():
            number = int(label)
        return PlanLayer(
            label=label,
            number=number,
            stage=place.stage,
            chunk=place.chunk,
            kind=kind,
            low=low,
            modules=self.planned[key],
        )

    def _modules(self, key: _ModulesKey) -> tuple[PlanModule, ...]:
        def path(name: str) -> str:
            return self.paths.path(key.label, key.at, name)

        modules = list_modules(self.shape, key.kind)
        if self.adapter is not None:
            modules = self.adapter.add_to_modules(modules, self.shape, path)
        elif self.is_frozen:
            modules = tuple(replace(module, is_frozen=True) for module in modules)
        elif key.has_frozen_router:
            modules = tuple(
                replace(module, is_frozen=module.kind == "router") for module in modules
            )
        recipe = get_chunk_recipe(self.settings.recipes, key.chunk)
        effects: list[_ModuleEffects] = []
        for module in modules:
            effect = None
            # Only Transformer Engine's linear layers read a per-module recipe.
            if recipe is not None and module.kind == "linear":
                effect = recipe.effect(path(module.name))
            effects.append(_ModuleEffects(effect, self._get_debugger_changes(module, key)))
        return _plan_modules(modules, self.settings, key.low, tuple(effects))

    def _get_debugger_changes(self, module: Module, key: _ModulesKey) -> LayerChanges | None:
        """Return the debugger's changes to a linear layer of Transformer Engine, or None."""
        if self.features is None or module.kind != "linear" or module.is_high_precision:
            return None
        name = self.paths.get_debug_name(key.label, module.name)
        if self.features.scales_tensors(name) and key.low and self.settings.scheme != "delayed":
            rule = f"needs delayed scaling, and {name} has {self.settings.scheme}"
            raise RunConfigError(f"PerTensorScaling: {rule}. Transformer Engine raises an error.")
        return self.features.find_changes(name)


class _ModuleEffects(NamedTuple):
    """The settings that change the precision of a single module."""

    recipe: ModulePrecision | None
    """The precision of a per-module recipe. None: the recipe does not match the module."""
    changes: LayerChanges | None
    """The changes of Transformer Engine's debugger. None: it does not change the module."""


@lru_cache(maxsize=512)
def _plan_modules(
    modules: tuple[Module, ...],
    settings: PlanSettings,
    low: bool,
    effects: tuple[_ModuleEffects, ...],
) -> tuple[PlanModule, ...]:
    """Return the modules with their rows. The cache makes equal layers share one result."""
    planned = []
    for module, module_effects in zip(modules, effects, strict=True):
        planned.append(_plan_module(module, settings, low=low, effects=module_effects))
    return tuple(planned)


def _is_low(row: PlanRow) -> bool:
    """Return whether a row is a GEMM that multiplies FP8 or FP4."""
    return row.item in MULTIPLYING_ITEMS and not LOW_FORMATS.isdisjoint(row.format.split(" x "))


def _plan_module(
    module: Module, settings: PlanSettings, *, low: bool, effects: _ModuleEffects
) -> PlanModule:
    """Return a module with its rows.

    Settings of a single module do not change how its weight is stored.
    """
    module_settings, is_low = settings.for_module(effects.recipe, low=low)
    if effects.changes is not None:
        module_settings = replace(module_settings, changes=effects.changes)
    rows = make_module_rows(module, module_settings, low=is_low)
    if effects != _ModuleEffects(None, None):
        stored = {row.item: row.storage for row in make_module_rows(module, settings, low=low)}
        kept_rows = []
        for row in rows:
            kept_rows.append(replace(row, storage=stored.get(row.item, row.storage)))
        rows = tuple(kept_rows)
    scheme = copies = None
    if any(map(_is_low, rows)):
        scheme = module_settings.scheme
        is_grouped = module.is_expert and module_settings.are_experts_grouped
        copies = module_settings.copies(is_grouped=is_grouped)
    return PlanModule(
        name=module.name,
        kind=module.kind,
        module=module,
        rows=rows,
        scheme=scheme,
        copies=copies,
    )
