"""The precision plan: the formats in which each layer computes, keeps, reduces and saves its tensors.

    plan = precision_plan(get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed"), model)
    plan.format_of(2, "linear_qkv", "dgrad")     # 'e5m2 x e4m3'
    plan.low_precision_layers()                   # (2, 3, 4, 5) of 6

It is computed from config values alone, as Megatron Core reads them (0.16.1 to main of 2026-08-22; a field that the
target's version does not have counts as not set). Rules:

- Layers are numbered over the whole model, whatever pipeline stage holds them, and a layer stays in the mode's dtype
  if its number is among the first or last N (fp8_utils.is_first_last_bf16_layer). In a hybrid model every block counts.
- Linears inside the low-precision context of a layer are quantised: attention and MLP
  projections, experts, shared experts, Mamba's in and out projection. Norms, the router, the embedding and the output
  layer are not.
- Multi-token-prediction layers enter the FP8 context without a layer number, so that first/last does not apply to
  them, and they ignore FP4 (multi_token_prediction.py). The layers inside a prediction layer of a hybrid model are a
  stack of their own, numbered from 1: under FP8 all are inside the outer context, under FP4 each enters the context by
  its number there (hybrid_block.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import groupby
from typing import Any

from bridge.errors import UnknownFieldError, close_matches, did_you_mean
from bridge.model.layout import Parallel, Place
from bridge.model.modules import Module, ModulePaths, modules_of
from bridge.model.shape import ModelShape
from bridge.plan.adapters import Adapter
from bridge.plan.rows import PlanRow, module_rows
from bridge.plan.selection import module_selection
from bridge.plan.settings import Settings
from bridge.precision.config import PrecisionConfig
from bridge.precision.copies import Copies
from bridge.precision.grouping import grouped
from bridge.precision.matchers import Effect, recipe_of
from bridge.precision.modules import ModuleRow
from bridge.precision.modules import module_rows as parsed_rows
from bridge.precision.owners import DdpOwner, ModelOwner, OptimizerOwner
from bridge.precision.statements import field_value
from bridge.registry.nearest import label_of_owners, nearest_label
from bridge.registry.registry import get_mixed_precision_config
from bridge.rules.module_selection import ModuleSelection
from bridge.sync.prediction import Prediction, predict
from bridge.target.target import Target
from bridge.target.versions import Version

COLUMNS = tuple(field.name for field in fields(PlanRow))
LOW = frozenset({"e4m3", "e5m2", "e2m1", "custom"})
NO_SETTINGS = frozenset({"recipes", "notes", "absorbs", "are_experts_grouped", "has_units"})
"""Parts of the settings that the plan shows elsewhere."""
MULTIPLIED = frozenset({"fprop", "dgrad", "wgrad", "qk", "pv"})


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
    copies: Copies | None = field(default=None, compare=False, repr=False)
    """The copies of its operands; None: none of its GEMMs is in FP8 or FP4."""

    def row(self, item: str) -> PlanRow | None:
        """Return the row of a GEMM or tensor, or None."""
        return {row.item: row for row in self.rows}.get(item)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLayer:
    """A layer, or the embedding or output around the layers."""

    label: str
    """The number, "embedding", "mtp 1", "mtp 1.1" (inside a prediction layer of a hybrid model) or "output"."""
    number: int | None
    """From 1, over the whole model; None for embedding, MTP and output."""
    stage: int
    chunk: int
    kind: str
    low: bool
    modules: tuple[PlanModule, ...]

    @property
    def alike(self) -> int:
        """A key that equal layers share: the identity of their modules, of which the plan makes one tuple."""
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
    """The plan of a model in a precision: the format of every GEMM and tensor of every layer, before the run.

        from bridge import Plan, load_run

        plan = Plan.of("fp8_current", model=model_config)
        plan = load_run(config_file="run_config.yaml").plan
        plan.format_of(3, "linear_qkv")  # of the forward GEMM; also "dgrad", "wgrad", "weight", "save", ...
        plan.linears  # linear layers in a low precision, and all of them

    It follows from config values alone: neither a GPU nor Megatron Core is needed. `rows` are the plan as plain values.
    """

    label: str
    """The precision: a recipe's name and the fields stated over it."""
    settings: Settings
    shape: ModelShape
    parallel: Parallel
    layers: tuple[PlanLayer, ...]
    paths: ModulePaths
    module_rows: tuple[ModuleRow, ...] = ()
    adapter: Adapter | None = None
    """What a fine-tuning run trains in place of the model's weights."""
    is_frozen: bool = False
    """The weights of the language model are not trained (`freeze_language_model` of a multimodal model)."""

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
        """Return the plan of a precision and config objects, as `synchronize` would write them. Nothing is written.

        Args:
            precision: A recipe's name or a config; None: the model's own settings.
            model: Megatron's model fields, as an object or a mapping; a missing field has Megatron's default.
            optimizer: `OptimizerConfig` fields, for master weights and states.
            ddp: `DistributedDataParallelConfig` fields, for gradients.
            environment: Environment variables of the run, of which some change Transformer Engine's recipes.

        Raises:
            RunConfigError: No such model can be built, or it has modules that the plan does not know.
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
        return module_selection(self)

    def low_precision_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers with at least one GEMM in FP8 or FP4."""
        return tuple(
            layer.number
            for layer in self.layers
            if layer.number is not None
            and any(module.scheme is not None for module in layer.modules)
        )

    def linears(self) -> tuple[int, int]:
        """Return how many linear layers compute in FP8 or FP4, and how many there are; a layer's experts count once."""
        return sum(self.schemes().values()), len(self._linears())

    def schemes(self) -> dict[str, int]:
        """Return how many linear layers compute in each scaling scheme; a layer's experts count once."""
        return dict(
            Counter(module.scheme for module in self._linears() if module.scheme is not None)
        )

    def _linears(self) -> list[PlanModule]:
        return [
            module
            for layer in self.layers
            for module in layer.modules
            if module.kind in ("linear", "head")
        ]

    def format_of(self, layer: int | str, module: str, item: str = "fprop") -> str:
        """Return the formats that a GEMM multiplies or a tensor is rounded to: "bf16", "e4m3", "e5m2 x e4m3", ...

        Args:
            layer: A layer's number from 1, or its label ("mtp 1", "output").
            module: A module's name, as Megatron has it (``self_attention.linear_qkv`` and ``linear_qkv`` are the same).
            item: fprop, dgrad or wgrad of a linear; qk, pv or backward of the attention core; or a tensor.

        Raises:
            UnknownFieldError: The plan has no such row.
        """
        return self.row(layer, module, item).format

    def row(self, layer: int | str, module: str, item: str = "weight") -> PlanRow:
        """Return a row; arguments and errors as for `format_of`."""
        held = self.by_label.get(str(layer))
        if held is None:
            raise _unknown("layer", str(layer), list(self.by_label))
        names = {known.name: known for known in held.modules}
        found = [names[name] for name in _suffixes(module) if name in names]
        if not found:
            raise _unknown(f"module of layer {layer}", module, list(names))
        row = found[0].row(item)
        if row is None:
            raise _unknown(
                f"GEMM or tensor of {found[0].name}", item, [row.item for row in found[0].rows]
            )
        return row

    def folded(self) -> list[tuple[tuple[PlanLayer, ...], tuple[PlanModule, ...]]]:
        """Return the layers in groups of equal rows, in the order in which each group begins."""
        names = [
            "" if layer.number is not None else layer.label.partition(" ")[0]
            for layer in self.layers
        ]
        groups = grouped(
            ((name, layer.modules), layer) for name, layer in zip(names, self.layers, strict=True)
        )
        return [(tuple(layers), modules) for (_, modules), layers in groups.items()]

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
        """Return the plan as plain data, equal rows folded: every group with the layers it is for."""
        low, linears = self.linears()
        return {
            "precision": self.label,
            "settings": {
                name: value
                for name, value in asdict(self.settings).items()
                if name not in NO_SETTINGS
            },
            "layers": self.shape.num_layers,
            "stages": self.parallel.pipeline,
            "low_precision_linears": low,
            "linears": linears,
            "notes": list(self.settings.notes),
            "groups": [
                {
                    "layers": [layer.label for layer in layers],
                    "stages": [layer.stage for layer in layers],
                    "kind": layers[0].kind,
                    "rows": [
                        {"module": module.name, **asdict(row)}
                        for module in modules
                        for row in module.rows
                    ],
                }
                for layers, modules in self.folded()
            ],
        }

    def diff(self, other: PrecisionPlan) -> list[PlanDifference]:
        """Return every cell in which another plan differs from this one, layers with equal differences folded.

        A row that one plan does not have reads as "-" there.
        """
        cells: list[tuple[tuple[str, str, str, str, str], str]] = []
        for label in self.by_label | other.by_label:
            mine, theirs = self._cells(label), other._cells(label)
            for cell in mine | theirs:
                before, after = mine.get(cell, "-"), theirs.get(cell, "-")
                if before != after and {before, after} != {"", "-"}:
                    cells.append(((*cell, before, after), label))
        return [
            PlanDifference(
                layers=tuple(layers),
                module=module,
                item=item,
                column=column,
                before=before,
                after=after,
            )
            for (module, item, column, before, after), layers in grouped(cells).items()
        ]

    def _cells(self, label: str) -> dict[tuple[str, str, str], str]:
        """Return (module, item, column) -> content of a layer's table."""
        layer = self.by_label.get(label)
        modules = layer.modules if layer is not None else ()
        return {
            (module.name, row.item, column): getattr(row, column)
            for module in modules
            for row in module.rows
            for column in COLUMNS[1:]
        }

    @cached_property
    def by_label(self) -> dict[str, PlanLayer]:
        """The layers by their labels."""
        return {layer.label: layer for layer in self.layers}

    @cached_property
    def stages(self) -> list[list[Place]]:
        """The model chunks of each pipeline stage."""
        places = self.parallel.places(self.shape.num_layers)
        return [
            [place for place in places if place.stage == stage]
            for stage in range(self.parallel.pipeline)
        ]


