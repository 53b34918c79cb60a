"""Bytes on each rank: weights, low-precision copies, gradients, masters, optimizer state, amax state, activations.

Everything but the activations is counted parameter by parameter in the buffers that Megatron Core allocates, padding
included, and equals the bytes of the live objects. Activations are what autograd keeps from the forward to the backward
pass, by a table of the operators (`memory_activations`). The total leaves out the rest of a device's memory
(CUDA context, communication buffers, workspaces, fragmentation).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bridge.model.layout import Place
from bridge.model.section import read_section
from bridge.plan.memory_activations import Workload
from bridge.plan.memory_buffers import GATHERED, Group, ddp_groups, fsdp_groups, gathered
from bridge.plan.memory_parameters import (
    FP32_BYTES,
    Parameter,
    bytes_of_two_formats,
    chunk_parameters,
    element_bytes,
    has_column_copy,
    is_per_tensor,
    scale_bytes,
)
from bridge.plan.memory_schedule import activation_bytes
from bridge.plan.precision_plan import PrecisionPlan
from bridge.plan.settings import Settings

KINDS = (
    *(
        "weights",
        "low-precision copies",
        "gradients",
        "master weights",
        "optimizer state",
        "amax state",
    ),
    "activations",
)
HOST_KINDS = ("master weights", "optimizer state", "gradients")
"""Kinds that HybridDeviceOptimizer keeps on the host."""
MUON = ("muon", "dist_muon")
"""Optimizers whose matrices have one moment; `adaptive_muon` has two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """One rank: that of a pipeline stage, with one place among the data-parallel ranks."""

    stage: int
    data_rank: int
    parameters: int
    bytes_of: dict[str, int]
    host_bytes_of: dict[str, int]
    """Kind -> bytes in the memory of the host that HybridDeviceOptimizer takes for the rank."""
    step_bytes: int
    """FP32 gradients that the optimizer makes of narrower ones at its step; activations are gone by then."""

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
        """Bytes at the peak of a step: of its forward and backward pass, or of the optimizer's."""
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
    """Elements of the whole model, each counted once, without padding of the vocabulary over ranks."""
    workload: Workload
    layout: str
    notes: tuple[str, ...] = ()

    @property
    def largest(self) -> RankMemory:
        """The rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.total)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, in bytes."""
        return {
            "precision": self.label,
            "layout": self.layout,
            "parameters": self.parameters,
            "workload": asdict(self.workload),
            "ranks": [
                {**asdict(rank), "total": rank.total, "host": rank.host} for rank in self.ranks
            ],
            "notes": list(self.notes),
        }


def memory_report(
    plan: PrecisionPlan,
    *,
    workload: Workload | None = None,
    ddp: Any = None,
    data_rank: int = 0,
    capability: tuple[int, int] | None = None,
) -> MemoryReport:
    """Return the bytes of a rank of each pipeline stage.

    Args:
        plan: The precision plan, with the layout and the precision fields of optimizer and DDP config.
        workload: Sequence length, micro-batch and recomputation; None: no activations.
        ddp: `DistributedDataParallelConfig` fields, for the buckets.
        data_rank: Which data-parallel rank; shards differ by padding and by what lies on their borders.
        capability: Compute capability of the GPU, (9, 0) for Hopper; None counts as Hopper.
    """
    load, buckets = (
        workload if workload is not None else Workload(),
        read_section("ddp", ddp).values,
    )
    return MemoryReport(
        label=plan.label,
        ranks=tuple(
            _rank(plan, own, load, ddp=buckets, data_rank=data_rank, capability=capability)
            for own in plan.stages
        ),
        parameters=_parameters(plan),
        workload=load,
        layout=_layout(plan),
        notes=_notes(plan, load, buckets, capability),
    )


def _parameters(plan: PrecisionPlan) -> int:
    modules = (planned.module for layer in plan.layers for planned in layer.modules)
    tied = plan.shape.share_embeddings_and_output_weights
    return sum(module.parameters for module in modules if not (tied and module.kind == "head"))


