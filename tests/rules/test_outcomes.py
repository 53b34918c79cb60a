"""Rules about settings that are not read: an info where the run does what they ask, a warning where it does not."""

from typing import Any

import pytest

from bridge.preflight.rule_check import check
from tests.rules.cases.runs import (
    CURRENT,
    DENSE,
    H100,
    MEGATRON_FSDP,
    MOE,
    MXFP8,
    OVERLAP,
    PRECISION_AWARE,
    full,
)
from tests.rules.situations import run_of, setup_of

MCORE = "mcore0.19.2"
NARROW = dict(MEGATRON_FSDP, megatron_fsdp_main_grads_dtype=None)
BF16_SUMS = {"bf16": True, "grad_reduce_in_fp32": False}
FP32_SUMS = {"bf16": True, "grad_reduce_in_fp32": True}


def severities(rule: str, **case: Any) -> list[str]:
    """Return the severities of a rule's findings in a case of `setup_of`."""
    return [one.severity for one in check(run_of(case)).findings if one.id == rule]


@pytest.mark.parametrize(
    ("precision", "ddp", "wanted"),
    [
        (BF16_SUMS, NARROW, "info"),
        (BF16_SUMS, MEGATRON_FSDP, "warning"),
        (FP32_SUMS, MEGATRON_FSDP, "info"),
        (FP32_SUMS, NARROW, "warning"),
        (FP32_SUMS, dict(MEGATRON_FSDP, megatron_fsdp_grad_comm_dtype="bf16"), "warning"),
    ],
)
def test_the_reduction_dtype_that_megatron_fsdp_does_not_read(precision: Any, ddp: Any, wanted: str) -> None:
    assert severities("PB327", precision=precision, target=MCORE, model=DENSE, ddp=ddp) == [wanted]


def test_narrow_main_gradients_that_somebody_asked_for_are_an_info() -> None:
    assert severities("PB328", precision=BF16_SUMS, target=MCORE, model=DENSE, ddp=NARROW) == ["info"]
    assert severities("PB328", precision=FP32_SUMS, target=MCORE, model=DENSE, ddp=NARROW) == ["warning"]


def test_an_amax_reduction_that_a_scheme_does_not_have_is_as_narrow_as_it_was_asked_to_be() -> None:
    model = dict(DENSE, tp_only_amax_red=True)
    assert severities("PB210", precision=MXFP8, target=H100, model=model, optimizer=OVERLAP, ddp=OVERLAP) == ["info"]
    margin = dict(CURRENT, fp8_margin=2)
    assert severities("PB210", precision=margin, target=H100, model=DENSE, optimizer=OVERLAP, ddp=OVERLAP) == [
        "warning"
    ]


def test_a_recipe_that_the_precision_aware_optimizer_reads_has_an_effect_without_fp8() -> None:
    precision = {"bf16": True, "fp8": None, "fp8_recipe": "delayed"}
    case = {"precision": precision, "target": H100, "model": DENSE, "ddp": OVERLAP}
    assert severities("PB210", optimizer=OVERLAP, **case) == ["warning"]
    assert severities("PB210", optimizer=PRECISION_AWARE, **case) == []


@pytest.mark.parametrize(
    ("dtype", "optimizer", "ddp", "found"),
    [
        ("bf16", {}, {}, "or the optimizer steps on them without FP32 masters"),
        ("bf16", {"use_distributed_optimizer": True}, {"use_distributed_optimizer": True}, None),
        ("bf16", {}, {"use_megatron_fsdp": True}, None),
        ("fp16", {"use_distributed_optimizer": True}, {}, "or FP16 gradients have no loss scale"),
        ("fp16", {"use_distributed_optimizer": True, "loss_scale": 1024.0}, {}, None),
    ],
)
def test_the_distributed_optimizer_makes_masters_by_the_dtype_of_the_weights(
    dtype: str, optimizer: Any, ddp: Any, found: str | None
) -> None:
    case = {"model": dict(DENSE, params_dtype=dtype), "optimizer": optimizer, "ddp": ddp}
    rules = [one.rule for one in check(run_of(case)).findings if one.id == "PB103"]
    assert rules == ([f"half-precision weights need the mode switched on, {found}"] if found else [])


LONE = dict(MOE, expert_model_parallel_size=8)
STEPS = {"micro_batch_size": 1, "global_batch_size": 64}