def precision_plan(
    precision: PrecisionConfig | None,
    model: Any,
    parallel: Parallel | None = None,
    *,
    optimizer: Any = None,
    ddp: Any = None,
    mcore: Version | None = None,
    environment: Mapping[str, str] | None = None,
) -> PrecisionPlan:
    """Return the formats in which a model will compute, keep and send its tensors.

    Args:
        precision: The precision that is written into the configs; None: the model's own settings.
        model: Megatron's model fields, as a mapping or an object; a missing one has Megatron's default.
        parallel: The layout; None: that of the model's fields.
        optimizer: `OptimizerConfig` fields, for masters and states.
        ddp: `DistributedDataParallelConfig` fields, for gradients.
        mcore: Version of megatron-core that builds the model; None: the newest that is known.
        environment: Environment variables of the run, of which some change Transformer Engine's recipes.

    Raises:
        RunConfigError: No such model can be built, or it has modules that the plan does not know.
    """
    given = {"model": model, "optimizer": optimizer, "ddp": ddp}
    return plan_of(
        predict(precision, given, target=Target(mcore=mcore), environment=environment), parallel
    )


def plan_of(run: Prediction, parallel: Parallel | None = None) -> PrecisionPlan:
    """Return the precision plan of a run; errors as for `precision_plan`.

    Layers that Megatron could not split over the stages (PB413) are split as evenly as they allow.
    """
    shape = run.shape
    layout = (parallel if parallel is not None else run.layout).split_for(shape.num_layers)
    settings = Settings.of(run)
    paths, precision = ModulePaths.of(run.values["model"]), run.precision
    adapter = Adapter.of(run.sections["peft"], run.model)
    is_frozen = bool(run.values["model"]["freeze_language_model"])
    return PrecisionPlan(
        label=nearest_label(precision)
        if precision is not None
        else label_of_owners(run.values["model"]),
        settings=settings,
        shape=shape,
        parallel=layout,
        layers=tuple(_layers(shape, layout, settings, paths, adapter, is_frozen=is_frozen)),
        paths=paths,
        module_rows=parsed_rows(field_value(precision, "modules")) if precision is not None else (),
        adapter=adapter,
        is_frozen=is_frozen,
    )


