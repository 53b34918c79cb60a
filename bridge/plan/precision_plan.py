"""The precision plan: the formats in which layers compute, keep, reduce and save tensors.

    plan = precision_plan(get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed"), model)
    plan.format_of(2, "linear_qkv", "dgrad")     # 'e5m2 x e4m3'
    plan.low_precision_layers()                   # (2, 3, 4, 5) of 6

It is computed from config values alone, as Megatron Core reads them (0.16.1 to main of 2026-08-22;
a field that the target's version does not have counts as not set). Rules:

- Layers are numbered over the whole model, whatever pipeline stage holds them. A layer stays in the
  mode's dtype if its number is among the first or last N (fp8_utils.is_first_last_bf16_layer). In a
  hybrid model every block counts.
- Linears inside the low-precision context of a layer are quantised: attention and MLP projections,
  experts, shared experts, Mamba's in and out projection. Norms, the router, the embedding and the
  output layer are not.
- Multi-token-prediction layers enter the FP8 context without a layer number, so that first/last
  does not apply to them, and they ignore FP4 (multi_token_prediction.py). The layers inside a
  prediction layer of a hybrid model are a separate stack, numbered from 1: under FP8 all are inside
  the outer context, under FP4 each enters the context by its number there (hybrid_block.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge.errors import RunConfigError, UnknownFieldError, close_matches, did_you_mean
from bridge.model.layout import ModelChunk, ParallelLayout
from bridge.model.modules import Module, ModulePaths, list_modules
from bridge.model.shape import ModelShape
from bridge.plan.adapters import Adapter
from bridge.plan.plan_rows import PlanRow, make_module_rows
from bridge.plan.plan_settings import PlanSettings
from bridge.plan.selection import select_modules
from bridge.precision.config import PrecisionConfig
from bridge.precision.matchers import ModulePrecision, get_chunk_recipe
from bridge.precision.module_row import ModuleRow
from bridge.precision.module_row import parse_module_rows as parsed_rows
from bridge.precision.operand_copies import LayerCopies
from bridge.precision.owners import DdpOwner, ModelOwner, OptimizerOwner
from bridge.precision.statements import get_field_value
from bridge.registry.nearest_recipe import format_nearest_label, format_owner_label
from bridge.registry.registry import get_mixed_precision_config
from bridge.rules.module_selection import ModuleSelection
from bridge.sync.prediction import Prediction, predict
from bridge.target.target import Target
from bridge.target.versions import Version

if TYPE_CHECKING:
    from bridge.precision.debug_features import DebugFeatures, LayerChanges

ROW_COLUMNS = tuple(field.name for field in fields(PlanRow))
LOW_FORMATS = frozenset({"e4m3", "e5m2", "e2m1", "custom"})
OMITTED_SETTINGS = frozenset({"recipes", "notes", "absorbs", "are_experts_grouped", "has_units"})
"""Parts of the settings that the plan shows elsewhere."""
MULTIPLYING_ITEMS = frozenset({"fprop", "dgrad", "wgrad", "qk", "pv"})


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanModule:
    """A module of a layer with its rows."""

    name: str
    kind: str
    module: Module = field(compare=False, repr=False)
    """Its sizes; modules of other sizes and equal rows are folded."""
    rows: tuple[PlanRow, ...]
    scheme: str | None = None
    """The scaling scheme of its GEMMs; None: none of them is in FP8 or FP4."""
    copies: LayerCopies | None = field(default=None, compare=False, repr=False)
    """The copies of its operands; None: none of its GEMMs is in FP8 or FP4."""

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
    """From 1, over the whole model; None for embedding, MTP and output."""
    stage: int
    chunk: int
    kind: str
    low: bool
    modules: tuple[PlanModule, ...]

    @property
    def alike(self) -> int:
        """A key that equal layers share.

        It is the identity of their modules, of which the plan makes one tuple.
        """
        return id(self.modules)

    @property
    def is_mtp(self) -> bool:
        """Whether it is a multi-token-prediction layer, or a layer inside one."""
        return self.label.startswith("mtp")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDifference:
    """A cell in which two plans differ."""

    layers: tuple[str, ...]
    module: str
    item: str
    column: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class PrecisionPlan:
    """The plan of a model in a precision: the format of every GEMM and tensor, before the run.

        from bridge import Plan, load_run

        plan = Plan.of("fp8_current", model=model_config)
        plan = load_run(config_file="run_config.yaml").plan
        plan.format_of(3, "linear_qkv")  # of the forward GEMM; also "dgrad", "wgrad", "weight", ...
        plan.linears()  # linear layers in a low precision, and all of them

    It follows from config values alone: neither a GPU nor Megatron Core is needed. `rows` are the
    plan as plain values.
    """

    label: str
    """The precision: a recipe's name and the fields stated over it."""
    settings: PlanSettings
    shape: ModelShape
    parallel: ParallelLayout
    layers: tuple[PlanLayer, ...]
    paths: ModulePaths
    module_rows: tuple[ModuleRow, ...] = ()
    adapter: Adapter | None = None
    """What a fine-tuning run trains in place of the model's weights."""
    is_frozen: bool = False
    """The weights of the language model are not trained.

    It is `freeze_language_model` of a multimodal model.
    """

    @classmethod
    def of(
        cls,
        precision: str | PrecisionConfig | None,
        *,
        model: ModelOwner | Mapping[str, Any],
        optimizer: OptimizerOwner | Mapping[str, Any] | None = None,
        ddp: DdpOwner | Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> PrecisionPlan:
        """Return the plan of a precision and config objects, as `synchronize` would write them.

        Nothing is written.

        Args:
            precision: A recipe's name or a config; None: the model's settings as they are.
            model: Megatron's model fields, as an object or a mapping; a missing field has
                Megatron's default.
            optimizer: `OptimizerConfig` fields, for master weights and states.
            ddp: `DistributedDataParallelConfig` fields, for gradients.
            environment: Environment variables of the run; some change Transformer Engine's recipes.

        Raises:
            RunConfigError: No such model can be built, or it has modules that the plan does not
                know.
            UnknownRecipeError: No such recipe.
        """
        if isinstance(precision, str):
            precision = get_mixed_precision_config(precision)
        return precision_plan(
            precision, model, optimizer=optimizer, ddp=ddp, environment=environment
        )

    @property
    def trains_weights(self) -> bool:
        """Whether the model's own weights are trained."""
        return self.adapter is None and not self.is_frozen

    @cached_property
    def selection(self) -> ModuleSelection:
        """The modules that each row of `modules`, or each matcher of a foreign recipe, takes."""
        return select_modules(self)

    def low_precision_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers with at least one GEMM in FP8 or FP4."""
        numbers = []
        for layer in self.layers:
            is_low = any(module.scheme is not None for module in layer.modules)
            if layer.number is not None and is_low:
                numbers.append(layer.number)
        return tuple(numbers)

    def linears(self) -> tuple[int, int]:
        """Return how many linear layers compute in FP8 or FP4, and how many there are.

        A layer's experts count once.
        """
        return sum(self.schemes().values()), len(self._linears())

    def schemes(self) -> dict[str, int]:
        """Return how many linear layers compute in each scaling scheme.

        A layer's experts count once.
        """
        counts: dict[str, int] = {}
        for module in self._linears():
            if module.scheme is not None:
                counts[module.scheme] = counts.get(module.scheme, 0) + 1
        return counts

    def _linears(self) -> list[PlanModule]:
        linears = []
        for layer in self.layers:
            for module in layer.modules:
                if module.kind in ("linear", "head"):
                    linears.append(module)
        return linears

    def get_format(self, layer: int | str, module: str, item: str = "fprop") -> str:
        """Return the formats that a GEMM multiplies or a tensor is rounded to.

        It is "bf16", "e4m3" or "e5m2 x e4m3", for example.

        Args:
            layer: A layer's number from 1, or its label ("mtp 1", "output").
            module: A module's name, as Megatron has it (``self_attention.linear_qkv`` and
                ``linear_qkv`` are the same).
            item: fprop, dgrad or wgrad of a linear; qk, pv or backward of the attention core; or a
                tensor.

        Raises:
            UnknownFieldError: The plan has no such row.
        """
        return self.row(layer, module, item).format

    def row(self, layer: int | str, module: str, item: str = "weight") -> PlanRow:
        """Return a row; arguments and errors as for `get_format`."""
        planned = self.by_label.get(str(layer))
        if planned is None:
            raise _make_unknown_error("layer", str(layer), list(self.by_label))
        rows_of = {known.name: known.rows for known in planned.modules}
        names = [name for name in _generate_suffixes(module) if name in rows_of]
        if not names:
            raise _make_unknown_error(f"module of layer {layer}", module, list(rows_of))
        rows = rows_of[names[0]]
        for row in rows:
            if row.item == item:
                return row
        items = [row.item for row in rows]
        raise _make_unknown_error(f"GEMM or tensor of {names[0]}", item, items)

    def folded(self) -> list[tuple[tuple[PlanLayer, ...], tuple[PlanModule, ...]]]:
        """Return the layers in groups of equal rows, in the order in which each group begins."""
        groups: dict[tuple[str, tuple[PlanModule, ...]], list[PlanLayer]] = {}
        for layer in self.layers:
            name = ""
            if layer.number is None:
                name = layer.label.partition(" ")[0]
            groups.setdefault((name, layer.modules), []).append(layer)
        folded = []
        for (_, modules), layers in groups.items():
            folded.append((tuple(layers), modules))
        return folded

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every row as a flat mapping."""
        for layer in self.layers:
            place = {
                "layer": layer.label,
                "stage": layer.stage,
                "chunk": layer.chunk,
                "kind": layer.kind,
            }
            for module in layer.modules:
                for row in module.rows:
                    yield {**place, "module": module.name, **asdict(row)}

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data; equal rows are folded into groups of layers."""
        low, linears = self.linears()
        settings = asdict(self.settings)
        for name in OMITTED_SETTINGS:
            del settings[name]
        groups = []
        for layers, modules in self.folded():
            rows = []
            for module in modules:
                for row in module.rows:
                    rows.append({"module": module.name, **asdict(row)})
            labels = [layer.label for layer in layers]
            stages = [layer.stage for layer in layers]
            group = {
                "layers": labels,
                "stages": stages,
                "kind": layers[0].kind,
                "rows": rows,
            }
            groups.append(group)
        return {
            "precision": self.label,
            "settings": settings,
            "layers": self.shape.num_layers,
            "stages": self.parallel.pipeline,
            "low_precision_linears": low,
            "linears": linears,
            "notes": list(self.settings.notes),
            "groups": groups,
        }

    def diff(self, other: PrecisionPlan) -> list[PlanDifference]:
        """Return every cell in which another plan differs from this plan.

        Layers with equal differences are folded. A row that one plan does not have reads as "-"
        there.
        """
        layers_of: dict[tuple[str, str, str, str, str], list[str]] = {}
        for label in self.by_label | other.by_label:
            cells_before = self._cells(label)
            cells_after = other._cells(label)
            for cell in cells_before | cells_after:
                before = cells_before.get(cell, "-")
                after = cells_after.get(cell, "-")
                if before != after and {before, after} != {"", "-"}:
                    layers_of.setdefault((*cell, before, after), []).append(label)
        differences = []
        for (module, item, column, before, after), labels in layers_of.items():
            difference = PlanDifference(
                layers=tuple(labels),
                module=module,
                item=item,
                column=column,
                before=before,
                after=after,
            )
            differences.append(difference)
        return differences

    def _cells(self, label: str) -> dict[tuple[str, str, str], str]:
        """Return (module, item, column) -> content of a layer's table."""
        cells: dict[tuple[str, str, str], str] = {}
        layer = self.by_label.get(label)
        if layer is None:
            return cells
        for module in layer.modules:
            for row in module.rows:
                for column in ROW_COLUMNS[1:]:
                    cells[module.name, row.item, column] = getattr(row, column)
        return cells

    @cached_property
    def by_label(self) -> dict[str, PlanLayer]:
        """The layers by their labels."""
        return {layer.label: layer for layer in self.layers}

    @cached_property
    def stages(self) -> list[list[ModelChunk]]:
        """The model chunks of each pipeline stage."""
        stages: list[list[ModelChunk]] = [[] for _ in range(self.parallel.pipeline)]
        for place in self.parallel.places(self.shape.num_layers):
            stages[place.stage].append(place)
        return stages


