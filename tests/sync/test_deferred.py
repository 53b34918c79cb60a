"""Owners whose checks wait for `finalize`: Megatron's validation still runs, on the copies."""

import importlib.util

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig as MegatronDdp
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizer

from bridge import MixedPrecisionConfig, get_mixed_precision_config, synchronize
from bridge.errors import SyncCheckError
from bridge.front.python_check import check as check_run
from bridge.preflight.last_sync import apply_last_sync
from bridge.sync import synchroniser
from bridge.sync.owner import Owner
from bridge.sync.sync_plan import plan_sync
from bridge.training.config import (
    ConfigContainer,
    DistributedDataParallelConfig,
    OptimizerConfig,
    runtime_config_update,
)

BUFFER = "reuse_grad_buf_for_mxfp8_param_ag"


def owners(megatron_owners, *, optimizer=None, ddp=None):
    shared = {"use_distributed_optimizer": True}
    return {
        "model": megatron_owners()["model"],
        "optimizer": OptimizerConfig(**{**shared, **(optimizer or {})}),
        "ddp": DistributedDataParallelConfig(**{**shared, **(ddp or {})}),
    }


def test_they_are_megatrons_classes_whose_checks_wait() -> None:
    assert issubclass(OptimizerConfig, MegatronOptimizer)
    assert issubclass(DistributedDataParallelConfig, MegatronDdp)
    ddp = DistributedDataParallelConfig(**{BUFFER: True})
    with pytest.raises(AssertionError, match="Reuse grad buffer only"):
        ddp.finalize()
    ddp.fp8_param_gather = True
    ddp.finalize()
    optimizer = OptimizerConfig(lr=1e-4, exp_avg_dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="exp_avg_dtype can only be fp32"):
        optimizer.finalize()
    assert OptimizerConfig(lr=1e-4, use_precision_aware_optimizer=True).lr == 1e-4


def test_which_owners_wait() -> None:
    assert Owner("ddp", DistributedDataParallelConfig()).is_deferred
    assert not Owner("ddp", MegatronDdp()).is_deferred


def test_what_is_impossible_in_between_is_completed_by_the_recipe(megatron_owners) -> None:
    made = owners(megatron_owners, ddp={BUFFER: True})
    report = synchronize("bf16_with_mxfp8_mixed", **made, strict=True)
    assert report.findings == ()
    made["ddp"].finalize()
    made = owners(megatron_owners, ddp={BUFFER: True})
    synchronize("bf16_mixed", **made, strict=True)
    assert getattr(made["ddp"], BUFFER) is False


def test_megatrons_validation_runs_on_the_copy(megatron_owners) -> None:
    made = owners(megatron_owners, optimizer={"exp_avg_dtype": torch.bfloat16})
    (finding,) = synchronize("bf16_mixed", **made).findings
    assert (finding.severity, finding.path, finding.where) == (
        "warning",
        "optimizer",
        "as it was before the recipe, too",
    )
    made = owners(megatron_owners, optimizer={"exp_avg_dtype": torch.bfloat16})
    with pytest.raises(SyncCheckError, match="exp_avg_dtype can only be fp32"):  # `finalize` comes next
        synchronize("bf16_mixed", **made, strict=True)
    assert made["optimizer"].bf16 is False


def test_fields_that_megatron_derives_are_left_to_finalize_and_the_rest_is_there(megatron_owners) -> None:
    made = owners(megatron_owners, optimizer={"use_precision_aware_optimizer": True})
    synchronize("bf16_mixed", **made)
    assert made["optimizer"].store_param_remainders is True, "which depends on the Transformer Engine of the run"
    assert made["optimizer"].use_precision_aware_optimizer_no_fp8_or_ds_fp8 is True
    synchronize("bf16_with_fp8_current_scaling_mixed", **made)
    assert made["optimizer"].use_precision_aware_optimizer_no_fp8_or_ds_fp8 is False


def test_a_machine_without_transformer_engine_can_still_be_asked(megatron_owners) -> None:
    for precision in ("bf16_mixed", None):
        made = owners(megatron_owners, optimizer={"use_precision_aware_optimizer": True})
        report = runtime_config_update(ConfigContainer(**made, mixed_precision=precision))
        if report is not None and importlib.util.find_spec("transformer_engine") is None:
            (finding,) = report.findings
            assert (finding.severity, finding.path) == ("warning", "optimizer")
            assert "needs Transformer Engine, which is not installed here" in finding.rule


def test_a_second_sync_changes_nothing(megatron_owners) -> None:
    made = owners(megatron_owners)
    config = get_mixed_precision_config("bf16_with_mxfp8_mixed")
    synchronize(config, **made)
    assert synchronize(config, **made).changes == ()


def test_the_last_sync_before_a_run_finalizes_them(megatron_owners, monkeypatch) -> None:
    done = []
    for cls in (OptimizerConfig, DistributedDataParallelConfig):
        monkeypatch.setattr(cls, "finalize", lambda self: done.append(type(self).__name__))
    for precision in ("bf16_mixed", None):
        runtime_config_update(ConfigContainer(**owners(megatron_owners), mixed_precision=precision))
    runtime_config_update(ConfigContainer(mixed_precision=MixedPrecisionConfig(bf16=True), **megatron_owners()))
    assert done == ["OptimizerConfig", "DistributedDataParallelConfig"] * 2


def test_without_a_recipe_they_are_checked_and_agree_before_a_run(megatron_owners, caplog) -> None:
    made = owners(megatron_owners, ddp={"use_distributed_optimizer": False})
    runtime_config_update(ConfigContainer(**made))
    assert made["ddp"].use_distributed_optimizer is True
    assert [record.getMessage() for record in caplog.records] == [
        "ddp.use_distributed_optimizer: has to be on: optimizer.use_distributed_optimizer is, got False "
        "(turned on before the run). Set ddp.use_distributed_optimizer=True, as runtime_config_update does."
    ]
    made = owners(megatron_owners, ddp={BUFFER: True, "fp8_param_gather": True, "use_megatron_fsdp": True})
    runtime_config_update(ConfigContainer(**made))
    assert getattr(made["ddp"], BUFFER) is False
    made = owners(megatron_owners, ddp={BUFFER: True})
    with pytest.raises(SyncCheckError) as caught:
        runtime_config_update(ConfigContainer(**made))
    assert str(caught.value) == (
        "These configs cannot be run:\n"
        "  ddp: Megatron's own validation refuses it (Reuse grad buffer only when keeping params in MXFP8.), got "
        "'DistributedDataParallelConfig'. Change the setting it names."
    )


def test_the_plan_that_a_check_made_is_applied_unless_an_owner_has_changed_since(megatron_owners, monkeypatch) -> None:
    planned = []
    monkeypatch.setattr(
        synchroniser, "plan_sync", lambda *given, **options: planned.append(given) or plan_sync(*given, **options)
    )
    for change in (False, True):
        config = ConfigContainer(**owners(megatron_owners), mixed_precision=MixedPrecisionConfig(bf16=True))
        foreseen = check_run(config, target=None).context.prediction
        if change:
            config.optimizer.loss_scale = 1024.0
        report = apply_last_sync(config, config.mixed_precision, foreseen)
        assert report.row("optimizer.loss_scale").new == (1024.0 if change else None)
        assert config.model.params_dtype is torch.bfloat16
        assert len(planned) == change