def _rank(
    plan: PrecisionPlan,
    places: list[Place],
    workload: Workload,
    *,
    ddp: Mapping[str, Any],
    data_rank: int,
    capability: tuple[int, int] | None,
) -> RankMemory:
    settings = plan.settings
    bytes_of, host_bytes_of = dict.fromkeys(KINDS, 0), dict.fromkeys(HOST_KINDS, 0)
    gradient, is_narrow = element_bytes(settings.grad_reduce), settings.grad_reduce != "fp32"
    count = step = 0
    for place in places:
        parameters = chunk_parameters(plan, place)
        count += sum(parameter.numel for parameter in parameters)
        bytes_of["low-precision copies"] += _copies(parameters, capability, settings, ddp)
        bytes_of["amax state"] += _amax(plan, parameters)
        if settings.fsdp:
            groups = fsdp_groups(
                parameters, plan.parallel, ddp, data_rank, has_units=settings.has_units
            )
            _add_gathered(groups, settings, bytes_of)
        else:
            groups = ddp_groups(parameters, plan, place, ddp, data_rank)
        for group in groups:
            is_fp32 = group.parameters[0].is_fp32
            bytes_of["weights"] += round(group.weights * element_bytes(group.parameters[0].storage))
            bytes_of["gradients"] += round(group.gradients * (FP32_BYTES if is_fp32 else gradient))
            if not is_fp32 or settings.fsdp:
                bytes_of["master weights"] += group.masters * _master_bytes(settings)
            bytes_of["optimizer state"] += round(
                group.states * _state_bytes(settings, group.parameters)
            )
            step += (
                group.states * FP32_BYTES
                if is_narrow and settings.casts_gradients and not is_fp32
                else 0
            )
            if settings.is_hybrid_device and not settings.fsdp:
                _offload(group, settings, bytes_of, host_bytes_of)
    bytes_of["activations"] = activation_bytes(plan, places, workload)
    return RankMemory(
        stage=places[0].stage,
        data_rank=data_rank,
        parameters=count,
        bytes_of=bytes_of,
        host_bytes_of=host_bytes_of,
        step_bytes=step,
    )


def _offload(
    group: Group, settings: Settings, bytes_of: dict[str, int], host_bytes_of: dict[str, int]
) -> None:
    """Move the host's share of a group from the GPU, and add the FP32 copies that HybridDeviceOptimizer keeps.

    On the host it keeps a master, the state and a gradient of each parameter. On the GPU it keeps FP32 gradients of
    narrower ones from the first step on. Without the precision-aware optimizer Megatron's masters stay on the GPU.

    Source: megatron-core 0.16.1 to Megatron-LM main of 2026-08-22, optimizer/cpu_offloading/hybrid_optimizer.py
    _get_sub_optimizer_param_groups, _set_sub_optimizer_grads.
    """
    share = settings.offload_share
    masters = round(group.masters * _master_bytes(settings) * share) if settings.owns_masters else 0
    states = round(group.states * _state_bytes(settings, group.parameters) * share)
    copies = round(group.states * FP32_BYTES * share)
    bytes_of["master weights"] -= masters
    bytes_of["optimizer state"] -= states
    if settings.owns_masters and settings.grad_reduce != "fp32":
        bytes_of["gradients"] += group.states * FP32_BYTES - copies
    host_bytes_of["master weights"] += copies
    host_bytes_of["optimizer state"] += states
    host_bytes_of["gradients"] += copies


def _add_gathered(groups: Sequence[Group], settings: Settings, bytes_of: dict[str, int]) -> None:
    """Add what Megatron-FSDP gathers while it is used, and the column-wise copies of MXFP8, which have a buffer too."""
    stored = [element_bytes(group.parameters[0].storage) for group in groups]
    gradient = element_bytes(settings.grad_reduce)
    for group, size in zip(groups, stored, strict=True):
        if group.parameters[0].is_stored_low and settings.scheme == "mxfp8":
            bytes_of["low-precision copies"] += round(group.weights * size)
    used = [
        group.whole * size * group.is_gathered for group, size in zip(groups, stored, strict=True)
    ]
    reduced = [group.whole * gradient * (0 < group.gradients < group.whole) for group in groups]
    bytes_of["weights"] += round(gathered(groups, used))
    bytes_of["gradients"] += round(gathered(groups, reduced))


def _copies(
    parameters: Iterable[Parameter],
    capability: tuple[int, int] | None,
    settings: Settings,
    ddp: Mapping[str, Any],
) -> int:
    """Return the bytes of scales and copies of quantised weights, over a whole step.

    Megatron-FSDP counts the column-wise copies of MXFP8 weights in its own buffers, and drops others after their use.
    """
    total = 0
    for parameter, count in Counter(parameters).items():
        scheme = parameter.scheme
        is_own = settings.fsdp and parameter.is_stored_low and not ddp["keep_fp8_transpose_cache"]
        column = has_column_copy(scheme, capability) and not is_own
        if parameter.copies is not None and not parameter.is_stored_low:
            high = element_bytes(parameter.storage)
            total += count * bytes_of_two_formats(
                parameter.copies, parameter.rows, parameter.columns, high
            )
            continue
        if parameter.computes == parameter.storage and not parameter.is_stored_low:
            continue
        elements = round(parameter.numel * element_bytes(parameter.computes))
        total += count * scale_bytes(scheme, parameter.rows, parameter.columns)
        total += count * elements * ((not parameter.is_stored_low) + column)
        if column and not is_per_tensor(scheme):
            total += count * scale_bytes(scheme, parameter.columns, parameter.rows)
    return total