def precision_plan(
    precision: PrecisionConfig | None,
    model: Any,
    parallel: ParallelLayout | None = None,
    *,
    optimizer: Any = None,
    ddp: Any = None,
    mcore: Version | None = None,
    environment: Mapping[str, str] | None = None,
) -> PrecisionPlan:
    """Return the formats in which a model will compute, keep and send its tensors.

    Args:
        precision: The precision that is written into the configs; None: the model's settings as
            they are.
        model: Megatron's model fields, as a mapping or an object; a missing field has Megatron's
            default.
        parallel: The layout; None: that of the model's fields.
        optimizer: `OptimizerConfig` fields, for masters and states.
        ddp: `DistributedDataParallelConfig` fields, for gradients.
        mcore: Version of megatron-core that builds the model; None: the newest that is known.
        environment: Environment variables of the run; some change Transformer Engine's recipes.

    Raises:
        RunConfigError: No such model can be built, or it has modules that the plan does not know.
    """
    owners = {"model": model, "optimizer": optimizer, "ddp": ddp}
    run = predict(precision, owners, target=Target(mcore=mcore), environment=environment)
    return make_plan(run, parallel)


def make_plan(run: Prediction, parallel: ParallelLayout | None = None) -> PrecisionPlan:
    """Return the precision plan of a run; errors as for `precision_plan`.

    Layers that Megatron could not split over the stages (PB413) are split as evenly as they allow.
    """
    shape = run.shape
    if parallel is None:
        parallel = run.layout
    parallel = parallel.with_even_split(shape.num_layers)
    settings = PlanSettings.from_prediction(run)
    paths = ModulePaths.from_model(run.values["model"])
    adapter = Adapter.from_sections(run.sections["peft"], run.model)
    is_frozen = bool(run.values["model"]["freeze_language_model"])
    if run.precision is None:
        label = format_owner_label(run.values["model"])
        rows: tuple[ModuleRow, ...] = ()
    else:
        label = format_nearest_label(run.precision)
        rows = parsed_rows(get_field_value(run.precision, "modules"))
    planner = _Planner(
        shape=shape,
        places=parallel.places(shape.num_layers),
        settings=settings,
        paths=paths,
        adapter=adapter,
        is_frozen=is_frozen,
        features=run.features,
    )
    layers = tuple(planner.layers())
    if run.features is not None:
        notes = (*settings.notes, *_find_unmatched_types(run.features, layers, paths))
        settings = replace(settings, notes=notes)
    return PrecisionPlan(
        label=label,
        settings=settings,
        shape=shape,
        parallel=parallel,
        layers=layers,
        paths=paths,
        module_rows=rows,
        adapter=adapter,
        is_frozen=is_frozen,
    )


