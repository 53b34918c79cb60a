"""`find_fit`: the changes with which a run fits into the memory of its GPUs, cheapest first.

    report = fit(run)
    report.options[0].changes       # (('model.recompute_granularity', 'full'), ...)

Each change has a price. A price only orders the options. It does not measure time:

- Sharding the optimizer is free: ranks send the same number of bytes.
- A smaller micro-batch makes smaller GEMMs.
- Selective recomputation runs the MLPs again.
- Each doubling of a parallel size adds messages or idle stages.
- Full recomputation runs every forward pass again, which is a third more work.

The number of GPUs stays as it is declared. So larger parallel sizes leave fewer data-parallel
replicas. If no layout of these GPUs fits, the options are for a single replica on more GPUs, the
fewest GPUs first.

For a model with very many layers, only the cheapest layouts are planned. The caller may refuse an
option that fits. The command line refuses an option if `check` finds an error or warning that it
does not find in the run itself.
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
from bridge.plan.memory_schedule import count_activation_bytes
from bridge.plan.planned_run import PlannedRun
from bridge.rules.facts.divisions import find_uneven_sizes

USABLE_SHARE = 0.9
"""Share of a GPU's memory that is available for the counted bytes.

The rest is for the CUDA context, messages, workspaces and fragmentation.
"""
MAX_OPTIONS = 5
MAX_DOUBLINGS = 6
"""The most doublings of all parallel sizes together."""
MAX_TENSOR_PARALLEL = 8
"""The number of GPUs of a node. Tensor parallelism rarely goes beyond a node."""
MAX_MICRO_BATCH = 128
MAX_PLANNED_LAYERS = 50_000
"""The most planned layers of all layouts together. Then the search ends."""

SMALLER_BATCH, SELECTIVE, DOUBLING, FULL = 1, 1, 2, 4
"""Prices: a halved micro-batch, recomputed MLPs, a doubled parallel size, recomputed layers."""
Changes = dict[str, Any]
RECOMPUTE_OPTIONS: tuple[tuple[int, Changes], ...] = (
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
RECOMPUTE_SCORES: Changes = {
    "model.recompute_granularity": "selective",
    "model.recompute_modules": ["core_attn"],
}
"""The kind of recomputation that frees the scores of attention, if attention keeps them."""
PARALLEL_SIZE_FIELDS = {
    "tensor": "model.tensor_model_parallel_size",
    "pipeline": "model.pipeline_model_parallel_size",
    "expert": "model.expert_model_parallel_size",
    "context": "model.context_parallel_size",
}
"""Parallel size -> its field, in the order in which equally priced layouts are tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOption:
    """Changes with which the run fits."""

    changes: tuple[tuple[str, Any], ...]
    price: int
    micro_batch_size: int
    needed_bytes: int
    """The bytes of the fullest rank, at the micro-batch of the run or of the changes."""
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FitReport:
    """The options with which a run fits, cheapest first. No options: no tried layout fits."""

    memory_bytes: int
    usable_bytes: int
    options: tuple[FitOption, ...]
    declared_ranks: int | None = None
    """The number of GPUs that the run declares, if an option needs another number (`FitOption.ranks`).

    None: all options fit on the declared GPUs.
    """
    global_batch_size: int | None = None
    """The samples of a step, which replicas and micro-batches divide.

    None: micro-batches are powers of two.
    """
    untried: int = 0
    """The number of layouts that were not tried before the search ended."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        content = asdict(self)
        options = []
        for option in self.options:
            options.append({**asdict(option), "changes": dict(option.changes)})
        content["options"] = options
        return content


def find_fit(
    run: PlannedRun, *, is_sound: Callable[[PlannedRun], bool] = lambda _: True
) -> FitReport:
    """Return the options with which a sound run fits, cheapest first.

    An option that only adds changes to a cheaper option is left out.
    """
    memory = get_memory_to_fit(run)
    usable = int(memory * USABLE_SHARE)
    options, untried = _search_layouts(run, usable, is_sound)
    declared = None
    if not options and run.target.count is not None:
        declared = run.target.count
        options, untried = _search_layouts(
            run.with_target(replace(run.target, count=None)), usable, is_sound
        )

    def order(option: FitOption) -> tuple[int, int, int]:
        ranks = option.ranks if declared else 0
        return ranks, option.price, len(option.changes)

    options.sort(key=order)
    kept: list[FitOption] = []
    same_values = declared is not None
    for option in options:
        if not any(_is_extension_of(option, cheaper, same_values=same_values) for cheaper in kept):
            kept.append(option)
    samples: int | None = _get_global_batch_size(run)
    if samples is not None and samples < run.parallel.data:
        samples = None  # there are fewer samples than replicas
    return FitReport(
        memory_bytes=memory,
        usable_bytes=usable,
        options=tuple(kept[:MAX_OPTIONS]),
        declared_ranks=declared,
        global_batch_size=samples,
        untried=untried,
    )


def get_memory_to_fit(run: PlannedRun) -> int:
    """Return the memory of one GPU that the run is to fit into.

    Raises:
        RunConfigError: The memory is not known, or the run cannot be counted.
    """
    if run.sharded_by is not None:
        rule = f"weights that are sharded are not counted, got {run.sharded_by}=True"
        raise RunConfigError(f"--fit: {rule}. Drop --fit, or that setting.")
    if run.prediction.unread_options:
        unread = ", ".join(run.prediction.unread_options)
        rule = f"a run with options that are not read cannot be fitted, got {unread}"
        raise RunConfigError(f"--fit: {rule}. Drop --fit.")
    if not run.plan.shape.vocab_size:
        rule = "--fit needs the sizes of embedding and output layer"
        raise RunConfigError.of("model.vocab_size", rule, None, "Add model.vocab_size=VALUE.")
    if run.memory_bytes is None:
        rule = "needs the memory of a GPU, got a target without one"
        raise RunConfigError(f"--fit: {rule}. Add --target h100x8, for example.")
    return run.memory_bytes


def _search_layouts(
    run: PlannedRun, usable: int, is_sound: Callable[[PlannedRun], bool]
) -> tuple[list[FitOption], int]:
    """Return the options of every layout, and how many layouts were not tried.

    Layouts that add to a cheaper option are left out.
    """
    # The shape is read first, because a run that cannot be planned is an error. A layout that
    # cannot be planned is only left out.
    shape = run.plan.shape
    most = max(1, MAX_PLANNED_LAYERS // shape.num_layers)
    options: list[FitOption] = []
    changed_fields: list[set[str]] = []
    planned = untried = 0
    for price, layout in sorted(_generate_layouts(run), key=lambda priced: priced[0]):
        if any(fields <= layout.keys() for fields in changed_fields):
            continue
        candidate = run.with_values(layout)
        if not _can_be_split(candidate, shape):
            continue
        if planned == most:
            untried += 1
            continue
        planned += 1
        for option in _generate_options(candidate, layout, price, usable, is_sound):
            options.append(option)
            changed_fields.append(set(dict(option.changes)))
    return options, untried


def _is_extension_of(option: FitOption, cheaper: FitOption, *, same_values: bool) -> bool:
    """Return whether an option changes every field that a cheaper option changes.

    Args:
        same_values: Whether the values of these fields must be equal too.
    """
    changes = dict(option.changes)
    for name, value in cheaper.changes:
        if name not in changes:
            return False
        if same_values and changes[name] != value:
            return False
    return True


def _generate_layouts(run: PlannedRun) -> Iterator[tuple[int, Changes]]:
    """Yield (price, changes) of each layout.

    The layouts double parallel sizes, with the optimizer of the run and with a sharded optimizer.
    """
    parallel, settings = run.parallel, run.plan.settings
    shards: list[Changes] = [{}]
    if not settings.distributed and parallel.data * parallel.context > 1:
        sharded = {
            "optimizer.use_distributed_optimizer": True,
            "ddp.use_distributed_optimizer": True,
        }
        shards = [sharded, {}]
    doublings = [range(_get_max_doublings(run, size) + 1) for size in PARALLEL_SIZE_FIELDS]
    for counts in itertools.product(*doublings):
        if sum(counts) > MAX_DOUBLINGS:
            continue
        sizes: Changes = {}
        for (size, field), count in zip(PARALLEL_SIZE_FIELDS.items(), counts, strict=True):
            if count:
                sizes[field] = getattr(parallel, size) * 2**count
        if PARALLEL_SIZE_FIELDS["tensor"] in sizes and not parallel.sequence_parallel:
            sizes["model.sequence_parallel"] = True
        for shard in shards:
            yield DOUBLING * sum(counts), {**shard, **sizes}


def _get_max_doublings(run: PlannedRun, size: str) -> int:
    """Return how often a parallel size may be doubled. 0: doubling is useless or not allowed."""
    if size == "tensor":
        return max(0, int(math.log2(MAX_TENSOR_PARALLEL / run.parallel.tensor)))
    if size == "context" and run.workload.seq_length:
        return 2
    if size == "pipeline" and run.parallel.layout is None:
        return MAX_DOUBLINGS
    if size == "expert" and run.plan.shape.experts is not None:
        return MAX_DOUBLINGS
    return 0


def _can_be_split(run: PlannedRun, shape: ModelShape) -> bool:
    try:
        parallel = run.parallel
        parallel.split_layers(shape.num_layers)
    except RunConfigError:
        return False
    model = SimpleNamespace(**run.section("model"))
    crosses = parallel.pipeline == 2 and parallel.virtual > 1 and not model.overlap_p2p_comm
    is_even = not [*find_uneven_sizes(model, shape, parallel, run.workload.seq_length)]
    return run.target.count in (None, parallel.world_size) and is_even and not crosses


def _generate_options(
    run: PlannedRun,
    layout: Changes,
    price: int,
    usable: int,
    is_sound: Callable[[PlannedRun], bool],
) -> Iterator[FitOption]:
    """Yield the options of a layout, one per kind of recomputation that fits and is sound."""
    stated = run.workload.micro_batch_size
    if max(rank.peak(0) for rank in run.memory.ranks) > usable:
        return
    kinds = [*RECOMPUTE_OPTIONS]
    if keeps_scores(run.plan, run.workload):
        kinds.insert(1, (SELECTIVE, RECOMPUTE_SCORES))
    for price_of_recompute, recompute in kinds:
        if recompute and not run.workload.seq_length:
            return
        if recompute and run.workload.recompute in (
            "full",
            recompute["model.recompute_granularity"],
        ):
            continue
        candidate = run.with_values(recompute)
        fitting = [
            size
            for size in _list_micro_batches(run)
            if _compute_needed_bytes(candidate, size) <= usable
        ]
        if not fitting:
            continue
        used = min(stated, max(fitting))
        smaller: Changes = {}
        halvings = 0
        if used != stated:
            smaller["train.micro_batch_size"] = used
            halvings = math.ceil(math.log2(stated / used))
        if not is_sound(candidate.with_values(smaller)):
            continue
        yield FitOption(
            changes=tuple({**layout, **recompute, **smaller}.items()),
            price=price + price_of_recompute + SMALLER_BATCH * halvings,
            micro_batch_size=max(fitting),
            needed_bytes=_compute_needed_bytes(candidate, used),
            ranks=run.parallel.world_size,
        )


def _list_micro_batches(run: PlannedRun) -> list[int]:
    """Return the micro-batches to try: divisors of the samples of a replica, or powers of two."""
    samples = _get_global_batch_size(run) // run.parallel.data
    if not samples:
        return [2**power for power in range(MAX_MICRO_BATCH.bit_length())]
    largest = min(samples, MAX_MICRO_BATCH)
    return [size for size in range(1, largest + 1) if samples % size == 0]


def _get_global_batch_size(run: PlannedRun) -> int:
    """Return the samples of a step, or 0 if the run does not state them."""
    return run.section("train")["global_batch_size"] or 0


def _compute_needed_bytes(run: PlannedRun, micro_batch_size: int) -> int:
    plan = run.plan
    workload = run.with_values({"train.micro_batch_size": micro_batch_size}).workload
    peaks = []
    for rank, places in zip(run.memory.ranks, plan.stages, strict=True):
        activations = count_activation_bytes(plan, places, workload)
        peaks.append(rank.peak(activations))
    return max(peaks)
