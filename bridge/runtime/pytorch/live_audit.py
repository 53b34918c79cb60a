"""The audit as a library: a step of any model, compared with a plan or counted by precision.

    with audit(model, "fp8_current"):       # one step of a Megatron model, on every rank
        train_step(...)

    with assert_effective(model, "fp8", min_layers=24):         # any model
        loss_of(model(x)).backward()

Both record the GEMMs that run. `assert_effective` reads no config, and so takes a model of any
framework. `audit` reads the config of a Megatron model where it is called with a recipe, which it
plans for that config.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.errors import AuditError, PrecisionTypeError
from bridge.plan.precision_plan import PrecisionPlan, precision_plan
from bridge.precision.schemes import SCHEMES
from bridge.runtime.audit.plan_comparison import compare_with_plan, format_gemms
from bridge.runtime.audit.record import Record, merge_gemm_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from bridge.registry.config import MixedPrecisionConfig
    from bridge.runtime.audit.plan_comparison import Mismatch
    from bridge.runtime.audit.record import CensusRow, GemmRow, HealthRow
    from bridge.runtime.pytorch.record.gemm_watch import GemmWatch

    Model = torch.nn.Module | Sequence[torch.nn.Module]

_FP8_SCHEMES = {scheme.name for scheme in SCHEMES if scheme.family == "fp8"}
SCHEMES_OF_FAMILY = {"fp8": {*_FP8_SCHEMES, "scaled"}, "fp4": {"nvfp4"}}
"""fp8 or fp4 -> schemes of a record; "scaled" is an FP8 GEMM of torch."""


@dataclass(kw_only=True)
class StepAudit:
    """The record of a step, filled at the end of its ``with`` block."""

    record: Record = field(default_factory=lambda: Record(gemms=()))
    """GEMMs of all ranks of this job."""
    mismatches: tuple[Mismatch, ...] = ()
    """Differences from the plan; empty where plan = record."""


@contextmanager
def audit(
    model: Model, plan: PrecisionPlan | MixedPrecisionConfig | str, *, raises: bool = True
) -> Iterator[StepAudit]:
    """Record the step of a ``with`` block and compare it with a plan.

    With several ranks the end of the block is a collective call.

    Args:
        model: A Megatron model, or this rank's list of its chunks, in Megatron's wrappers or
            without.
        plan: The plan; or a recipe, or its name, which is planned for the config of the model.
        raises: Raise an error if step and plan differ. Without it the differences are in
            `StepAudit.mismatches` alone.

    Yields:
        The record and the mismatches, both filled at the end of the block.

    Raises:
        AuditError: The step differs from the plan, and `raises` is set.
        PrecisionTypeError: `plan` is a recipe, and the model has no Megatron config.
    """
    planned = plan
    if not isinstance(planned, PrecisionPlan):
        planned = _make_plan(_list_chunks(model)[0], planned)
    done = StepAudit()
    with _record_step(model, done):
        yield done
    done.mismatches = compare_with_plan(planned, done.record)
    if done.mismatches and raises:
        raise AuditError("the step must run what is planned", done.mismatches)


@contextmanager
def assert_effective(model: Model, family: str, *, min_layers: int = 1) -> Iterator[StepAudit]:
    """Raise an error unless the step of a ``with`` block ran enough layers in FP8 or FP4.

    Args:
        model: Any model. The layers of a Megatron model are counted, or the linear modules of any
            other model.
        family: fp8 or fp4.
        min_layers: Least number of layers, over all ranks, with a GEMM in this family.

    Raises:
        AuditError: Fewer layers have such a GEMM.
        PrecisionTypeError: `family` is another name.
    """
    if family not in SCHEMES_OF_FAMILY:
        raise PrecisionTypeError(f"family: must be fp8 or fp4, got {family!r}. Name one of them.")
    done = StepAudit()
    with _record_step(model, done):
        yield done
    rows = done.record.gemms
    low = {row.layer or row.module for row in rows if row.scheme in SCHEMES_OF_FAMILY[family]}
    if len(low) < min_layers:
        layers = {row.layer or row.module for row in rows}
        needed = f"at least {min_layers} layers must multiply in {family.upper()}"
        ran = format_gemms(rows) or "no module multiplied matrices"
        raise AuditError(f"{needed}, and {len(low)} of {len(layers)} did ({ran})")


def gather_record(watch: GemmWatch, census: tuple[CensusRow, ...] = ()) -> Record:
    """Return what all ranks recorded, equal rows once; with several ranks a collective call."""
    import torch

    recorded = (watch.rows, census, watch.health)
    parts: list[Any] = [recorded]
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        parts = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, recorded)
    gemms: list[GemmRow] = []
    tensors: dict[tuple[str, str], CensusRow] = {}
    health: list[HealthRow] = []
    for rows, census_rows, health_rows in parts:
        gemms.extend(rows)
        health.extend(health_rows)
        for row in census_rows:
            tensors[row.kind, row.dtype] = row
    return Record(
        gemms=merge_gemm_rows(gemms), census=tuple(tensors.values()), health=tuple(sorted(health))
    )


def _list_chunks(model: Model) -> list[torch.nn.Module]:
    """Return the chunks of a model: a list as it is, or the model alone."""
    if isinstance(model, (list, tuple)):
        return list(model)
    return [model]  # type: ignore[list-item]


def _make_plan(chunk: torch.nn.Module, recipe: MixedPrecisionConfig | str) -> PrecisionPlan:
    """Return the plan of a recipe for the config of a Megatron model."""
    from bridge.registry.registry import get_mixed_precision_config
    from bridge.target.versions import get_installed_version

    config = getattr(chunk, "config", None)
    if not hasattr(config, "num_layers"):
        rule = "a recipe is planned for a Megatron model with its config"
        raise PrecisionTypeError(f"model: {rule}, got {type(chunk).__name__}. Use check_precision.")
    return precision_plan(
        get_mixed_precision_config(recipe), config, mcore=get_installed_version("mcore")
    )


@contextmanager
def _record_step(model: Model, done: StepAudit) -> Iterator[None]:
    """Record a ``with`` block into a `StepAudit`."""
    from bridge.runtime.pytorch.record.gemm_watch import GemmWatch  # imports torch

    watch = GemmWatch(_list_chunks(model))
    with watch.record_gemms():
        yield
    done.record = gather_record(watch)