def _layers(
    shape: ModelShape,
    parallel: Parallel,
    settings: Settings,
    paths: ModulePaths,
    adapter: Adapter | None,
    *,
    is_frozen: bool,
) -> Iterator[PlanLayer]:
    """Yield the embedding, the layers in order, the MTP layers and the output."""
    places = parallel.places(shape.num_layers)
    first = [*(place for place in places if place.embedding), places[0]][0]
    last = [*(place for place in places if place.output), places[-1]][0]
    mtp = [*(place for place in places if place.mtp), last][0]
    is_fp8, enters = settings.family == "fp8", partial(settings.enters, num_layers=shape.num_layers)
    made = _maker(shape, places, settings, paths, adapter, is_frozen=is_frozen)
    yield made("embedding", first, "embedding")
    for place in places:
        for at, index in enumerate(place.layers):
            yield made(str(index + 1), place, shape.kinds[index], low=enters(index), at=at)
    for number in range(1, shape.mtp_layers + 1):
        yield made(f"mtp {number}", mtp, "mtp", low=is_fp8)
        for index, kind in enumerate(shape.mtp_kinds):
            yield made(f"mtp {number}.{index + 1}", mtp, kind, low=is_fp8 or enters(index))
    yield made("output", last, "output")


def _maker(
    shape: ModelShape,
    places: Sequence[Place],
    settings: Settings,
    paths: ModulePaths,
    adapter: Adapter | None,
    *,
    is_frozen: bool,
) -> Callable[..., PlanLayer]:
    """Return the function that makes a layer; layers that cannot differ share their modules."""
    numbers = {(place.stage, place.chunk): number for number, place in enumerate(places)}
    by_name = bool(settings.recipes) or adapter is not None

    @cache
    def modules(kind: str, low: bool, chunk: int, label: str, at: int) -> tuple[PlanModule, ...]:
        own = modules_of(shape, kind)
        if adapter is not None:
            own = adapter.added_to(own, shape, lambda name: paths.path(label, at, name))
        elif is_frozen:
            own = tuple(replace(one, is_frozen=True) for one in own)
        recipe = recipe_of(settings.recipes, chunk)
        effects = [  # only Transformer Engine's linear layers read a per-module recipe
            recipe.effect(paths.path(label, at, one.name))
            if recipe is not None and one.kind == "linear"
            else None
            for one in own
        ]
        return _planned(own, settings, low, tuple(effects))

    def made(label: str, place: Place, kind: str, *, low: bool = False, at: int = 0) -> PlanLayer:
        number = int(label) if label.isdigit() else None
        name = (numbers[place.stage, place.chunk], label, at) if by_name else (0, "", 0)
        where: dict[str, Any] = {
            "label": label,
            "number": number,
            "stage": place.stage,
            "chunk": place.chunk,
        }
        return PlanLayer(**where, kind=kind, low=low, modules=modules(kind, low, *name))

    return made


