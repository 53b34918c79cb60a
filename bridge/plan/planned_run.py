"""A run as the calculators take it: plan, workload and GPUs, with settings that can be changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bridge.model.layout import ParallelLayout
from bridge.model.read_tracking import tracked_property
from bridge.plan.memory_activations import list_uncounted_kernels
from bridge.plan.memory_report import MemoryReport, build_memory_report
from bridge.plan.precision_plan import PrecisionPlan, make_plan
from bridge.plan.workload import Workload
from bridge.rules.violation import Violation
from bridge.sync.prediction import Prediction
from bridge.target.fields import ENCODERS
from bridge.target.target import Target

UNCOUNTED_SETTINGS = ("cpu_offloading", "fine_grained_activation_offloading", "moe_paged_stash")
"""Settings of the model that keep less on the GPU than is counted."""
UNCOUNTED_SHARDING = ("use_custom_fsdp", "use_torch_fsdp2")
"""DDP settings under which weights and gradients are sharded too.

They are not counted; those of Megatron-FSDP are.
"""
WORKSPACE_BYTES = (96 * 2**20, 300 * 2**20)
"""Bytes that the workspaces of cuBLAS and Transformer Engine take beside what is counted.

The smaller number is of dense models, the larger of experts, whose grouped GEMMs have several.
Source: docs/explain/memory-measured.md.
"""
MEASURED_MARGIN = 0.02
"""How far the count of activations is from the bytes that are kept.

Source: test_memory_kept.py and test_memory_in_flight.py.
"""
ESTIMATED_MARGIN = 0.25
"""The same for pipelines, which no GPU has confirmed, and for counts that are read in sources.

These are kernels of gated delta net and sparse attention, forward passes that run together with
backward passes, and buffers in which Megatron-FSDP gathers.
"""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run as the calculators take it.

    The number of GPUs is the target's, or else the next one that the parallel sizes fill.
    """

    prediction: Prediction

    @property
    def target(self) -> Target:
        """The GPUs of the run."""
        return self.prediction.target

    @property
    def parallel(self) -> ParallelLayout:
        """The layout."""
        return self.prediction.parallel

    @tracked_property
    def plan(self) -> PrecisionPlan:
        """The precision plan."""
        return make_plan(self.prediction, self.parallel)

    @tracked_property
    def workload(self) -> Workload:
        """The tokens of a micro-batch, and the parts that are recomputed."""
        return Workload.from_sections(
            self.prediction.model,
            self.prediction.sections["train"],
            data_parallel=self.parallel.data,
        )

    @tracked_property
    def memory(self) -> MemoryReport:
        """The bytes of a rank of each pipeline stage."""
        gpu = self.target.gpu
        report = build_memory_report(
            self.plan,
            workload=self.workload,
            ddp=self.section("ddp"),
            capability=self.target.capability,
        )
        if gpu is None or gpu.memory_gib or not gpu.is_gpu:
            return report
        note = (
            f"The memory of {gpu.title} is not known here; state it in the target, as in "
            f"{gpu.name},memory=80GiB."
        )
        return replace(report, notes=(*report.notes, note))

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one GPU; None where it is unknown, or where more is sharded than is counted."""
        gpu = self.target.gpu
        if gpu is None or not gpu.memory_gib or self.sharded_by is not None:
            return None
        return gpu.memory_gib * 2**30

    @property
    def sharded_by(self) -> str | None:
        """The setting under which weights are sharded too, as section.field; None without one."""
        names = [name for name in UNCOUNTED_SHARDING if self.section("ddp").get(name)]
        if not names:
            return None
        return f"ddp.{names[0]}"

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Settings of the run that keep less on the GPU than is counted, as section.field."""
        paths = [f"model.{name}" for name in UNCOUNTED_SETTINGS if self.section("model").get(name)]
        settings = self.plan.settings
        if settings.is_hybrid_device and settings.fsdp:
            paths.append("optimizer.optimizer_cpu_offload")
        return tuple(paths)

    @property
    def missing(self) -> tuple[str, ...]:
        """Parts of the run that are on the GPU and are not counted.

        Without them there is no verdict that the run fits.
        """
        parts = []
        if not self.plan.shape.vocab_size:
            parts.append("embedding and output layer (model.vocab_size is not stated)")
        if not self.workload.seq_length:
            parts.append("activations (model.seq_length is not stated)")
        else:
            parts += list_uncounted_kernels(self.plan)
        if self.section("model").get("defer_embedding_wgrad_compute"):
            parts.append("buffers of model.defer_embedding_wgrad_compute")
        stated = self.prediction.sections["model"].stated
        for encoder, title in ENCODERS.items():
            if f"freeze_{encoder}" in stated:
                parts.append(title)
        return tuple(parts)

    @property
    def memory_overflow(self) -> Violation | None:
        """The fullest rank, where it needs more than its GPU has (PB618); None where it fits.

        None, too, where that is not known: of a run that Megatron refuses, which is counted on
        other ranks or with another split of the layers (PB406, PB413), and of a run with options
        that are not read and may change the count. The margin of the count, and parts that are not
        counted, make it a warning.
        """
        if self.prediction.uncounted:
            return None
        limit = self.memory_bytes
        is_filled = self.target.count in (None, self.parallel.world_size)
        if limit is None or not is_filled or self.plan.parallel.layout != self.parallel.layout:
            return None
        rank = self.memory.largest
        if rank.total <= limit:
            return None
        margin = self._margin
        activations = rank.bytes_of["activations"]
        but = ""
        if self.uncounted:
            but = f"; {' and '.join(self.uncounted)} may keep less there than is counted"
        elif rank.total - round(margin * activations) <= limit:
            but = (
                f" by this count, in which the {_format_gib(activations)} of activations may be "
                f"{margin:.0%} too high"
            )
        severity = "warning" if but else None
        return Violation(
            severity=severity,
            min_arguments=_format_gib(rank.total),
            memory=_format_gib(limit),
            stage=rank.stage,
            but=but,
        )

    @property
    def _margin(self) -> float:
        """Share of the activations by which their count may be too high."""
        shape = self.plan.shape
        is_estimated = (
            self.parallel.pipeline > 1
            or self.workload.is_combined
            or self.plan.settings.fsdp
            or shape.is_hybrid
            or shape.delta_net is not None
            or shape.indexer is not None
        )
        return ESTIMATED_MARGIN if is_estimated else MEASURED_MARGIN

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section's values after the sync."""
        return self.prediction.values[name]

    def with_values(self, changes: Mapping[str, Any]) -> PlannedRun:
        """Return the run with other values of some settings, by section.field."""
        return PlannedRun(prediction=self.prediction.with_values(changes))

    def with_target(self, target: Target) -> PlannedRun:
        """Return the run on another target."""
        return PlannedRun(prediction=self.prediction.with_target(target))


def _format_gib(size: int) -> str:
    return f"{size / 2**30:,.0f} GiB"
