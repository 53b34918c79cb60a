"""The report of a sync: its rows, its text, its log."""

import logging

import pytest

from bridge import (
    ConfigContainer,
    MixedPrecisionConfig,
    get_mixed_precision_config,
    runtime_config_update,
    synchronize,
)
from bridge.errors import SyncConflictError
from bridge.preflight.rule_check import check
from bridge.preflight.run import Run
from bridge.training.config import DistributedDataParallelConfig, OptimizerConfig

pytestmark = pytest.mark.filterwarnings("ignore::bridge.errors.BridgeWarning")


def test_the_table_names_old_and_new_verdict_who_and_why(conflicting) -> None:
    report = synchronize("bf16_with_fp8_current_scaling_mixed", **conflicting())
    rows = {f"{row.owner}.{row.attribute}": row for row in report.rows}
    told = {path: (row.old, row.new, row.verdict, row.by.name) for path, row in rows.items()}
    recipe = "recipe bf16_with_fp8_current_scaling_mixed"
    assert told["model.fp16"] == (True, False, "override", "mode")
    assert told["model.bf16"] == (True, True, "agree", recipe)
    assert told["model.fp8"] == ("e4m3", "hybrid", "override", recipe)
    assert told["model.fp4"] == ("e2m1", None, "override", "mode")
    assert told["model.fp4_param"] == (True, False, "neutralise", "mode")
    assert told["model.fp8_margin"] == (7, 7, "keep", "model")
    assert told["optimizer.hysteresis"] == (7, 7, "keep", "optimizer")
    assert told["optimizer.reuse_grad_buf_for_mxfp8_param_ag"] == (True, False, "neutralise", "mode")
    assert told["model.num_layers_at_start_in_bf16"] == (3, 1, "override", recipe)
    assert {row.owner for row in report.rows} == {"model", "optimizer", "ddp"}


def test_overrides_of_own_values_are_logged_as_warnings(megatron_owners, caplog) -> None:
    owners = megatron_owners(fp8="e4m3")
    with caplog.at_level(logging.INFO):
        synchronize("bf16_mixed", **owners).log(logging.getLogger("test"))
    logged = {record.getMessage(): record.levelname for record in caplog.records}
    assert logged["model.fp8: 'e4m3' -> None (override, mode: the mode is bf16)"] == "WARNING"


def test_a_sync_logs_each_override_once_whoever_starts_it(megatron_owners, caplog) -> None:
    config = get_mixed_precision_config("bf16_mixed")

    def of(owners):
        return [owners["model"], owners["optimizer"], owners["ddp"]]

    for start in (
        lambda owners: synchronize(config, **owners),
        lambda owners: config.setup(*of(owners)),
        lambda owners: runtime_config_update(ConfigContainer(mixed_precision=config, **owners)),
    ):
        caplog.clear()
        start(megatron_owners(fp8="e4m3"))
        assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
            ("WARNING", "model.fp8: 'e4m3' -> None (override, mode: the mode is bf16)")
        ]


def test_what_the_check_has_printed_already_the_sync_does_not_log_again(megatron_owners, caplog) -> None:
    made = megatron_owners(fp8="e4m3")
    config = get_mixed_precision_config("bf16_mixed").override("command line", hysteresis=4)
    known = {(finding.id, finding.path) for finding in check(Run.from_configs(config, **made)).findings}
    report = synchronize(config, **made)
    assert {"PB144", "PB123"} <= {rule for rule, _ in known}
    logger = logging.getLogger("test")
    logged = []
    for already in ((), known):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="test"):
            report.log(logger, known=already)
        logged.append(len(caplog.records))
    assert logged == [3, 1]


def test_a_printed_report_is_its_changes_and_findings(megatron_owners) -> None:
    config = get_mixed_precision_config("bf16_mixed").override("command line", hysteresis=4)
    lines = str(synchronize(config, model=megatron_owners()["model"])).splitlines()
    assert lines == [
        "bf16_mixed, hysteresis=4: 4 fields written (model 4).",
        "  model.bf16: False -> True (set, recipe bf16_mixed: stated)",
        "  model.params_dtype: 'fp32' -> 'bf16' (set, recipe bf16_mixed: stated)",
        "  model.pipeline_dtype: None -> 'bf16' (set, recipe bf16_mixed: stated)",
        "  model.autocast_dtype: 'fp32' -> 'bf16' (derive, mode: follows params_dtype)",
        "warning: mixed_precision.hysteresis: has no effect: a BF16 run has no dynamic loss scale, got 4 "
        "(command line). Drop it; or choose an fp16 recipe without loss_scale.",
    ]


def test_keep_is_named_as_a_remedy_where_it_keeps(megatron_owners) -> None:
    owners = megatron_owners()
    owners["ddp"].grad_reduce_in_fp32 = True
    with pytest.raises(SyncConflictError) as caught:
        synchronize(MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=False), **owners, on_conflict="error")
    assert str(caught.value).endswith("use on_conflict='override' or 'keep'.")


def test_log_of_a_sync_is_one_line_where_nothing_was_overridden(megatron_owners, caplog, tmp_path) -> None:
    report = synchronize("bf16_mixed", **megatron_owners())
    with caplog.at_level(logging.INFO):
        report.log(logging.getLogger("test"), file=tmp_path / "sync.txt")
    assert [record.getMessage() for record in caplog.records] == [
        f"bf16_mixed: 7 fields written (model 4, optimizer 2, ddp 1). Each is in {tmp_path / 'sync.txt'}"
    ]


def test_a_value_that_was_not_computed_yet_is_logged_as_none(megatron_owners, caplog) -> None:
    owners = megatron_owners() | {"optimizer": OptimizerConfig(), "ddp": DistributedDataParallelConfig()}
    with caplog.at_level(logging.DEBUG):
        get_mixed_precision_config("bf16_mixed").setup(*owners.values())
    derived = "optimizer.use_precision_aware_optimizer_no_fp8_or_ds_fp8"
    assert f"Overwrote {derived}: None -> False" in caplog.messages
    assert [line for line in caplog.messages if "MISSING" in line or " object at " in line] == []


def test_a_conflict_and_a_row_name_the_config_that_states_the_value(megatron_owners) -> None:
    owners = megatron_owners()
    owners["ddp"].grad_reduce_in_fp32 = True
    config = MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=False)
    with pytest.raises(SyncConflictError, match="differs from False of the config that states it, got True"):
        synchronize(config, **owners, on_conflict="error")
    kept = str(synchronize(config, **owners, on_conflict="keep"))
    assert "  ddp.grad_reduce_in_fp32: True (keep, ddp: its own value; the recipe says False)\n" in f"{kept}\n"
    row = synchronize(config, **owners).row("ddp.grad_reduce_in_fp32")
    assert str(row) == "ddp.grad_reduce_in_fp32: True -> False (override, stated)"


def test_the_report_is_json(conflicting) -> None:
    import json

    told = json.loads(json.dumps(synchronize("bf16_with_nvfp4_mixed", **conflicting()).to_dict()))
    assert {row["verdict"] for row in told["rows"]} >= {"override", "neutralise", "agree", "keep"}
    assert {"owner": "model", "attribute": "fp4", "field": "fp4", "old": "e2m1", "new": "e2m1"}.items() <= next(
        row for row in told["rows"] if row["attribute"] == "fp4"
    ).items()