@lru_cache(maxsize=512)
def _planned(
    modules: tuple[Module, ...], settings: Settings, low: bool, effects: tuple[Effect | None, ...]
) -> tuple[PlanModule, ...]:
    """Return the modules with their rows; layers that are equal share one result, which makes folding cheap."""
    return tuple(
        _planned_module(module, settings, low=low, effect=effect)
        for module, effect in zip(modules, effects, strict=True)
    )


def _planned_module(
    module: Module, settings: Settings, *, low: bool, effect: Effect | None
) -> PlanModule:
    """Return a module with its rows; a per-module recipe leaves the weight stored as the run stores it."""
    own, is_low = settings.of_module(effect, low=low)
    rows = module_rows(module, own, low=is_low)
    if effect is not None:
        stored = {row.item: row.storage for row in module_rows(module, settings, low=low)}
        rows = tuple(replace(row, storage=stored.get(row.item, row.storage)) for row in rows)
    has_low = any(row.item in MULTIPLIED and LOW & {*row.format.split(" x ")} for row in rows)
    if not has_low:
        return PlanModule(name=module.name, kind=module.kind, module=module, rows=rows)
    copies = own.copies(is_grouped=module.is_expert and own.are_experts_grouped)
    return PlanModule(
        name=module.name,
        kind=module.kind,
        module=module,
        rows=rows,
        scheme=own.scheme,
        copies=copies,
    )


def compact(labels: Sequence[str], limit: int = 6) -> str:
    """Return labels as ranges: "2-31", "1, 80", "3, 5, 7, ... 117 (54)"; words are kept as they are."""
    numbers = [int(label) for label in labels if label.isdecimal()]
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda at: at[1] - at[0])
    ]
    ranges = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(ranges) > limit:
        ranges = [", ".join(ranges[: limit - 1]) + f", ... {ranges[-1]} ({len(numbers)} layers)"]
    return ", ".join([*ranges, *(label for label in labels if not label.isdecimal())])


def _suffixes(module: str) -> Iterator[str]:
    """Yield a module's path, then without its first part, and so on; one expert stands for all."""
    module = re.sub(r"\blocal_experts\.\d+\.", "", module)
    while module:
        yield module
        module = module.partition(".")[2]


def _unknown(what: str, given: str, known: list[str]) -> UnknownFieldError:
    matches = close_matches(given, known)
    hint = did_you_mean(matches) or f"There are {', '.join(known[:12])}."
    return UnknownFieldError(f"plan: no such {what}, got {given!r}. {hint}", matches)
