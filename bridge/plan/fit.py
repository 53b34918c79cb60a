"""The changes with which a run fits into the memory of its GPUs, cheapest first.

    report = fit(run)
    report.options[0].changes       # (('model.recompute_granularity', 'full'), ...)

Each change has a price, which only orders the options and is no measure of time: sharding the optimizer sends the same
bytes; a smaller micro-batch makes smaller GEMMs; selective recomputation runs the MLPs again; each doubling
of a parallel size adds messages or idle stages; full recomputation runs every forward pass again, a third more work.
The number of GPUs stays as it is declared, so that larger parallel sizes leave fewer data-parallel replicas. Where no
layout of these GPUs fits, the options are for one replica on more of them, the fewest first.

A model of very many layers is planned for its cheapest layouts alone. The caller may refuse an option that fits: the
command line refuses those with which `check` finds an error or warning that it does not find in the run itself.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

from bridge.errors import RunConfigError
from bridge.model.shape import ModelShape
from bridge.plan.memory_activations import keeps_scores
from bridge.plan.memory_schedule import activation_bytes
from bridge.plan.run import PlannedRun
from bridge.rules.facts.divisions import uneven_sizes

USABLE = 0.9
"""Part of a GPU's memory for what is counted; the rest is for the CUDA context, messages, workspaces, fragmentation."""
MOST_OPTIONS = 5
MOST_DOUBLINGS = 6
"""Of all parallel sizes together."""
LARGEST_TENSOR = 8
"""GPUs of a node, which tensor parallelism rarely leaves."""
LARGEST_MICRO_BATCH = 128
MOST_PLANNED_LAYERS = 50_000
"""Layers of all layouts together that are planned before the search ends."""

