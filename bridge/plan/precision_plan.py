"""`PrecisionPlan`: the formats in which layers compute, store, reduce and save tensors.

    plan = precision_plan(get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed"), model)
    plan.format_of(2, "linear_qkv", "dgrad")     # 'e5m2 x e4m3'
    plan.low_precision_layers()                   # (2, 3, 4, 5) of 6

A plan is computed only from config values, as Megatron Core reads them (0.16.1 to main of
2026-08-22). A field that the target's version does not have counts as not set. Rules:

- Layers are numbered in the whole model, not within a pipeline stage. A layer stays in the
  mode's dtype if its number is among the first or last N (fp8_utils.is_first_last_bf16_layer). In a
  hybrid model every block counts as a layer.
- Linears inside the low-precision context of a layer are quantised: attention and MLP projections,
  experts, shared experts, Mamba's in and out projection. Norms, the router, the embedding and the
  output layer are not.
- Multi-token-prediction layers enter the FP8 context without a layer number. So the rule about
  first and last layers does not apply to them. They ignore FP4 (multi_token_prediction.py).
- The layers inside a prediction layer of a hybrid model are a separate stack, numbered from 1.
  Under FP8 they are all inside the outer context. Under FP4 each enters the context by its number
  in the stack (hybrid_block.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bridge.errors import UnknownFieldError, close_matches, did_you_mean
from bridge.model.layout import ModelChunk, ParallelLayout
from bridge.model.module_paths import ModulePaths
from bridge.model.shape import ModelShape
from bridge.plan.adapters import Adapter
from bridge.plan.plan_layers import LayerPlanner, PlanLayer, PlanModule
from bridge.plan.plan_rows import PlanRow
from bridge.plan.plan_settings import PlanSettings
from bridge.plan.selection import select_modules
from bridge.precision.module_row import ModuleRow, parse_module_rows
from bridge.precision.owners import DdpOwner, ModelOwner, OptimizerOwner
from bridge.precision.precision_config import PrecisionConfig
from bridge.precision.statements import get_field_value
from bridge.registry.nearest_recipe import format_nearest_label, format_owner_label
from bridge.registry.registry import get_mixed_precision_config
from bridge.rules.module_selection import ModuleSelection
from bridge.sync.prediction import Prediction, predict
from bridge.target.target import Target
from bridge.target.versions import Version

if TYPE_CHECKING:
    from bridge.precision.debug_features import DebugFeatures

ROW_COLUMNS = tuple(field.name for field in fields(PlanRow))
OMITTED_SETTINGS = frozenset(
    {
        "recipes",
        "notes",
        "absorbs",
        "are_experts_grouped",
        "has_units",
        "keeps_weight_transposes",
    }
)
"""Fields of `PlanSettings` that the plain data leaves out, since the plan shows them elsewhere."""


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

    It is computed only from config values: neither a GPU nor Megatron Core is needed. `rows` yields
    the plan as plain values.
    """

    label: str
    """The label of the precision: a recipe's name and the fields stated over it."""
    settings: PlanSettings
    shape: ModelShape
    parallel: ParallelLayout
    layers: tuple[PlanLayer, ...]
    paths: ModulePaths
    module_rows: tuple[ModuleRow, ...] = ()
    adapter: Adapter | None = None
    """The adapter that a run trains instead of the weights of the model. None: no adapter."""
    is_frozen: bool = False
    """Whether the weights of the language model of a multimodal model are not trained
    (`freeze_language_model`).
    """

    def __str__(self) -> str:
        """Return a summary of the plan in a line. `rows` has the whole plan."""
        low_precision, linears = self.linears()
        counts = ""
        for scheme, count in self.schemes().items():
            counts += f", {count} in {scheme}"
        return (
            f"{self.label}: {self.shape.num_layers} layers, {low_precision} of {linears} linear layers "
            f"in FP8 or FP4{counts}"
        )

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
            precision: A recipe's name or a config. None: the settings of the configs are used.
            model: Megatron's model fields, as an object or a mapping. A missing field has
                Megatron's default.
            optimizer: `OptimizerConfig` fields, for master weights and states.
            ddp: `DistributedDataParallelConfig` fields, for gradients.
            environment: Environment variables of the run. Some change Transformer Engine's recipes.

        Raises:
            RunConfigError: The model cannot be built, or has modules that the plan does not know.
            UnknownRecipeError: No recipe has this name.
        """
        if isinstance(precision, str):
            precision = get_mixed_precision_config(precision)
        return precision_plan(
            precision, model, optimizer=optimizer, ddp=ddp, environment=environment
        )

    @property
    def trains_weights(self) -> bool:
        """Whether the weights of the model are trained, and not only an adapter."""
        return self.adapter is None and not self.is_frozen

    @cached_property
    def selection(self) -> ModuleSelection:
        """The modules that each row of `modules`, or each matcher of a foreign recipe, selects."""
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
        """Return the number of linear layers in FP8 or FP4, and the number of all linear layers.

        The experts of a layer count once.
        """
        return sum(self.schemes().values()), len(self._linears())

    def schemes(self) -> dict[str, int]:
        """Return scaling scheme -> the number of linear layers that compute in it.

        The experts of a layer count once.
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

    def format_of(self, layer: int | str, module: str, item: str = "fprop") -> str:
        """Return the formats that a GEMM multiplies or a tensor is rounded to.

        It is "bf16", "e4m3" or "e5m2 x e4m3", for example.

        Args:
            layer: A layer's number from 1, or its label ("mtp 1", "output").
            module: A module's name, as Megatron has it (``self_attention.linear_qkv`` and
                ``linear_qkv`` are the same).
            item: fprop, dgrad or wgrad of a linear layer; qk, pv or backward of the attention core;
                or a tensor.

        Raises:
            UnknownFieldError: The plan has no such row.
        """
        return self.row(layer, module, item).format

    def row(self, layer: int | str, module: str, item: str = "weight") -> PlanRow:
        """Return a row. See `format_of` for the arguments and errors."""
        planned = self.by_label.get(str(layer))
        if planned is None:
            raise _make_unknown_error("layer", str(layer), list(self.by_label))
        rows_by_module = {
            planned_module.name: planned_module.rows for planned_module in planned.modules
        }
        names = [name for name in _generate_suffixes(module) if name in rows_by_module]
        if not names:
            raise _make_unknown_error(f"module of layer {layer}", module, list(rows_by_module))
        rows = rows_by_module[names[0]]
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
        """Return the plan as plain data. Layers with equal rows are folded into groups."""
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

        Layers with equal differences are folded. If a plan does not have a row, its value is "-".
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
        for place in self.parallel.split_layers(self.shape.num_layers):
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
    """Return the formats in which a model will compute, store and send its tensors.

    Args:
        precision: The precision that is written into the configs. None: the settings of the configs
            are used.
        model: Megatron's model fields, as a mapping or an object. A missing field has Megatron's
            default.
        parallel: The layout. None: the layout of the model's fields.
        optimizer: `OptimizerConfig` fields, for masters and states.
        ddp: `DistributedDataParallelConfig` fields, for gradients.
        mcore: The version of megatron-core that builds the model. None: the newest known version.
        environment: Environment variables of the run. Some change Transformer Engine's recipes.

    Raises:
        RunConfigError: The model cannot be built, or has modules that the plan does not know.
    """
    owners = {"model": model, "optimizer": optimizer, "ddp": ddp}
    run = predict(precision, owners, target=Target(mcore=mcore), environment=environment)
    return make_plan(run, parallel)