def _amax(plan: PrecisionPlan, parameters: Iterable[Parameter]) -> int:
    """Return the state of delayed scaling: scales and amax history, 3 slots forward and 2 backward a linear layer."""
    history = plan.settings.amax_history
    if not history:
        return 0
    low = [
        p for p in parameters if p.name == "weight" and (p.is_stored_low or p.computes != p.storage)
    ]
    return len(low) * (history + 1) * 5 * FP32_BYTES


def _master_bytes(settings: Settings) -> int:
    if settings.remainders:
        return 2
    return round(element_bytes(settings.master)) if settings.master is not None else 0


def _state_bytes(settings: Settings, parameters: Sequence[Parameter]) -> float:
    """Return the bytes per element of the optimizer's state: Adam has two moments, Muon one of the matrices.

    Source: megatron-core 0.16.1 optimizer/muon.py get_megatron_muon_optimizer.
    """
    first, second = (
        round(element_bytes(dtype)) for dtype in (settings.exp_avg, settings.exp_avg_sq)
    )
    if settings.optimizer == "sgd":
        return first
    if settings.optimizer not in MUON:
        return first + second
    matrices = sum(
        one.numel for one in parameters if one.rows > 1 and one.layer not in ("embedding", "output")
    )
    return first + second * (1 - matrices / sum(one.numel for one in parameters))


def _layout(plan: PrecisionPlan) -> str:
    parallel = plan.parallel
    sizes = (
        ("TP", parallel.tensor),
        ("PP", parallel.pipeline),
        ("VPP", parallel.virtual),
        ("CP", parallel.context),
        ("EP", parallel.expert),
        ("ETP", parallel.expert_tensor if parallel.expert_tensor != parallel.tensor else 1),
        ("DP", parallel.data),
    )
    product = " x ".join(f"{name} {size}" for name, size in sizes if size > 1 or name == "DP")
    shards = ", distributed optimizer" if plan.settings.distributed else ""
    return f"{parallel.world_size} rank{'s' * (parallel.world_size > 1)}: {product}{shards}"


def _notes(
    plan: PrecisionPlan,
    workload: Workload,
    ddp: Mapping[str, Any],
    capability: tuple[int, int] | None,
) -> tuple[str, ...]:
    notes, settings = [], plan.settings
    if plan.is_frozen and plan.adapter is None:
        notes.append(
            "The language model is frozen: it has no gradients, masters, optimizer state and weight gradients."
        )
    if not plan.shape.vocab_size:
        notes.append(
            "Embedding and output layer are not counted: the vocabulary (model.vocab_size) is not stated."
        )
    if not workload.seq_length:
        notes.append(
            "Activations are not counted: the sequence length (model.seq_length) is not stated."
        )
    if ddp["use_custom_fsdp"] or ddp["use_torch_fsdp2"]:
        notes.append(
            "FSDP shards weights and gradients too; only that of use_megatron_fsdp is counted here."
        )
    if (
        settings.fsdp
        and ddp["data_parallel_sharding_strategy"] in GATHERED
        and not ddp["fsdp_double_buffer"]
    ):
        notes.append(
            "Megatron-FSDP is counted with two units gathered at a time; without fsdp_double_buffer it gathers ahead, "
            "and may hold more."
        )
    if settings.fsdp and ddp["megatron_fsdp_version"] == 2:
        notes.append(
            "Megatron-FSDP is counted as its first version, not as megatron_fsdp_version=2."
        )
    if settings.is_hybrid_device and settings.fsdp:
        notes.append(
            "Masters and optimizer state are counted on the GPU, although optimizer_cpu_offload moves some."
        )
    elif settings.is_hybrid_device and not settings.offload_share:
        notes.append(
            "optimizer_cpu_offload moves nothing to the host: optimizer_offload_fraction is 0. The FP32 masters and "
            "moments are on the GPU."
        )
    elif settings.is_hybrid_device and settings.offload_share < 1:
        notes.append(
            "Whole parameters are moved to the host, so that its share is a little above the fraction."
        )
    if (
        settings.family is not None
        and capability is None
        and not has_column_copy(settings.row, (10, 0))
    ):
        notes.append(
            "Whether the GPU needs transposed FP8 copies is not known: counted with them, which Hopper needs and "
            "Blackwell not."
        )
    if settings.family is not None and not settings.low_parameters:
        notes.append(
            f"Weights stay in {settings.mode}, and copies in {settings.family.upper()} are added, which takes more "
            f"memory than {settings.mode} alone; {settings.family}_param_gather=true stores them once."
        )
    if plan.shape.experts is not None and workload.seq_length:
        notes.append(
            "Activations of experts are those of an even load; the busiest rank of a real step needs more."
        )
    return tuple(notes)
