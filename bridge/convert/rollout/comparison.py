"""`compare_rollout`: compares training and rollout, for each kind of module and tensor.

A row is equal, differs, or cannot be known. A row that cannot be known names the source that
decides it: a setting that the file does not state, the checkpoint, the release of the engine, or
the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, NamedTuple

from bridge.convert.rollout.engine import (
    CACHE_DTYPES,
    FP32,
    MODEL_DTYPE,
    POWERS_OF_TWO,
    Rollout,
    get_module_schemes,
)
from bridge.convert.rollout.training_side import (
    TrainingSide,
    compute_training_side,
    list_unmatched_parts,
)
from bridge.convert.serving.formats import MODELOPT, VLLM, format_scheme
from bridge.convert.serving.manifest import ManifestRow
from bridge.convert.serving.module_names import ROUTER, describe_fused_conflicts
from bridge.convert.serving.serving_config import ServingConfig
from bridge.plan.plan_settings import PlanSettings
from bridge.plan.precision_plan import format_ranges
from bridge.preflight.run import Run

Verdict = Literal["equal", "differs", "cannot be known"]
EQUAL: Final = "equal"
DIFFERS: Final = "differs"
UNKNOWN: Final = "cannot be known"
FP32_SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""Variable of Transformer Engine about blocks of 128. 1: their scales are any FP32 numbers.
Otherwise the scales are powers of two."""
OUTPUT_LAYER = "output_layer"
ROUTER_MODULES = (ROUTER, "mlp.shared_experts.gate")
CACHE_SUBJECT = "keys and values (cache)"
OTHERS_SUBJECT = "embedding, norms and others"
STORED_MESSAGE = "Training stores weights in {mode}, and quantises them in each step."
STORED_QUANTISED_MESSAGE = (
    "Training stores the weights of quantised layers in their quantised form."
)
NOT_KNOWN = "not known"
SUBSTITUTE_NOTE = (
    "The run states no sizes: the comparison is by kinds of modules, and a kind that the model "
    "does not have does not count."
)
BY_ROUTER = "the engine's release: its code of the model may give a router no quantization config"
BY_LOGITS = "the engine's release: its code of the model has the dtype of the router's logits"
BY_READER = (
    "the engine: vLLM, SGLang and transformers read this list of modules differently (--for NAME)"
)
BY_CUTLASS = "the GPU and the engine's release: where CUTLASS runs, inputs have a scale per token"
BY_HEAD = (
    "the engine's release: with a config of ModelOpt's form it may quantise the output layer, "
    "as vLLM 0.33.0 does"
)
BY_SENT_VALUES = (
    "the engine: its config keeps the module, and training sends FP8 values for it, "
    "since {framework} does not read the list of modules"
)
BY_ENVIRONMENT = f"{FP32_SCALES_VARIABLE} of the training processes, which the run does not state"
MXFP8_FAULT_MESSAGE = (
    "An entry of the list takes vLLM's name of merged projections, of which it is a part (verl pull "
    "request 7918). Write names that are no part of another, or leave routers out of a dense model's list."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRow:
    """One kind of module or tensor in training and in rollout."""

    subject: str
    """Megatron's name of the module within a layer, or a description of the tensor."""
    layers: str = ""
    modules: int | None = None
    """The number of modules in the checkpoint, with each expert. None: a tensor, or not known."""
    training: str
    """The precision in training, as text."""
    rollout: str
    """The precision in rollout, as text."""
    verdict: Verdict
    decided_by: str = ""
    """The source that decides a verdict that cannot be known."""

    def describe_difference(self) -> str:
        """Return a row whose two sides differ as a sentence."""
        subject = self.subject
        if self.layers:
            subject = f"{subject} ({self.layers})"
        return f"{subject}: training has {self.training}; rollout {self.rollout}."


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sides:
    """The two sides of a comparison."""

    run: Run
    training: TrainingSide
    rollout: Rollout
    config: ServingConfig | None
    """The quantization config with its list of modules; None: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutComparison:
    """Training and rollout of one run."""

    training: TrainingSide
    rollout: Rollout
    rows: tuple[RolloutRow, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """The verdict over all rows: `DIFFERS` if one differs, else `UNKNOWN` if one is unknown."""
        verdicts = {row.verdict for row in self.rows}
        if DIFFERS in verdicts:
            return DIFFERS
        if UNKNOWN in verdicts:
            return UNKNOWN
        return EQUAL

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
        return {
            "verdict": self.verdict,
            "engine": self.rollout.engine,
            "by_kinds_alone": self.training.is_substitute,
            "rows": [asdict(row) for row in self.rows],
            "weights_sent": self.rollout.sent,
            "notes": list(self.notes),
        }


_INPUTS_PER_TOKEN = RolloutRow(
    subject="scales of inputs",
    training="one for the tensor",
    rollout="one for the tensor, or for each token",
    verdict=UNKNOWN,
    decided_by=BY_CUTLASS,
)


def compare_rollout(run: Run, rollout: Rollout, model_type: str | None = None) -> RolloutComparison:
    """Return the comparison of a run's training with its rollout.

    Args:
        rollout: The precision of its engine.
        model_type: The `model_type` of the Hugging Face config, for the names of modules.

    Raises:
        RunConfigError: The run has no plan, or the names of its modules are not known.
    """
    training = compute_training_side(run, rollout, model_type)
    if not training.is_substitute:
        training.manifest.require_names()
    names = _map_names_to_layers(training)
    config = rollout.make_config(names)
    sides = _Sides(run=run, training=training, rollout=rollout, config=config)
    rows = list(_make_module_rows(sides))
    rows.extend(_make_unmatched_rows(rollout, names))
    if _has_scheme_on_both_sides(training, config, "blockwise"):
        rows.extend(_make_scale_rows(run, rollout))
    if _has_scheme_on_both_sides(training, config, "tensorwise"):
        rows.append(_INPUTS_PER_TOKEN)
    rows.append(_make_cache_row(training, rollout))
    rows.append(_make_dtype_row(run, training, rollout))
    notes = [*_describe_storage(run, training), *rollout.notes]
    if training.is_substitute:
        notes.append(SUBSTITUTE_NOTE)
    notes.extend(training.manifest.notes)
    if config is not None:
        notes.extend(_list_known_faults(sides, config, rows))
    return RolloutComparison(
        training=training, rollout=rollout, rows=tuple(rows), notes=tuple(notes)
    )


class _Judgement(NamedTuple):
    """A verdict. If it cannot be known, `decided_by` is the source that decides it."""

    verdict: Verdict
    decided_by: str = ""


def _describe_storage(run: Run, training: TrainingSide) -> list[str]:
    """Return a sentence about how training stores quantised weights, or an empty list."""
    if not training.manifest.schemes or run.reading.uncertainty.mode_decider is not None:
        return []
    if training.plan.settings.low_parameters:
        return [STORED_QUANTISED_MESSAGE]
    return [STORED_MESSAGE.format(mode=training.manifest.mode)]


def _map_names_to_layers(training: TrainingSide) -> dict[str, tuple[int, int]]:
    """Return name of a module in the checkpoint -> its layer from 1, and the number of layers.

    The layer is 0 for a module outside the layers.
    """
    names: dict[str, tuple[int, int]] = {}
    for row in training.manifest.rows:
        layer = 0
        if row.layer.isdigit():
            layer = int(row.layer)
        for name in row.iterate_served_names():
            names[name] = (layer, training.num_layers)
    return names


class _ModuleKind(NamedTuple):
    """Modules with the same name within their layers and the same schemes on either side."""

    role: str
    """Megatron's name within a layer."""
    trained: str | None
    """The scheme in training; None: not quantised."""
    served: frozenset[str | None]
    """The schemes in rollout: several if systems read the config differently."""


def _make_module_rows(sides: _Sides) -> Iterator[RolloutRow]:
    """Yield a row for each kind of module."""
    layers_by_kind: dict[_ModuleKind, list[str]] = {}
    for row in sides.training.manifest.rows:
        for name in row.iterate_served_names():
            served = frozenset(_get_rollout_schemes(sides, row, name))
            kind = _ModuleKind(row.role, row.scheme, served)
            layers_by_kind.setdefault(kind, []).append(row.layer)
    for kind, layers in layers_by_kind.items():
        yield _make_module_row(sides, kind, layers)


def _make_module_row(sides: _Sides, kind: _ModuleKind, layers: list[str]) -> RolloutRow:
    """Return the row of a kind of module.

    Args:
        sides: The two sides.
        layers: The label of the layer of each module.
    """
    training = sides.training
    rollout = sides.rollout
    judgement = _judge_modules(sides, kind)
    trained = format_scheme(kind.trained, _get_mode_or_not_known(sides.run, training))
    router_dtype = training.plan.settings.router
    if kind.role == ROUTER and router_dtype is not None:
        trained = f"{trained}, logits in {router_dtype}"
    titles = [format_scheme(scheme, rollout.dtype or NOT_KNOWN) for scheme in kind.served]
    served = " or ".join(sorted(titles))
    if sides.config is None:
        served = NOT_KNOWN
    if judgement.decided_by == BY_ROUTER:
        served = f"{served}, or not quantised"
    modules: int | None = len(layers)
    if training.is_substitute:
        modules = None
    return RolloutRow(
        subject=kind.role,
        layers=_format_layers(training, rollout, kind.role, list(dict.fromkeys(layers))),
        modules=modules,
        training=trained,
        rollout=served,
        verdict=judgement.verdict,
        decided_by=judgement.decided_by,
    )


def _make_unmatched_rows(rollout: Rollout, names: Iterable[str]) -> Iterator[RolloutRow]:
    """Yield a row for each part of a name that rollout keeps and that no known name has."""
    for part in list_unmatched_parts(rollout, names):
        yield RolloutRow(
            subject=f"modules with {part} in their names",
            training=NOT_KNOWN,
            rollout=rollout.dtype or NOT_KNOWN,
            verdict=UNKNOWN,
            decided_by="the model: it has modules of that name or not",
        )


def _get_rollout_schemes(sides: _Sides, row: ManifestRow, name: str) -> set[str | None]:
    """Return the schemes that a module of the checkpoint may have in rollout."""
    if sides.config is None or row.role in sides.training.manifest.plain:
        return {None}
    return get_module_schemes(sides.config, name, sides.rollout.engine)


def _judge_modules(sides: _Sides, kind: _ModuleKind) -> _Judgement:
    """Return the judgement about a kind of module."""
    run = sides.run
    rollout = sides.rollout
    config = sides.config
    if config is None:
        return _Judgement(UNKNOWN, rollout.quantization_decided_by)
    decider = _find_scheme_decider(run, kind.trained)
    if decider:
        return _Judgement(UNKNOWN, decider)
    if len(kind.served) > 1:
        return _Judgement(UNKNOWN, BY_READER)
    (served,) = kind.served
    decider = _find_engine_decider(sides, config, kind.role, served)
    if decider:
        return _Judgement(UNKNOWN, decider)
    if kind.trained != served:
        return _Judgement(DIFFERS)
    if kind.role == ROUTER and sides.training.plan.settings.router is not None:
        return _Judgement(UNKNOWN, BY_LOGITS)
    if kind.trained is None:
        return _judge_dtype(run, rollout)
    return _Judgement(EQUAL)


def _find_engine_decider(
    sides: _Sides, config: ServingConfig, role: str, served: str | None
) -> str:
    """Return the source that decides the scheme in the engine; empty if the config does.

    Args:
        sides: The two sides.
        config: The quantization config.
        role: Megatron's name of the module within a layer.
        served: The scheme of the module by the config; None: not quantised.
    """
    if served is not None and role in ROUTER_MODULES:
        return BY_ROUTER
    if served is not None and role == OUTPUT_LAYER and config.method == MODELOPT:
        return BY_HEAD
    is_sent_in_fp8 = config.method == "fp8" and role in sides.rollout.quantised_by_name
    if served is None and is_sent_in_fp8:
        return BY_SENT_VALUES.format(framework=sides.rollout.framework)
    return ""


def _find_scheme_decider(run: Run, trained: str | None) -> str:
    """Return the source that decides the scheme in training; empty if the file does.

    Args:
        trained: The scheme that is planned; None: not quantised.
    """
    paths = ["model.fp8"]
    if trained is not None:
        paths = ["model.fp8", "model.fp8_recipe", "model.fp4"]
    for path in paths:
        decider = run.find_decider(path)
        if decider is not None:
            return f"{decider.rstrip(',')}, for {path},"
    return ""


def _judge_dtype(run: Run, rollout: Rollout) -> _Judgement:
    """Return the judgement about the dtype of modules that neither side quantises."""
    decider = run.reading.uncertainty.mode_decider
    if decider is not None:
        return _Judgement(UNKNOWN, decider.rstrip(","))
    if rollout.dtype is None:
        return _Judgement(UNKNOWN, "the engine's dtype, which is not stated")
    if rollout.dtype != PlanSettings.from_prediction(run.prediction).mode:
        return _Judgement(DIFFERS)
    return _Judgement(EQUAL)


def _get_mode_or_not_known(run: Run, training: TrainingSide) -> str:
    """Return the dtype of high precision in training, or `NOT_KNOWN`."""
    if run.reading.uncertainty.mode_decider is not None:
        return NOT_KNOWN
    return training.manifest.mode


def _format_layers(training: TrainingSide, rollout: Rollout, role: str, labels: list[str]) -> str:
    """Return the layers of a row as text: numbers, or "first 1, last 2" if sizes are not known.

    Args:
        role: Megatron's name of the module; the output layer is in no layer.
        labels: The labels of the layers.
    """
    if role == OUTPUT_LAYER:
        return ""
    if training.is_substitute:
        return _format_layer_ranges(training, rollout, labels)
    return f"layers {format_ranges(labels)}"


def _format_layer_ranges(training: TrainingSide, rollout: Rollout, labels: list[str]) -> str:
    """Return the layers of a run without sizes: the kept first and last layers, and other layers.

    The number of layers is not known, so last layers are counted from the end.
    """
    first = max(training.first, rollout.first)
    last = max(training.last, rollout.last)
    numbers = [int(label) for label in labels if label.isdigit()]
    at_start = [number for number in numbers if number <= first]
    at_end = [number for number in numbers if number > training.num_layers - last]
    has_others = len(numbers) > len(at_start) + len(at_end)
    if has_others and len(numbers) == training.num_layers:
        return "all layers"
    parts: list[str] = []
    if at_start:
        parts.append(f"first {format_ranges([str(number) for number in at_start])}")
    if has_others and (first or last):
        parts.append("layers between first and last")
    elif has_others:
        parts.append("all layers")
    if at_end:
        from_end = [str(training.num_layers - number + 1) for number in reversed(at_end)]
        parts.append(f"last {format_ranges(from_end)}")
    return ", ".join(parts)


def _has_scheme_on_both_sides(
    training: TrainingSide, config: ServingConfig | None, scheme: str
) -> bool:
    """Return whether both sides have modules of a scheme."""
    if config is None or scheme not in training.manifest.schemes:
        return False
    return any(target_scheme == scheme for _, target_scheme in config.targets)


def _make_scale_rows(run: Run, rollout: Rollout) -> Iterator[RolloutRow]:
    """Yield the rows about the scales of blocks of 128: powers of two, or any FP32 numbers."""
    trained = NOT_KNOWN
    stated = run.stated_environment.get(FP32_SCALES_VARIABLE)
    if stated == "1":
        trained = FP32
    elif stated is not None:
        trained = POWERS_OF_TWO
    served_by_subject = {
        "scales of weights": rollout.scales.weights,
        "scales of inputs": rollout.scales.inputs,
    }
    for subject, served in served_by_subject.items():
        judgement = _Judgement(EQUAL)
        if stated is None:
            judgement = _Judgement(UNKNOWN, BY_ENVIRONMENT)
        elif served is None:
            judgement = _Judgement(UNKNOWN, rollout.scales.decided_by)
        elif trained != served:
            judgement = _Judgement(DIFFERS)
        yield RolloutRow(
            subject=subject,
            training=trained,
            rollout=served or NOT_KNOWN,
            verdict=judgement.verdict,
            decided_by=judgement.decided_by,
        )


def _make_cache_row(training: TrainingSide, rollout: Rollout) -> RolloutRow:
    """Return the row about the cache of keys and values. Training has no cache."""
    trained = f"{training.manifest.mode}, nothing stored"
    if training.plan.settings.attention:
        trained = "attention in FP8, nothing stored"
    judgement = _judge_cache(training, rollout)
    served = rollout.cache or NOT_KNOWN
    if judgement.verdict == EQUAL:
        served = "in the dtype of the model"
    return RolloutRow(
        subject=CACHE_SUBJECT,
        training=trained,
        rollout=served,
        verdict=judgement.verdict,
        decided_by=judgement.decided_by,
    )


def _judge_cache(training: TrainingSide, rollout: Rollout) -> _Judgement:
    """Return the judgement about the dtype of the cache."""
    cache = rollout.cache
    if cache is None or cache not in CACHE_DTYPES:
        return _Judgement(UNKNOWN, "the engine, by the dtype of its cache,")
    if cache == MODEL_DTYPE and rollout.quantization is None:
        # SGLang and vLLM store FP8 with `auto` if the checkpoint's config says so.
        return _Judgement(UNKNOWN, rollout.quantization_decided_by)
    if cache == MODEL_DTYPE and training.plan.shape.indexer is not None:
        return _Judgement(UNKNOWN, "the engine: its cache of sparse attention may be FP8")
    if training.plan.settings.attention:
        return _Judgement(UNKNOWN, "the engine's attention, next to that of Transformer Engine,")
    if CACHE_DTYPES[cache]:
        return _Judgement(DIFFERS)
    return _Judgement(EQUAL)


def _make_dtype_row(run: Run, training: TrainingSide, rollout: Rollout) -> RolloutRow:
    """Return the row about all modules that are not linear layers: embedding, norms and others."""
    judgement = _judge_dtype(run, rollout)
    return RolloutRow(
        subject=OTHERS_SUBJECT,
        training=_get_mode_or_not_known(run, training),
        rollout=rollout.dtype or NOT_KNOWN,
        verdict=judgement.verdict,
        decided_by=judgement.decided_by,
    )


def _list_known_faults(
    sides: _Sides, config: ServingConfig, rows: list[RolloutRow]
) -> Iterator[str]:
    """Yield a sentence for each known fault of the config's list of modules."""
    if config.method == MODELOPT:
        # vLLM merges two projections as `mlp.gate_up_proj`, and finds `mlp.gate` in this name.
        fc1_differs = any(
            row.subject == "mlp.linear_fc1" and row.verdict == DIFFERS for row in rows
        )
        keeps_gate = any(entry.endswith(".mlp.gate") for entry in config.kept)
        if fc1_differs and keeps_gate:
            yield MXFP8_FAULT_MESSAGE
        return
    if sides.rollout.engine != VLLM:
        return
    schemes: dict[str, str | None] = {}
    for row in sides.training.manifest.rows:
        for name in row.iterate_served_names():
            served = _get_rollout_schemes(sides, row, name)
            schemes[name] = None
            if len(served) == 1:
                schemes[name] = next(iter(served))
    yield from describe_fused_conflicts(schemes)
