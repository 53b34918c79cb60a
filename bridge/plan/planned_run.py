"""`PlannedRun`: the plan, the workload and the memory of a run."""

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
"""Settings of the model under which the GPU stores fewer bytes than are counted."""
UNCOUNTED_SHARDING = ("use_custom_fsdp", "use_torch_fsdp2")
"""DDP settings under which weights and gradients are sharded too.

The memory report does not count this sharding. It counts the sharding of Megatron-FSDP.
"""
WORKSPACE_BYTES = (96 * 2**20, 300 * 2**20)
"""Bytes of the workspaces of cuBLAS and Transformer Engine, which are not counted.

The first number is for dense models. The second is for models with experts, whose grouped GEMMs
have several workspaces.

Source: docs/explain/memory-measured.md.
"""
MEASURED_MARGIN = 0.02
"""The largest measured relative error of the count of activations.

Source: test_memory_kept.py and test_memory_in_flight.py.
"""
ESTIMATED_MARGIN = 0.25
"""The assumed relative error of counts that were not measured on a GPU.

They are the counts of pipelines, of the kernels of gated delta net and sparse attention, of forward
passes that run together with backward passes, and of the buffers of Megatron-FSDP.
"""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The plan, the workload and the memory of a run.

    The number of GPUs comes from the target, or else from the file. It is rounded up to the next
    number that the parallel sizes can fill.
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
        """The memory of one GPU.

        None if it is not known, or if the run shards weights in a way that is not counted.
        """
        gpu = self.target.gpu
        if gpu is None or not gpu.memory_gib or self.sharded_by is not None:
            return None
        return gpu.memory_gib * 2**30

    @property
    def sharded_by(self) -> str | None:
        """The setting of `UNCOUNTED_SHARDING` that is on, as section.field, or None."""
        names = [name for name in UNCOUNTED_SHARDING if self.section("ddp").get(name)]
        if not names:
            return None
        return f"ddp.{names[0]}"

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Settings of the run (section.field) that store fewer bytes on the GPU than counted."""
        paths = [f"model.{name}" for name in UNCOUNTED_SETTINGS if self.section("model").get(name)]
        settings = self.plan.settings
        if settings.is_hybrid_device and settings.fsdp:
            paths.append("optimizer.optimizer_cpu_offload")
        return tuple(paths)

    @property
    def missing(self) -> tuple[str, ...]:
        """Parts of the run that need memory of the GPU and are not counted.

        If there are such parts, it is not known whether the run fits.
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
        """The violation of PB618 by the fullest rank, or None.

        None means that the rank fits, or that it is not known whether it fits. It is not known if

        - the run has options that are not read and may change the count;
        - the memory of the GPU is not known;
        - Megatron refuses the run, so that the count is for another number of ranks (PB406) or for
          another split of the layers (PB413).

        The violation is a warning if the rank may fit: it exceeds the memory only within the margin
        of the count, or a setting stores fewer bytes than are counted.
        """
        if self.prediction.unread_options:
            return None
        limit = self.memory_bytes
        is_filled = self.prediction.gpus in (None, self.parallel.world_size)
        if limit is None or not is_filled or self.plan.parallel.layout != self.parallel.layout:
            return None
        rank = self.memory.largest
        if rank.total <= limit:
            return None
        margin = self._margin
        activations = rank.bytes_of["activations"]
        caveat = ""
        if self.uncounted:
            caveat = f"; {' and '.join(self.uncounted)} may keep less there than is counted"
        elif rank.total - round(margin * activations) <= limit:
            caveat = (
                f" by this count, in which the {_format_gib(activations)} of activations may be "
                f"{margin:.0%} too high"
            )
        severity = None
        if caveat:
            severity = "warning"
        return Violation(
            severity=severity,
            needed=_format_gib(rank.total),
            memory=_format_gib(limit),
            stage=rank.stage,
            caveat=caveat,
        )

    @property
    def _margin(self) -> float:
        """The share of the activations by which their count may be too high."""
        shape = self.plan.shape
        is_estimated = (
            self.parallel.pipeline > 1
            or self.workload.is_combined
            or self.plan.settings.fsdp
            or shape.is_hybrid
            or shape.delta_net is not None
            or shape.indexer is not None
        )
        if is_estimated:
            return ESTIMATED_MARGIN
        return MEASURED_MARGIN

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