SMALLER_BATCH, SELECTIVE, DOUBLING, FULL = 1, 1, 2, 4
"""Prices of halving the micro-batch, of recomputing the MLPs, of a doubled size, of recomputing all."""
RECOMPUTE: tuple[tuple[int, dict[str, Any]], ...] = (
    (0, {}),
    (SELECTIVE, {"model.recompute_granularity": "selective", "model.recompute_modules": ["mlp"]}),
    (
        FULL,
        {
            "model.recompute_granularity": "full",
            "model.recompute_method": "uniform",
            "model.recompute_num_layers": 1,
        },
    ),
)
OF_SCORES: dict[str, Any] = {
    "model.recompute_granularity": "selective",
    "model.recompute_modules": ["core_attn"],
}
"""The kind that frees the scores of attention, where it keeps them."""
SIZES = {
    "tensor": "model.tensor_model_parallel_size",
    "pipeline": "model.pipeline_model_parallel_size",
    "expert": "model.expert_model_parallel_size",
    "context": "model.context_parallel_size",
}
"""Parallel size -> its field, in the order in which equally priced layouts are tried."""
Changes = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOption:
    """Changes with which the run fits."""

    changes: tuple[tuple[str, Any], ...]
    price: int
    micro_batch_size: int
    needed_bytes: int
    """Of the fullest rank, at the micro-batch of the run, or at the one that the changes name."""
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """The options, cheapest first; none where no layout that was tried fits."""

    memory_bytes: int
    usable_bytes: int
    options: tuple[FitOption, ...]
    declared_ranks: int | None = None
    """GPUs of the run, where the options need more than these; None: they fit on the GPUs that the run has."""
    global_batch_size: int | None = None
    """The samples of a step, which replicas and micro-batches divide; None: micro-batches are powers of two."""
    untried: int = 0
    """Layouts that were left when the search ended."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        content = asdict(self)
        content["options"] = [
            {**asdict(option), "changes": dict(option.changes)} for option in self.options
        ]
        return content


def fit(run: PlannedRun, *, is_sound: Callable[[PlannedRun], bool] = lambda _: True) -> FitReport:
    """Return the options with which a sound run fits, cheapest first, without those that add to a cheaper one."""
    memory = memory_to_fit(run)
    usable = int(memory * USABLE)
    found, untried = _search(run, usable, is_sound)
    declared = None
    if not found and run.target.count is not None:
        declared = run.target.count
        found, untried = _search(run.on(replace(run.target, count=None)), usable, is_sound)
    found.sort(
        key=lambda option: (option.ranks if declared else 0, option.price, len(option.changes))
    )
    kept: list[FitOption] = []
    for option in found:
        if not any(_adds_to(option, cheaper, same_values=declared is not None) for cheaper in kept):
            kept.append(option)
    whole = _global_batch_size(run)
    return FitReport(
        memory_bytes=memory,
        usable_bytes=usable,
        options=tuple(kept[:MOST_OPTIONS]),
        declared_ranks=declared,
        global_batch_size=whole if whole >= run.parallel.data else None,
        untried=untried,
    )


def memory_to_fit(run: PlannedRun) -> int:
    """Return the memory of one GPU that the run is to fit into; RunConfigError where it is not known."""
    if run.sharded_by is not None:
        rule = f"weights that are sharded are not counted, got {run.sharded_by}=True"
        raise RunConfigError(f"--fit: {rule}. Drop --fit, or that setting.")
    if run.prediction.uncounted:
        rule = f"a run with options that are not read cannot be fitted, got {', '.join(run.prediction.uncounted)}"
        raise RunConfigError(f"--fit: {rule}. Drop --fit.")
    if not run.plan.shape.vocab_size:
        rule = "--fit needs the sizes of embedding and output layer"
        raise RunConfigError.of("model.vocab_size", rule, None, "Add model.vocab_size=VALUE.")
    if run.memory_bytes is None:
        rule = "needs the memory of a GPU, got a target without one"
        raise RunConfigError(f"--fit: {rule}. Add --target h100x8, for example.")
    return run.memory_bytes


def _search(
    run: PlannedRun, usable: int, is_sound: Callable[[PlannedRun], bool]
) -> tuple[list[FitOption], int]:
    """Return the options of every layout, without layouts that add to a cheaper option, and how many were not tried."""
    shape = (
        run.plan.shape
    )  # a run that cannot be planned is an error, a layout that cannot be planned is left out
    most = max(1, MOST_PLANNED_LAYERS // shape.num_layers)
    found: list[FitOption] = []
    planned = untried = 0
    for price, layout in sorted(_layouts(run), key=lambda priced: priced[0]):
        if any({*dict(option.changes)} <= {*layout} for option in found):
            continue
        candidate = run.changed(layout)
        if not _can_be_split(candidate, shape):
            continue
        if planned == most:
            untried += 1
            continue
        planned += 1
        found += _options(candidate, layout, price, usable, is_sound)
    return found, untried


def _adds_to(option: FitOption, cheaper: FitOption, *, same_values: bool) -> bool:
    """Return whether an option changes whatever a cheaper one does, and more; to the same values, where that counts."""
    changes = dict(option.changes)
    return all(
        name in changes and (not same_values or changes[name] == value)
        for name, value in cheaper.changes
    )


def _layouts(run: PlannedRun) -> Iterator[tuple[int, Changes]]:
    """Yield (price, changes) of each layout: the optimizer sharded or as it is, and parallel sizes doubled."""
    parallel, settings = run.parallel, run.plan.settings
    shards: list[Changes] = [{}]
    if not settings.distributed and parallel.data * parallel.context > 1:
        shards = [
            {"optimizer.use_distributed_optimizer": True, "ddp.use_distributed_optimizer": True},
            {},
        ]
    for counts in itertools.product(*(range(_most_doublings(run, size) + 1) for size in SIZES)):
        if sum(counts) > MOST_DOUBLINGS:
            continue
        sizes = {
            field: getattr(parallel, size) * 2**count
            for (size, field), count in zip(SIZES.items(), counts, strict=True)
            if count
        }
        if SIZES["tensor"] in sizes and not parallel.sequence_parallel:
            sizes["model.sequence_parallel"] = True
        for shard in shards:
            yield DOUBLING * sum(counts), {**shard, **sizes}


def _most_doublings(run: PlannedRun, size: str) -> int:
    if size == "pipeline":
        return MOST_DOUBLINGS if run.parallel.layout is None else 0
    if size == "expert":
        return MOST_DOUBLINGS if run.plan.shape.experts is not None else 0
    if size == "context":
        return 2 if run.workload.seq_length else 0
    return max(0, int(math.log2(LARGEST_TENSOR / run.parallel.tensor)))


def _can_be_split(run: PlannedRun, shape: ModelShape) -> bool:
    try:
        parallel = run.parallel
        parallel.places(shape.num_layers)
    except RunConfigError:
        return False
    model = SimpleNamespace(**run.section("model"))
    crosses = parallel.pipeline == 2 and parallel.virtual > 1 and not model.overlap_p2p_comm
    is_even = not [*uneven_sizes(model, shape, parallel, run.workload.seq_length)]
    return run.target.count in (None, parallel.world_size) and is_even and not crosses


def _options(
    run: PlannedRun,
    layout: Changes,
    price: int,
    usable: int,
    is_sound: Callable[[PlannedRun], bool],
) -> Iterator[FitOption]:
    """Yield the options of one layout: one for each kind of recomputation that fits and is sound."""
    asked = run.workload.micro_batch_size
    if max(rank.peak(0) for rank in run.memory.ranks) > usable:
        return
    kinds = [*RECOMPUTE]
    if keeps_scores(run.plan, run.workload):
        kinds.insert(1, (SELECTIVE, OF_SCORES))
    for extra, recompute in kinds:
        if recompute and not run.workload.seq_length:
            return
        if recompute and run.workload.recompute in (
            "full",
            recompute["model.recompute_granularity"],
        ):
            continue
        candidate = run.changed(recompute)
        fitting = [size for size in _micro_batches(run) if _needed(candidate, size) <= usable]
        if not fitting:
            continue
        used = min(asked, max(fitting))
        smaller = {} if used == asked else {"train.micro_batch_size": used}
        if not is_sound(candidate.changed(smaller)):
            continue
        yield FitOption(
            changes=tuple({**layout, **recompute, **smaller}.items()),
            price=price
            + extra
            + SMALLER_BATCH * (math.ceil(math.log2(asked / used)) if smaller else 0),
            micro_batch_size=max(fitting),
            needed_bytes=_needed(candidate, used),
            ranks=run.parallel.world_size,
        )


def _micro_batches(run: PlannedRun) -> list[int]:
    """Return the micro-batches to try: those that divide the samples of a replica, or powers of two."""
    share = _global_batch_size(run) // run.parallel.data
    if not share:
        return [2**power for power in range(LARGEST_MICRO_BATCH.bit_length())]
    return [size for size in range(1, min(share, LARGEST_MICRO_BATCH) + 1) if share % size == 0]


def _global_batch_size(run: PlannedRun) -> int:
    """Return the samples of a step; 0 where the run does not state them."""
    return run.section("train")["global_batch_size"] or 0


def _needed(run: PlannedRun, micro_batch_size: int) -> int:
    plan, load = run.plan, run.changed({"train.micro_batch_size": micro_batch_size}).workload
    ranks = zip(run.memory.ranks, plan.stages, strict=True)
    return max(rank.peak(activation_bytes(plan, places, load)) for rank, places in ranks)
