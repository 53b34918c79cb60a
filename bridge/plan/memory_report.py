"""`build_memory_report`: the bytes on a rank of weights, gradients, masters, states, activations.

All kinds except activations are counted by parameter, in the buffers that Megatron Core allocates,
padding included. These counts equal the bytes of the objects of a real run. Activations are the
tensors that autograd keeps from the forward to the backward pass (`memory_activations`). Other
memory of a device is not counted: CUDA context, communication buffers, workspaces, fragmentation.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bridge.model.layout import ModelChunk
from bridge.model.section import read_section
from bridge.plan.memory_buffers import (
    GATHERING_STRATEGIES,
    ParameterGroup,
    build_ddp_groups,
    build_fsdp_groups,
    count_gathered_bytes,
)
from bridge.plan.memory_parameters import (
    FP32_BYTES,
    Parameter,
    count_scale_bytes,
    count_two_format_bytes,
    get_element_bytes,
    has_column_copy,
    is_per_tensor,
    list_chunk_parameters,
)
from bridge.plan.memory_schedule import count_activation_bytes
from bridge.plan.plan_settings import PlanSettings
from bridge.plan.precision_plan import PrecisionPlan
from bridge.plan.workload import Workload

MEMORY_KINDS = (
    "weights",
    "low-precision copies",
    "gradients",
    "master weights",
    "optimizer state",
    "amax state",
    "activations",
)
HOST_MEMORY_KINDS = ("master weights", "optimizer state", "gradients")
"""Kinds that HybridDeviceOptimizer keeps on the host."""
MUON_OPTIMIZERS = ("muon", "dist_muon")
"""Optimizers that keep one moment for a matrix. `adaptive_muon` keeps two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """The memory of a rank of a pipeline stage, for a data-parallel rank."""

    stage: int
    data_rank: int
    parameters: int
    bytes_of: dict[str, int]
    host_bytes_of: dict[str, int]
    """Kind -> bytes in the memory of the host that HybridDeviceOptimizer needs for the rank."""
    step_bytes: int
    """Bytes of the FP32 gradients that the optimizer's step makes from narrower gradients.

    Activations are free by then.
    """

    @property
    def static(self) -> int:
        """Bytes without activations."""
        return sum(size for kind, size in self.bytes_of.items() if kind != "activations")

    @property
    def host(self) -> int:
        """Bytes in the memory of the host."""
        return sum(self.host_bytes_of.values())

    @property
    def total(self) -> int:
        """Bytes at the peak of a training step: in the passes, or in the step of the optimizer."""
        return self.peak(self.bytes_of["activations"])

    def peak(self, activations: int) -> int:
        """Return the bytes at the peak of a step with so many bytes of activations."""
        return self.static + max(activations, self.step_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """The memory of every stage."""

    label: str
    ranks: tuple[RankMemory, ...]
    parameters: int
    """Elements of the whole model, each counted once, without padding of the vocabulary."""
    workload: Workload
    layout: str
    notes: tuple[str, ...] = ()

    @property
    def largest(self) -> RankMemory:
        """The rank that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.total)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, in bytes."""
        ranks = []
        for rank in self.ranks:
            ranks.append({**asdict(rank), "total": rank.total, "host": rank.host})
        return {
            "precision": self.label,
            "layout": self.layout,
            "parameters": self.parameters,
            "workload": asdict(self.workload),
            "ranks": ranks,
            "notes": list(self.notes),
        }


def build_memory_report(
    plan: PrecisionPlan,
    *,
    workload: Workload | None = None,
    ddp: Any = None,
    data_rank: int = 0,
    capability: tuple[int, int] | None = None,
) -> MemoryReport:
    """Return the bytes of a rank of each pipeline stage.

    Args:
        plan: The precision plan, with the layout and the precision fields of optimizer and DDP
            config.
        workload: Sequence length, micro-batch and recomputation. None: activations are not counted.
        ddp: `DistributedDataParallelConfig` fields, for the buckets.
        data_rank: The data-parallel rank. The shards of ranks differ by padding, and by the
            parameters at their borders.
        capability: Compute capability of the GPU, (9, 0) for Hopper. None: as for Hopper.
    """
    if workload is None:
        workload = Workload()
    buckets = read_section("ddp", ddp).values
    ranks = []
    for places in plan.stages:
        rank = _count_rank(
            plan, places, workload, ddp=buckets, data_rank=data_rank, capability=capability
        )
        ranks.append(rank)
    return MemoryReport(
        label=plan.label,
        ranks=tuple(ranks),
        parameters=_count_parameters(plan),
        workload=workload,
        layout=_format_layout(plan),
        notes=tuple(_list_notes(plan, workload, buckets, capability)),
    )


def _count_parameters(plan: PrecisionPlan) -> int:
    tied = plan.shape.share_embeddings_and_output_weights
    count = 0
    for layer in plan.layers:
        for planned in layer.modules:
            if not (tied and planned.kind == "head"):
                count += planned.module.parameters
    return count


def _count_rank(
    plan: PrecisionPlan,
    places: list[ModelChunk],
    workload: Workload,
    *,
    ddp: Mapping[str, Any],
    data_rank: int,
    capability: tuple[int, int] | None,
) -> RankMemory:
    settings = plan.settings
    bytes_of = dict.fromkeys(MEMORY_KINDS, 0)
    host_bytes_of = dict.fromkeys(HOST_MEMORY_KINDS, 0)
    count = step = 0
    for place in places:
        parameters = list_chunk_parameters(plan, place)
        count += sum(parameter.numel for parameter in parameters)
        bytes_of["low-precision copies"] += _count_copies(parameters, capability, settings, ddp)
        bytes_of["amax state"] += _count_amax_state(plan, parameters)
        if settings.fsdp:
            groups = build_fsdp_groups(
                parameters, plan.parallel, ddp, data_rank, has_units=settings.has_units
            )
            _add_gathered(groups, settings, bytes_of)
        else:
            groups = build_ddp_groups(parameters, plan, place, ddp, data_rank)
        for group in groups:
            _add_group(group, settings, bytes_of)
            step += _count_step_bytes(group, settings)
            if settings.is_hybrid_device and not settings.fsdp:
                _move_to_host(group, settings, bytes_of, host_bytes_of)
    bytes_of["activations"] = count_activation_bytes(plan, places, workload)
    return RankMemory(
        stage=places[0].stage,
        data_rank=data_rank,
        parameters=count,
        bytes_of=bytes_of,
        host_bytes_of=host_bytes_of,
        step_bytes=step,
    )


def _add_group(group: ParameterGroup, settings: PlanSettings, bytes_of: dict[str, int]) -> None:
    """Add the weights, gradients, masters and states of a group."""
    first = group.parameters[0]
    weight = get_element_bytes(first.storage)
    gradient: float = FP32_BYTES
    if not first.is_fp32:
        gradient = get_element_bytes(settings.grad_reduce)
    bytes_of["weights"] += round(group.weights * weight)
    bytes_of["gradients"] += round(group.gradients * gradient)
    if not first.is_fp32 or settings.fsdp:
        bytes_of["master weights"] += group.masters * _get_master_bytes(settings)
    state = _get_state_bytes(settings, group.parameters)
    bytes_of["optimizer state"] += round(group.states * state)


def _count_step_bytes(group: ParameterGroup, settings: PlanSettings) -> int:
    """Return the bytes of FP32 gradients that the optimizer's step makes from narrower ones."""
    is_narrow = settings.grad_reduce != "fp32" and not group.parameters[0].is_fp32
    if is_narrow and settings.casts_gradients:
        return group.states * FP32_BYTES
    return 0


def _move_to_host(
    group: ParameterGroup,
    settings: PlanSettings,
    bytes_of: dict[str, int],
    host_bytes_of: dict[str, int],
) -> None:
    """Move the host's share of a group from the GPU, and add the FP32 copies on the host.

    HybridDeviceOptimizer keeps a master, the state and a gradient of each parameter on the host. On
    the GPU it keeps FP32 gradients of narrower ones from the first step on. Without the
    precision-aware optimizer Megatron's masters stay on the GPU.

    Source: megatron-core 0.16.1 to Megatron-LM main of 2026-08-22,
    optimizer/cpu_offloading/hybrid_optimizer.py _get_sub_optimizer_param_groups,
    _set_sub_optimizer_grads.
    """
    share = settings.offload_share
    masters = 0
    if settings.owns_masters:
        masters = round(group.masters * _get_master_bytes(settings) * share)
    states = round(group.states * _get_state_bytes(settings, group.parameters) * share)
    copies = round(group.states * FP32_BYTES * share)
    bytes_of["master weights"] -= masters
    bytes_of["optimizer state"] -= states
    if settings.owns_masters and settings.grad_reduce != "fp32":
        bytes_of["gradients"] += group.states * FP32_BYTES - copies
    host_bytes_of["master weights"] += copies
    host_bytes_of["optimizer state"] += states
    host_bytes_of["gradients"] += copies


def _add_gathered(
    groups: Sequence[ParameterGroup], settings: PlanSettings, bytes_of: dict[str, int]
) -> None:
    """Add the buffers of Megatron-FSDP for gathered weights and gradients.

    The column-wise copies of MXFP8 have a buffer too.
    """
    gradient = get_element_bytes(settings.grad_reduce)
    weight_bytes: list[float] = []
    gradient_bytes: list[float] = []
    for group in groups:
        first = group.parameters[0]
        weight = get_element_bytes(first.storage)
        if first.is_stored_low and settings.scheme == "mxfp8":
            bytes_of["low-precision copies"] += round(group.weights * weight)
        is_reduced = 0 < group.gradients < group.whole
        weight_bytes.append(group.whole * weight * group.is_gathered)  # 0 if it is not gathered
        gradient_bytes.append(group.whole * gradient * is_reduced)
    bytes_of["weights"] += round(count_gathered_bytes(groups, weight_bytes))
    bytes_of["gradients"] += round(count_gathered_bytes(groups, gradient_bytes))


def _count_copies(
    parameters: Iterable[Parameter],
    capability: tuple[int, int] | None,
    settings: PlanSettings,
    ddp: Mapping[str, Any],
) -> int:
    """Return the bytes of scales and copies of quantised weights that exist for a whole step.

    Megatron-FSDP has separate buffers for the column-wise copies of MXFP8 weights. It drops other
    copies after their use.
    """
    total = 0
    for parameter, count in Counter(parameters).items():
        is_stored_low, scheme = parameter.is_stored_low, parameter.scheme
        is_dropped = settings.fsdp and is_stored_low and not ddp["keep_fp8_transpose_cache"]
        has_column = has_column_copy(scheme, capability) and not is_dropped
        if parameter.copies is not None and not is_stored_low:
            high = get_element_bytes(parameter.storage)
            total += count * count_two_format_bytes(
                parameter.copies, parameter.rows, parameter.columns, high
            )
            continue
        if parameter.computes == parameter.storage and not is_stored_low:
            continue
        elements = round(parameter.numel * get_element_bytes(parameter.computes))
        size = count_scale_bytes(scheme, parameter.rows, parameter.columns)
        if not is_stored_low:
            size += elements
        if has_column:
            size += elements
            if not is_per_tensor(scheme):
                size += count_scale_bytes(scheme, parameter.columns, parameter.rows)
        total += count * size
    return total


def _count_amax_state(plan: PrecisionPlan, parameters: Iterable[Parameter]) -> int:
    """Return the bytes of the state of delayed scaling: scales and amax history.

    A linear layer has 3 slots for its forward pass and 2 for its backward pass.
    """
    history = plan.settings.amax_history
    if not history:
        return 0
    linears = 0
    for parameter in parameters:
        is_low = parameter.is_stored_low or parameter.computes != parameter.storage
        if parameter.name == "weight" and is_low:
            linears += 1
    return linears * (history + 1) * 5 * FP32_BYTES


def _get_master_bytes(settings: PlanSettings) -> int:
    if settings.remainders:
        return 2
    if settings.master is None:
        return 0
    return round(get_element_bytes(settings.master))


def _get_state_bytes(settings: PlanSettings, parameters: Sequence[Parameter]) -> float:
    """Return the bytes per element of the optimizer's state.

    Adam keeps two moments. Muon keeps a single moment for matrices.

    Source: megatron-core 0.16.1 optimizer/muon.py get_megatron_muon_optimizer.
    """
    first = round(get_element_bytes(settings.exp_avg))
    second = round(get_element_bytes(settings.exp_avg_sq))
    if settings.optimizer == "sgd":
        return first
    if settings.optimizer not in MUON_OPTIMIZERS:
        return first + second
    elements = matrices = 0
    for parameter in parameters:
        elements += parameter.numel
        if parameter.rows > 1 and parameter.layer not in ("embedding", "output"):
            matrices += parameter.numel
    return first + second * (1 - matrices / elements)


def _format_layout(plan: PrecisionPlan) -> str:
    parallel = plan.parallel
    expert_tensor = parallel.expert_tensor
    if expert_tensor == parallel.tensor:
        expert_tensor = 1  # a size that equals TP is not printed
    sizes = (
        ("TP", parallel.tensor),
        ("PP", parallel.pipeline),
        ("VPP", parallel.virtual),
        ("CP", parallel.context),
        ("EP", parallel.expert),
        ("ETP", expert_tensor),
        ("DP", parallel.data),
    )
    product = " x ".join(f"{name} {size}" for name, size in sizes if size > 1 or name == "DP")
    ranks = "ranks" if parallel.world_size > 1 else "rank"
    layout = f"{parallel.world_size} {ranks}: {product}"
    if plan.settings.distributed:
        layout += ", distributed optimizer"
    return layout


def _list_notes(
    plan: PrecisionPlan,
    workload: Workload,
    ddp: Mapping[str, Any],
    capability: tuple[int, int] | None,
) -> Iterator[str]:
    """Yield sentences about the counted parts, and how they are counted."""
    settings = plan.settings
    if plan.is_frozen and plan.adapter is None:
        yield (
            "The language model is frozen: it has no gradients, masters, optimizer state and "
            "weight gradients."
        )
    if not plan.shape.vocab_size:
        yield (
            "Embedding and output layer are not counted: the vocabulary (model.vocab_size) is not "
            "stated."
        )
    if not workload.seq_length:
        yield "Activations are not counted: the sequence length (model.seq_length) is not stated."
    yield from _list_fsdp_notes(settings, ddp)
    yield from _list_offload_notes(settings)
    is_gpu_open = capability is None and not has_column_copy(settings.scheme_row, (10, 0))
    if settings.family is not None and is_gpu_open:
        yield (
            "Whether the GPU needs transposed FP8 copies is not known: counted with them, which "
            "Hopper needs and Blackwell not."
        )
    if settings.family is not None and not settings.low_parameters:
        yield (
            f"Weights stay in {settings.mode}, and copies in {settings.family.upper()} are added, "
            f"which takes more memory than {settings.mode} alone; "
            f"{settings.family}_param_gather=true stores them once."
        )
    if plan.shape.experts is not None and workload.seq_length:
        yield (
            "Activations of experts are those of an even load; the busiest rank of a real step "
            "needs more."
        )


def _list_fsdp_notes(settings: PlanSettings, ddp: Mapping[str, Any]) -> Iterator[str]:
    if ddp["use_custom_fsdp"] or ddp["use_torch_fsdp2"]:
        yield (
            "FSDP shards weights and gradients too; only that of use_megatron_fsdp is counted here."
        )
    if not settings.fsdp:
        return
    gathers = ddp["data_parallel_sharding_strategy"] in GATHERING_STRATEGIES
    if gathers and not ddp["fsdp_double_buffer"]:
        yield (
            "Megatron-FSDP is counted with two units gathered at a time; without "
            "fsdp_double_buffer it gathers ahead, and may hold more."
        )
    if ddp["megatron_fsdp_version"] == 2:
        yield ("Megatron-FSDP is counted as its first version, not as megatron_fsdp_version=2.")


def _list_offload_notes(settings: PlanSettings) -> Iterator[str]:
    if not settings.is_hybrid_device:
        return
    if settings.fsdp:
        yield (
            "Masters and optimizer state are counted on the GPU, although optimizer_cpu_offload "
            "moves some."
        )
    elif not settings.offload_share:
        yield (
            "optimizer_cpu_offload moves nothing to the host: optimizer_offload_fraction is 0. The "
            "FP32 masters and moments are on the GPU."
        )
    elif settings.offload_share < 1:
        yield (
            "Whole parameters are moved to the host, so that its share is a little above the "
            "fraction."
        )