def _find_unmatched_types(
    features: DebugFeatures, layers: Sequence[PlanLayer], paths: ModulePaths
) -> Iterator[str]:
    """Yield a note for each `layer_types` of the debugger that is in no layer's name."""
    names: list[str] = []
    for layer in layers:
        linear = [module.name for module in layer.modules if module.kind == "linear"]
        names += [paths.get_debug_name(layer.label, name) for name in linear]
    for row in features.rows:
        unmatched = row.unmatched_types(names)
        if unmatched:
            parts = ", ".join(map(repr, unmatched))
            yield (
                f"debug features, {row.name}: layer_types has {parts}, "
                "and no linear layer of the plan has such a name"
            )


class _ModulesKey(NamedTuple):
    """Everything in which the modules of two layers of a plan can differ."""

    kind: str
    low: bool
    chunk: int = 0
    label: str = ""
    at: int = 0
    """Number of the layer within its chunk."""


@dataclass(kw_only=True)
class _Planner:
    """Makes the layers of a plan; layers that cannot differ share their modules."""

    shape: ModelShape
    places: Sequence[ModelChunk]
    settings: PlanSettings
    paths: ModulePaths
    adapter: Adapter | None
    is_frozen: bool
    features: DebugFeatures | None = None
    """The features of Transformer Engine's debugger; None: it is off."""
    planned: dict[_ModulesKey, tuple[PlanModule, ...]] = field(default_factory=dict)
    """The modules of the layers so far."""

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
            yield self._layer(f"mtp {number}", mtp, "mtp", low=is_fp8)
            for index, kind in enumerate(shape.mtp_kinds):
                low = is_fp8 or settings.is_low_precision_layer(index, shape.num_layers)
                yield self._layer(f"mtp {number}.{index + 1}", mtp, kind, low=low)
        yield self._layer("output", last, "output")

    def _layer(
        self, label: str, place: ModelChunk, kind: str, *, low: bool = False, at: int = 0
    ) -> PlanLayer:
        key = _ModulesKey(kind, low)
        if self.settings.recipes or self.adapter is not None or self.features is not None:
            # The names of modules decide, too.
            key = _ModulesKey(kind, low, self.places.index(place), label, at)
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
        """Return what the debugger changes in a linear layer of Transformer Engine."""
        if self.features is None or module.kind != "linear" or module.is_high_precision:
            return None
        name = self.paths.get_debug_name(key.label, module.name)
        if self.features.scales_tensors(name) and key.low and self.settings.scheme != "delayed":
            rule = f"needs delayed scaling, and {name} has {self.settings.scheme}"
            raise RunConfigError(f"PerTensorScaling: {rule}. Transformer Engine raises an error.")
        return self.features.find_changes(name)


