"""`apply_last_sync`: the last sync before a run begins.

It writes the precision into the model, optimizer and DDP configs of a container. Then it runs
Megatron's checks that a config of Megatron Bridge puts off until its `finalize`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from bridge.errors import Finding, SyncCheckError
from bridge.precision.owners import ConfigObject, DdpOwner, ModelOwner, OptimizerOwner
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.rules.inert_fields import GRAD_BUFFER_REUSE
from bridge.sync.owner import Owner
from bridge.sync.prediction import Prediction
from bridge.sync.report import SyncReport
from bridge.sync.sync_plan import is_under_megatron_fsdp, make_sharding_rows
from bridge.sync.synchroniser import check_sync_rules, write_precision
from bridge.sync.trial import NO_TRANSFORMER_ENGINE, format_validation_error, make_refusal_finding

if TYPE_CHECKING:
    from bridge.registry.schedule import PrecisionSchedule

log = logging.getLogger(__name__)


@runtime_checkable
class Container(Protocol):
    """The container of a run, ours or Megatron Bridge's, whose sections a sync reads and writes."""

    mixed_precision: Any
    train: Any

    @property
    def model(self) -> ModelOwner | None:
        """The model config. None: the run has no such config."""

    @property
    def optimizer(self) -> OptimizerOwner | None:
        """The optimizer config. None: the run has no such config."""

    @property
    def ddp(self) -> DdpOwner | None:
        """The DDP config. None: the run has no such config."""


def apply_last_sync(
    container: Container,
    precision: MixedPrecisionConfig | None,
    prediction: Prediction | None = None,
) -> SyncReport | None:
    """Write a finalized precision into the configs of a container, and run the checks put off.

    The container holds the precision and the resolved schedule afterwards.

    Args:
        container: The configs of the run.
        precision: The precision. Under None the configs keep their settings, which have to agree.
        prediction: A prediction of this run. Its rows are applied if the container has not
            changed since.

    Returns:
        The report of the sync; None under a precision of None.

    Raises:
        SyncCheckError: Megatron's validation or a rule refuses the result.
    """
    owners: dict[str, ConfigObject | None] = {
        "model": container.model,
        "optimizer": container.optimizer,
        "ddp": container.ddp,
    }
    schedule = _plan_schedule(container, precision)
    if any(owner is not None for owner in owners.values()):
        # The train config has no field of a precision, so it is written only next to another owner.
        owners["train"] = container.train
    report = None
    if precision is None:
        _require_agreement(owners)
        _synchronize_sharding(owners)
    else:
        report = write_precision(precision, owners, is_last=True, prediction=prediction)
    _finalize_configs(owners)
    container.mixed_precision = precision
    if schedule is not None:
        container.precision_schedule = schedule  # type: ignore[attr-defined]
    return report


def _plan_schedule(
    container: Container, precision: MixedPrecisionConfig | None
) -> PrecisionSchedule | None:
    """Return the resolved schedule of precisions; None if the container has no schedule."""
    # Containers of Megatron Bridge have no such attribute.
    rows = getattr(container, "precision_schedule", None)
    if rows is None:
        return None
    from bridge.registry.schedule import PrecisionSchedule  # few runs have one

    model: Any = container.model  # a run with a schedule has a model config
    return PrecisionSchedule(
        getattr(rows, "rows", rows),
        precision,
        model=model,
        optimizer=container.optimizer,
        ddp=container.ddp,
        train_iters=container.train.train_iters,
    )


def _require_agreement(owners: Mapping[str, ConfigObject | None]) -> None:
    """Refuse a model and an optimizer of different precision.

    Without a recipe no other check compares them.

    Raises:
        SyncCheckError: They differ in a switch of the mode.
    """
    for name in ("fp16", "bf16"):
        of_model = getattr(owners["model"], name, None)
        of_optimizer = getattr(owners["optimizer"], name, None)
        if of_model is None or of_optimizer is None or of_model == of_optimizer:
            continue
        finding = Finding(
            path=f"model.{name}",
            rule=f"must equal optimizer.{name}, which is {of_optimizer!r}",
            value=of_model,
            remedy="Give both the same value, or choose a recipe.",
        )
        raise SyncCheckError("Without a recipe the owners' own settings have to agree:", [finding])


def _synchronize_sharding(configs: Mapping[str, ConfigObject | None]) -> None:
    """Give the optimizer and DDP configs the same sharding, as the sync of a recipe does."""
    owners = {}
    for owner_name in ("optimizer", "ddp"):
        if configs[owner_name] is not None:
            owners[owner_name] = Owner(owner_name, configs[owner_name])
    values = {owner_name: owner.read() for owner_name, owner in owners.items()}
    rows = make_sharding_rows(values)
    for finding in check_sync_rules(None, values, rows, is_last=True):
        log.warning("%s", finding)
    for row in rows:
        setattr(owners[row.owner].config, row.attribute, row.new)
    for owner_name, owner in owners.items():
        if is_under_megatron_fsdp(values) and values[owner_name].value(GRAD_BUFFER_REUSE) is True:
            log.warning(
                "%s.%s: turned off, Megatron-FSDP does not implement it",
                owner_name,
                GRAD_BUFFER_REUSE,
            )
            setattr(owner.config, GRAD_BUFFER_REUSE, False)


def _finalize_configs(owners: Mapping[str, ConfigObject | None]) -> None:
    """Run Megatron's checks on an optimizer and a DDP config that put them off.

    A library that only this machine lacks is not a fault of the configs. The run reports it when it
    needs the library.

    Raises:
        SyncCheckError: Megatron refuses a config.
    """
    for owner_name in ("optimizer", "ddp"):
        config: Any = owners[owner_name]  # a deferred config has a method `finalize`
        if config is None or not Owner(owner_name, config).is_deferred:
            continue
        try:
            config.finalize()
        except Exception as error:  # Megatron's checks raise exceptions of any class
            if format_validation_error(error) == NO_TRANSFORMER_ENGINE:
                continue
            finding = make_refusal_finding(
                owner_name, config, error, remedy="Change the setting it names."
            )
            raise SyncCheckError("These configs cannot be run:", [finding]) from error