def make_plan(run: Prediction, parallel: ParallelLayout | None = None) -> PrecisionPlan:
    """Return the precision plan of a run. It raises the errors of `precision_plan`.

    If Megatron cannot split the layers over the stages (PB413), the split is as even as possible.
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
        rows = parse_module_rows(get_field_value(run.precision, "modules"))
    planner = LayerPlanner(
        shape=shape,
        places=parallel.split_layers(shape.num_layers),
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
    """Yield a note for each entry of the debugger whose `layer_types` match no layer name."""
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


def format_ranges(labels: Sequence[str], limit: int = 6) -> str:
    """Return labels as ranges: "2-31", "1, 80", "3, 5, 7, ... 117 (54 layers)".

    Labels that are not numbers follow the ranges.
    """
    number_ranges: list[tuple[int, int]] = []
    count = 0
    words: list[str] = []
    for label in labels:
        if not label.isdecimal():
            words.append(label)
            continue
        number = int(label)
        count += 1
        if number_ranges and number == number_ranges[-1][1] + 1:
            number_ranges[-1] = (number_ranges[-1][0], number)
        else:
            number_ranges.append((number, number))
    ranges = []
    for first, last in number_ranges:
        if first == last:
            ranges.append(str(first))
        else:
            ranges.append(f"{first}-{last}")
    if len(ranges) > limit:
        listed = ", ".join(ranges[: limit - 1])
        ranges = [f"{listed}, ... {ranges[-1]} ({count} layers)"]
    return ", ".join([*ranges, *words])


def _generate_suffixes(module: str) -> Iterator[str]:
    """Yield the path of a module, then the path without its first part, and so on.

    The number of an expert is removed, because all experts have the same rows.
    """
    module = re.sub(r"\blocal_experts\.\d+\.", "", module)
    while module:
        yield module
        module = module.partition(".")[2]


def _make_unknown_error(noun: str, name: str, names: list[str]) -> UnknownFieldError:
    matches = close_matches(name, names)
    hint = did_you_mean(matches) or f"There are {', '.join(names[:12])}."
    return UnknownFieldError(f"plan: no such {noun}, got {name!r}. {hint}", matches)
