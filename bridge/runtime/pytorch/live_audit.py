"""The audit as a library: a step of any model, compared with a plan or counted by precision.

    with audit(model, "fp8_current"):       # one step of a Megatron model, on every rank
        train_step(...)

    with assert_effective(model, "fp8", min_layers=24):         # any model
        loss_of(model(x)).backward()

Both record the GEMMs that run. `assert_effective` reads no config, and so accepts a model of any
framework. `audit` compares with a plan. If it is called with a recipe, it makes the plan for the
config of a Megatron model.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.errors import AuditError, PrecisionTypeError
from bridge.plan.precision_plan import PrecisionPlan, precision_plan
from bridge.precision.schemes import SCHEMES
from bridge.registry.registry import get_mixed_precision_config
from bridge.runtime.audit.gemm_formats import format_gemms
from bridge.runtime.audit.plan_comparison import compare_with_plan
from bridge.runtime.audit.record import Record, merge_gemm_rows
from bridge.target.versions import get_installed_version

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from bridge.registry.mixed_precision_config import MixedPrecisionConfig
    from bridge.runtime.audit.mismatch import Mismatch
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
    """GEMMs of all ranks."""
    mismatches: tuple[Mismatch, ...] = ()
    """Differences from the plan; empty if the step ran as planned."""


@contextmanager
def audit(
    model: Model, plan: PrecisionPlan | MixedPrecisionConfig | str, *, raises: bool = True
) -> Iterator[StepAudit]:
    """Record the step of a ``with`` block and compare it with a plan.

    With several ranks the end of the block is a collective call.

    Args:
        model: A Megatron model, or the list of its chunks on this rank, with or without Megatron's
            wrappers.
        plan: The plan, or a recipe or its name. Of a recipe, a plan is made for the config of the
            model.
        raises: Whether a difference raises an error. It is in `StepAudit.mismatches` in any case.

    Yields:
        The record and the mismatches, both filled at the end of the block.

    Raises:
        AuditError: The step differs from the plan, and `raises` is set.
        PrecisionTypeError: `plan` is a recipe, and the model has no Megatron config.
    """
    if isinstance(plan, PrecisionPlan):
        expected = plan
    else:
        expected = _make_plan(_list_chunks(model)[0], plan)
    step = StepAudit()
    with _record_step(model, step):
        yield step
    step.mismatches = compare_with_plan(expected, step.record)
    if step.mismatches and raises:
        raise AuditError("the step must run what is planned", step.mismatches)


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
        PrecisionTypeError: `family` is not fp8 or fp4.
    """
    if family not in SCHEMES_OF_FAMILY:
        raise PrecisionTypeError(f"family: must be fp8 or fp4, got {family!r}. Name one of them.")
    step = StepAudit()
    with _record_step(model, step):
        yield step
    layers, low_layers = set(), set()
    for row in step.record.gemms:
        layer = row.layer or row.module
        layers.add(layer)
        if row.scheme in SCHEMES_OF_FAMILY[family]:
            low_layers.add(layer)
    if len(low_layers) < min_layers:
        ran = format_gemms(step.record.gemms) or "no module multiplied matrices"
        raise AuditError(
            f"at least {min_layers} layers must multiply in {family.upper()}, and "
            f"{len(low_layers)} of {len(layers)} did ({ran})"
        )


def gather_record(watch: GemmWatch, census: tuple[CensusRow, ...] = ()) -> Record:
    """Return the record of all ranks, without repeated rows. Several ranks make a collective call.

    Args:
        watch: The GEMMs of this rank.
        census: The tensors of this rank. Of several ranks with the same kind and dtype the last
            counts.
    """
    import torch

    rank_rows = (watch.rows, census, watch.health)
    rows_of_ranks: list[Any] = [rank_rows]
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        rows_of_ranks = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(rows_of_ranks, rank_rows)
    gemms: list[GemmRow] = []
    tensors: dict[tuple[str, str], CensusRow] = {}
    health: list[HealthRow] = []
    for gemm_rows, census_rows, health_rows in rows_of_ranks:
        gemms.extend(gemm_rows)
        health.extend(health_rows)
        for row in census_rows:
            tensors[row.kind, row.dtype] = row
    return Record(
        gemms=merge_gemm_rows(gemms), census=tuple(tensors.values()), health=tuple(sorted(health))
    )


def _list_chunks(model: Model) -> list[torch.nn.Module]:
    """Return the chunks of a model, which is a list of chunks or a single module."""
    if isinstance(model, (list, tuple)):
        return list(model)
    return [model]  # type: ignore[list-item]


def _make_plan(chunk: torch.nn.Module, recipe: MixedPrecisionConfig | str) -> PrecisionPlan:
    """Return the plan of a recipe for the config of a Megatron model."""
    config = getattr(chunk, "config", None)
    if not hasattr(config, "num_layers"):
        rule = "a recipe is planned for a Megatron model with its config"
        raise PrecisionTypeError(f"model: {rule}, got {type(chunk).__name__}. Use check_precision.")
    return precision_plan(
        get_mixed_precision_config(recipe), config, mcore=get_installed_version("mcore")
    )


@contextmanager
def _record_step(model: Model, step: StepAudit) -> Iterator[None]:
    """Record the GEMMs of a ``with`` block into the record of a `StepAudit`."""
    from bridge.runtime.pytorch.record.gemm_watch import GemmWatch  # imports torch

    watch = GemmWatch(_list_chunks(model))
    with watch.record_gemms():
        yield
    step.record = gather_record(watch)
