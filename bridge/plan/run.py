"""A run as the calculators take it: its plan, its workload and its GPUs, with settings that can be changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bridge.model.layout import Parallel
from bridge.model.reads import kept_property
from bridge.plan.memory import MemoryReport, memory_report
from bridge.plan.memory_activations import Workload, uncounted_kernels
from bridge.plan.precision_plan import PrecisionPlan, plan_of
from bridge.rules.violation import Violation
from bridge.sync.prediction import Prediction
from bridge.target.fields import ENCODERS
from bridge.target.target import Target

UNCOUNTED = ("cpu_offloading", "fine_grained_activation_offloading", "moe_paged_stash")
"""Settings of the model that keep less on the GPU than is counted."""
SHARDED = ("use_custom_fsdp", "use_torch_fsdp2")
"""DDP settings under which weights and gradients are sharded too, which is not counted; Megatron-FSDP is."""
MEASURED = 0.02
"""How far the count of activations is from what is kept: test_memory_kept.py and test_memory_in_flight.py."""
ESTIMATED = 0.25
"""The same for pipelines, which no GPU has confirmed, and where it is read in sources: kernels of Mamba, gated delta
net and sparse attention, forward passes that run together with backward passes, buffers in which Megatron-FSDP
gathers."""


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
    def parallel(self) -> Parallel:
        """The layout."""
        return self.prediction.parallel

    @kept_property
    def plan(self) -> PrecisionPlan:
        """The precision plan."""
        return plan_of(self.prediction, self.parallel)

    @kept_property
    def workload(self) -> Workload:
        """The tokens of a micro-batch, and the parts that are recomputed."""
        return Workload.of(
            self.prediction.model,
            self.prediction.sections["train"],
            data_parallel=self.parallel.data,
        )

    @kept_property
    def memory(self) -> MemoryReport:
        """The bytes of a rank of each pipeline stage."""
        gpu, capability = self.target.gpu, self.target.capability
        report = memory_report(
            self.plan, workload=self.workload, ddp=self.section("ddp"), capability=capability
        )
        if gpu is None or gpu.memory_gib or not gpu.is_gpu:
            return report
        note = f"The memory of {gpu.title} is not known here; state it in the target, as in {gpu.name},memory=80GiB."
        return replace(report, notes=(*report.notes, note))

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one GPU; None where it is not known, or where more is sharded than is counted."""
        gpu = self.target.gpu
        return (
            gpu.memory_gib * (2**30)
            if gpu is not None and gpu.memory_gib and self.sharded_by is None
            else None
        )

    @property
    def sharded_by(self) -> str | None:
        """The setting under which weights are sharded too, as section.field; None: there is none."""
        found = [f"ddp.{name}" for name in SHARDED if self.section("ddp").get(name)]
        return found[0] if found else None

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Settings of the run that keep less on the GPU than is counted, as section.field."""
        found = [f"model.{name}" for name in UNCOUNTED if self.section("model").get(name)]
        settings = self.plan.settings
        if settings.is_hybrid_device and settings.fsdp:
            found.append("optimizer.optimizer_cpu_offload")
        return tuple(found)

    @property
    def missing(self) -> tuple[str, ...]:
        """Parts of the run that are on the GPU and are not counted: without them there is no verdict that it fits."""
        found = []
        if not self.plan.shape.vocab_size:
            found.append("embedding and output layer (model.vocab_size is not stated)")
        if not self.workload.seq_length:
            found.append("activations (model.seq_length is not stated)")
        else:
            found += uncounted_kernels(self.plan)
        stated = self.prediction.sections["model"].stated
        return (*found, *(name for part, name in ENCODERS.items() if f"freeze_{part}" in stated))

    @property
    def overflow(self) -> Violation | None:
        """The fullest rank, where it needs more than its GPU has (PB618); None where it fits or that is not known.

        It is not known of a run that Megatron refuses, and that is counted on other ranks or with another split of the
        layers (PB406, PB413), and of one with options that are not read and may change the count. The margin of the
        count, and what is not counted, make it a warning.
        """
        if self.prediction.uncounted:
            return None
        limit, is_filled = self.memory_bytes, self.target.count in (None, self.parallel.world_size)
        if limit is None or not is_filled or self.plan.parallel.layout != self.parallel.layout:
            return None
        rank, shape = self.memory.largest, self.plan.shape
        if rank.total <= limit:
            return None
        unmeasured = (
            *(self.parallel.pipeline > 1, self.workload.is_combined, self.plan.settings.fsdp),
            *(shape.is_hybrid, shape.delta_net, shape.indexer),
        )
        margin, activations = (
            ESTIMATED if any(unmeasured) else MEASURED,
            rank.bytes_of["activations"],
        )
        needed, memory, kept = (
            f"{size / 2**30:,.0f} GiB" for size in (rank.total, limit, activations)
        )
        but = ""
        if self.uncounted:
            but = f"; {' and '.join(self.uncounted)} may keep less there than is counted"
        elif rank.total - round(margin * activations) <= limit:
            but = f" by this count, in which the {kept} of activations may be {margin:.0%} too high"
        severity = "warning" if but else None
        return Violation(severity=severity, needed=needed, memory=memory, stage=rank.stage, but=but)

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section's values after the sync."""
        return self.prediction.values[name]

    def changed(self, changes: Mapping[str, Any]) -> PlannedRun:
        """Return the run with other values of some settings, by section.field."""
        return PlannedRun(prediction=self.prediction.changed(changes))

    def on(self, target: Target) -> PlannedRun:
        """Return the run on another target."""
        return PlannedRun(prediction=self.prediction.on(target))