class _ModuleEffects(NamedTuple):
    """Everything that acts on one module alone."""

    recipe: ModulePrecision | None
    """Of a per-module recipe."""
    changes: LayerChanges | None
    """Of Transformer Engine's debugger."""


@lru_cache(maxsize=512)
def _plan_modules(
    modules: tuple[Module, ...],
    settings: PlanSettings,
    low: bool,
    effects: tuple[_ModuleEffects, ...],
) -> tuple[PlanModule, ...]:
    """Return the modules with their rows.

    Layers that are equal share one result, which makes folding cheap.
    """
    planned = []
    for module, of_module in zip(modules, effects, strict=True):
        planned.append(_plan_module(module, settings, low=low, effects=of_module))
    return tuple(planned)


def _is_low(row: PlanRow) -> bool:
    """Return whether a row is a GEMM that multiplies FP8 or FP4."""
    return row.item in MULTIPLYING_ITEMS and not LOW_FORMATS.isdisjoint(row.format.split(" x "))


def _plan_module(
    module: Module, settings: PlanSettings, *, low: bool, effects: _ModuleEffects
) -> PlanModule:
    """Return a module with its rows; what acts on it alone leaves the weight's storage as it is."""
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


def format_ranges(labels: Sequence[str], limit: int = 6) -> str:
    """Return labels as ranges: "2-31", "1, 80", "3, 5, 7, ... 117 (54 layers)".

    Words are kept as they are, behind the numbers.
    """
    runs: list[tuple[int, int]] = []
    count = 0
    words: list[str] = []
    for label in labels:
        if not label.isdecimal():
            words.append(label)
            continue
        number = int(label)
        count += 1
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    ranges = []
    for first, last in runs:
        if first == last:
            ranges.append(str(first))
        else:
            ranges.append(f"{first}-{last}")
    if len(ranges) > limit:
        listed = ", ".join(ranges[: limit - 1])
        ranges = [f"{listed}, ... {ranges[-1]} ({count} layers)"]
    return ", ".join([*ranges, *words])


def _generate_suffixes(module: str) -> Iterator[str]:
    """Yield a module's path, then without its first part, and so on; one expert stands for all."""
    module = re.sub(r"\blocal_experts\.\d+\.", "", module)
    while module:
        yield module
        module = module.partition(".")[2]


def _make_unknown_error(what: str, name: str, known: list[str]) -> UnknownFieldError:
    matches = close_matches(name, known)
    hint = did_you_mean(matches) or f"There are {', '.join(known[:12])}."
    return UnknownFieldError(f"plan: no such {what}, got {name!r}. {hint}", matches)