@pytest.mark.parametrize(
    ("version", "changes", "effect"),
    [
        ("0.16.1", {}, "adds it to itself"),
        ("0.16.1", {"model": {"calculate_per_token_loss": True}}, "adds it to itself"),
        ("0.17.1", {}, "scales what it holds by 1/8 again"),
        ("0.19.2", {"ddp": {"megatron_fsdp_grad_comm_dtype": "bf16"}}, "adds it to itself"),
        ("0.19.2", {"model": {"calculate_per_token_loss": True}}, None),
        ("0.19.2", {"train": {"global_batch_size": 8}}, None),
        ("0.19.2", {"train": {"global_batch_size": None}}, None),
        ("0.19.2", {"ddp": {"data_parallel_sharding_strategy": "optim"}}, None),
        ("0.19.2", {"model": {"expert_model_parallel_size": 4}}, None),
    ],
)
def test_experts_on_one_rank_each_under_megatron_fsdp(version: str, changes: Any, effect: str | None) -> None:
    case = {
        "precision": {"bf16": True},
        "target": f"h100x8,te2.9,cuda12.9,mcore{version}",
        "model": {**LONE, **changes.get("model", {})},
        "optimizer": OVERLAP,
        "ddp": {**MEGATRON_FSDP, "data_parallel_sharding_strategy": "optim_grads_params", **changes.get("ddp", {})},
        "train": {**STEPS, **changes.get("train", {})},
    }
    found = [one.rule for one in check(run_of(case)).findings if one.id == "PB336"]
    assert [effect in rule for rule in found] == ([True] if effect else [])


@pytest.mark.parametrize("version", ["0.18.2", "0.19.2"])
def test_a_step_of_megatron_fsdp_that_changes_nothing_is_an_error_whose_remedies_work(version: str) -> None:
    case = {"precision": {"bf16": True}, "target": f"b200x8,te2.16,cuda13.0,mcore{version}", "model": DENSE}
    assert severities("PB334", optimizer=PRECISION_AWARE, ddp=MEGATRON_FSDP, **case) == ["error"]
    decoupled = dict(MEGATRON_FSDP, megatron_fsdp_use_decoupled_grad=True)
    assert severities("PB334", optimizer=PRECISION_AWARE, ddp=decoupled, **case) == []
    assert severities("PB334", optimizer=OVERLAP, ddp=MEGATRON_FSDP, **case) == []
    offloaded = dict(PRECISION_AWARE, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0)
    assert severities("PB334", optimizer=offloaded, ddp=MEGATRON_FSDP, **case) == []


def test_a_release_whose_buffer_decides_by_itself_has_no_such_step() -> None:
    case = {"precision": {"bf16": True}, "target": "h100x8,te2.9,cuda12.9,mcore0.17.1", "model": DENSE}
    assert severities("PB334", optimizer=PRECISION_AWARE, ddp=MEGATRON_FSDP, **case) == []


PREDICTION = dict(DENSE, mtp_num_layers=1, keep_mtp_spec_in_bf16=True)


def test_prediction_layers_that_a_row_keeps_in_bf16_are_as_they_were_asked_to_be() -> None:
    plain = dict(CURRENT, fp8_param_gather=False)
    case = {"target": H100, "model": PREDICTION, "optimizer": OVERLAP, "ddp": OVERLAP}
    assert severities("PB272", precision=plain, **case) == ["warning"]
    kept = dict(plain, modules=[{"select": "mtp.*", "precision": "bf16"}])
    assert severities("PB272", precision=kept, **case) == []
    assert severities("PB272", precision={"bf16": True}, **case) == []


def test_the_plan_says_that_nothing_reads_the_field_of_the_prediction_layers() -> None:
    note = "model.keep_mtp_spec_in_bf16 has no effect: neither Megatron Bridge nor Megatron Core reads it."
    setup = setup_of({"precision": CURRENT, "target": H100, "model": PREDICTION})
    assert note in setup.plan.settings.notes
    assert setup.plan.format_of("mtp 1", "linear_qkv") == "e4m3"
    assert setup_of({"precision": {"bf16": True}, "target": H100, "model": PREDICTION}).plan.settings.notes == ()


def test_a_smaller_tensor_parallel_size_is_no_remedy_without_tensor_parallelism() -> None:
    narrow = {**DENSE, "hidden_size": 512, "ffn_hidden_size": 1024}
    for size, is_named in ((1, False), (2, True)):
        setup = setup_of(full(CURRENT, H100, dict(narrow, tensor_model_parallel_size=size)))
        (found,) = [one for one in check(setup.run).findings if one.id == "PB506"]
        assert ("use a smaller tensor-parallel size" in found.remedies) is is_named
