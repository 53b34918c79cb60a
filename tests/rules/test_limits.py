"""Where single rules begin and end: releases, layers, sizes and variables next to those of their examples."""

from typing import Any

import pytest

from bridge.preflight.rule_check import check
from bridge.rules.rule import RuleFinding
from tests.rules.cases.runs import (
    BLOCKWISE,
    CURRENT,
    CURRENT_PLAIN,
    DELAYED,
    DENSE,
    H100,
    HYBRID,
    MEGATRON_FSDP,
    MOE,
    MXFP8,
    MXFP8_FSDP,
    NVFP4,
    OVERLAP,
    SEQUENCE_PARALLEL,
    full,
    recipe,
    run,
)
from tests.rules.situations import run_of

LATENT = {"multi_latent_attention": True, "q_lora_rank": 512, "kv_lora_rank": 512}
ALL_EXPERTS = dict(MOE, **LATENT)
FIRST_DENSE = dict(ALL_EXPERTS, moe_layer_freq=[0] + [1] * 31)
MAMBA_AND_ATTENTION = dict(HYBRID, hybrid_layer_pattern="M*" * 16)
MAMBA_ALONE = dict(HYBRID, hybrid_layer_pattern="M" * 32)
BIASED = dict(
    MOE,
    num_moe_experts=128,
    moe_router_topk=8,
    seq_length=4096,
    moe_router_enable_expert_bias=True,
    moe_router_score_function="sigmoid",
)
SHARDED = dict(DENSE, tensor_model_parallel_size=2, tensor_parallel_num_weight_shards=4)
B200_MAIN = "b200x8,te2.16,cuda13.0,mcore0.20"


def found(name: str, case: dict[str, Any]) -> RuleFinding | None:
    """Return the finding of a rule about a case; None where it has none."""
    of_rule = [one for one in check(run_of(case)).findings if one.id == name]
    assert len(of_rule) <= 1
    return of_rule[0] if of_rule else None


def severity(name: str, case: dict[str, Any]) -> str | None:
    """Return the severity of the finding of a rule about a case; None where it has none."""
    finding = found(name, case)
    return finding.severity if finding is not None else None


@pytest.mark.parametrize(
    ("model", "by_release"),
    [
        (DENSE, {"0.16.1": "error", "0.17.1": "error", "0.18.2": "error", "0.19.2": "error", "0.20": None}),
        (MOE, {"0.16.1": "error", "0.19.2": "error", "0.20": None}),
        # The norm in front of latent attention stands alone. The sum keeps FP32 from 0.17 on, and then an MLP gets it.
        (FIRST_DENSE, {"0.16.1": None, "0.17.1": "error", "0.19.2": "error", "0.20": None}),
        (ALL_EXPERTS, {"0.16.1": None, "0.19.2": None}),
        # Mamba casts its input; the attention behind it gets FP32 from 0.17 on.
        (MAMBA_AND_ATTENTION, {"0.16.1": None, "0.17.1": "error"}),
        (MAMBA_ALONE, {"0.16.1": None, "0.19.2": None}),
        (dict(DENSE, transformer_impl="local"), {"0.16.1": None, "0.19.2": None}),
        (dict(DENSE, enable_autocast=True), {"0.16.1": None, "0.19.2": None}),
    ],
)
def test_an_fp32_residual_is_refused_where_a_fused_norm_gets_it(
    model: dict[str, Any], by_release: dict[str, str | None]
) -> None:
    precision = recipe("bf16_mixed", fp32_residual_connection=True)
    for release, expected in by_release.items():
        case = run(precision, f"h100x8,te2.9,cuda12.9,mcore{release}", model=model)
        assert severity("PB151", case) == expected, release
        assert severity("PB153", case) == ("warning" if release == "0.16.1" else None), release


def test_an_fp32_residual_of_the_owners_own_is_refused_too() -> None:
    owned = {"model": dict(DENSE, bf16=True, params_dtype="bf16", fp32_residual_connection=True), "target": H100}
    finding = found("PB151", owned)
    assert finding is not None
    assert finding.path == "model.fp32_residual_connection"
    assert severity("PB151", dict(owned, backend="emulated")) is None


@pytest.mark.parametrize(
    ("mode", "batch", "changes", "expected"),
    [
        ("bf16", 512, {}, "warning"),
        ("bf16", None, {}, "info"),  # the tokens of a step are not known
        ("bf16", 1, {}, None),  # 256 tokens for an expert, the last number up to which BF16 counts exactly
        ("bf16", 2, {}, "warning"),
        ("fp16", 512, {}, "error"),
        ("fp16", 1, {"seq_length": 8188}, None),  # 65,504 in all
        ("fp16", 1, {"seq_length": 8192}, "error"),
        ("fp16", None, {}, "info"),
        ("fp32", 512, {}, None),
        ("bf16", 512, {"moe_router_bias_update_rate": 0.0}, None),
        ("bf16", 512, {"moe_router_enable_expert_bias": False}, None),
    ],
)
def test_counts_in_half_precision_are_named_where_they_are_wrong(
    mode: str, batch: int | None, changes: dict[str, Any], expected: str | None
) -> None:
    name = "fp32" if mode == "fp32" else f"{mode}_mixed"
    case = run(name, "mcore0.19.2", model={**BIASED, **changes}, optimizer=OVERLAP, train={"global_batch_size": batch})
    assert severity("PB439", case) == expected


def test_counts_in_fp16_say_that_nothing_is_balanced() -> None:
    finding = found(
        "PB439", run("fp16_mixed", "mcore0.19.2", model=BIASED, optimizer=OVERLAP, train={"global_batch_size": 512})
    )
    assert finding is not None
    assert finding.rule == (
        "the token counts of the experts are kept in fp16 (Float16Module casts the buffer local_tokens_per_expert), so "
        "that their sum, 16,777,216 in a step, is inf above 65,504: no bias goes down, and nothing is balanced"
    )


SPLIT_OTHERWISE = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}


@pytest.mark.parametrize(
    ("layout", "loss_scale", "release", "expected"),
    [
        ({}, None, "0.19.2", None),
        ({"expert_model_parallel_size": 8}, None, "0.16.1", "warning"),
        ({"expert_model_parallel_size": 8}, None, "0.19.2", "warning"),
        ({"expert_model_parallel_size": 8}, 1024.0, "0.19.2", None),
        (SPLIT_OTHERWISE, None, "0.18.2", None),
        (SPLIT_OTHERWISE, None, "0.19.2", "warning"),
    ],
)
def test_two_scalers_part_where_experts_have_an_optimizer_of_their_own(
    layout: dict[str, Any], loss_scale: float | None, release: str, expected: str | None
) -> None:
    precision = recipe("fp16_mixed", loss_scale=loss_scale) if loss_scale else "fp16_mixed"
    case = run(precision, f"h100x8,mcore{release}", model={**MOE, **layout}, optimizer=OVERLAP)
    assert severity("PB149", case) == expected


def test_sharded_mxfp8_weights_are_told_what_is_missing_and_nothing_else() -> None:
    without_buffer = dict(MXFP8, reuse_grad_buf_for_mxfp8_param_ag=False)
    finding = found("PB405", full(without_buffer, B200_MAIN, SHARDED))
    assert finding is not None
    assert finding.path == "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag"
    assert finding.remedies == (
        "set reuse_grad_buf_for_mxfp8_param_ag=True",
        "set model.tensor_parallel_num_weight_shards=2, which shards no weight further",
    )
    assert found("PB405", full(MXFP8, B200_MAIN, SHARDED)) is None


def test_sharded_mxfp8_weights_under_megatron_fsdp_are_its_fault() -> None:
    case = full(MXFP8_FSDP, B200_MAIN, SHARDED, ddp=MEGATRON_FSDP)
    assert (severity("PB405", case), severity("PB415", case)) == (None, "error")


def test_as_many_weight_shards_as_tensor_parallel_ranks_shard_nothing_further() -> None:
    unsharded = dict(SHARDED, tensor_parallel_num_weight_shards=2)
    plain = dict(MXFP8, fp8_param_gather=False, reuse_grad_buf_for_mxfp8_param_ag=False)
    assert severity("PB405", full(plain, B200_MAIN, SHARDED)) == "error"
    assert severity("PB405", full(plain, B200_MAIN, unsharded)) is None
    assert severity("PB404", full(dict(NVFP4, fp4_param_gather=False), B200_MAIN, unsharded)) is None


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({"fp8": "hybrid"}, ("warning", "model.fp8")),
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4"}, ("warning", "model.fp4")),
        ({"fp8": "hybrid", "bf16": True}, None),
        ({"fp8": "hybrid", "bf16": False}, None),  # said, whatever it is good for
        ({}, None),
    ],
)
def test_low_precision_without_a_mode_is_named_without_a_recipe_too(
    model: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    finding = found("PB116", {"model": {**DENSE, **model}, "target": H100})
    assert ((finding.severity, finding.path) if finding is not None else None) == expected
    if finding is not None:
        assert finding.remedies[0] == "set model.bf16=True and optimizer.bf16=True (--bf16 of Megatron-LM)"


SPLIT = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "context_parallel_size": 2}


@pytest.mark.parametrize(
    ("precision", "layout", "options", "expected"),
    [
        (CURRENT, SPLIT, {}, ("error", 128)),
        (CURRENT, SPLIT, {"pad_to_max_length": True}, None),
        (CURRENT, SPLIT, {"pad_seq_length_to_mult": 64}, ("error", 128)),
        (CURRENT, SPLIT, {"pad_seq_length_to_mult": 128}, None),
        (CURRENT, {}, {}, None),
        (CURRENT, {"tensor_model_parallel_size": 4}, {}, None),  # whole sequences on each tensor-parallel rank
        (DELAYED, {"context_parallel_size": 2}, {}, ("error", 32)),
        (MXFP8, {}, {}, ("error", 32)),
        (MXFP8, {}, {"pad_seq_length_to_mult": 32}, None),
        (MXFP8, {}, {"pad_seq_length_to_mult": 24}, ("error", 96)),
        (BLOCKWISE, {}, {}, ("warning", 128)),  # ragged blocks run
        (BLOCKWISE, SPLIT, {}, ("error", 1024)),
        (BLOCKWISE, SPLIT, {"pad_seq_length_to_mult": 1024}, None),
        ("bf16_mixed", SPLIT, {}, None),
    ],
)
def test_packed_batches_have_to_leave_a_ranks_multiple(
    precision: Any, layout: dict[str, Any], options: dict[str, Any], expected: tuple[str, int] | None
) -> None:
    target = "b200x8,te2.14,cuda12.9" if precision is MXFP8 else H100
    data = {"seq_length": 4096, "enable_offline_packing": True, "dataset_kwargs": options or None}
    model = {**DENSE, "seq_length": 4096, **layout}
    finding = found("PB507", full(precision, target, model, data=data, train={"micro_batch_size": 1}))
    if expected is None:
        assert finding is None
        return
    assert finding is not None
    name, multiple = expected
    assert (finding.severity, finding.remedies[0]) == (
        name,
        f"set data.dataset_kwargs.pad_seq_length_to_mult={multiple}",
    )


@pytest.mark.parametrize(
    ("packed", "expected"),
    [
        ({}, "set data.in_batch_packing_pad_to_multiple_of=128"),
        ({"in_batch_packing_pad_to_multiple_of": 16}, "set data.in_batch_packing_pad_to_multiple_of=128"),
        ({"in_batch_packing_pad_to_multiple_of": 128}, None),
        ({"defer_in_batch_packing_to_step": True}, None),  # by code of the model's own
    ],
)
def test_rows_that_are_packed_in_their_batch_have_to_leave_it_too(packed: dict[str, Any], expected: str | None) -> None:
    data = {"seq_length": 4096, "enable_in_batch_packing": True, **packed}
    model = {**DENSE, "seq_length": 4096, **SPLIT}
    finding = found("PB507", full(CURRENT, H100, model, data=data, train={"micro_batch_size": 4}))
    assert (finding.remedies if finding is not None else ()) == ((expected,) if expected else ())


def test_batches_that_are_not_packed_are_judged_by_their_length_alone() -> None:
    model = {**DENSE, "seq_length": 4096, **SPLIT}
    unpacked = {"packed_sequence_specs": {"packed_sequence_size": -1}}
    for data in ({}, {"enable_offline_packing": False}, {"packed_sequence_specs": None}, unpacked):
        assert severity("PB507", full(CURRENT, H100, model, data=data)) is None
    older = {"packed_sequence_specs": {"packed_sequence_size": 4096}}
    assert severity("PB507", full(CURRENT, H100, model, data=older)) == "error"


@pytest.mark.parametrize(
    ("precision", "gpu", "expected"),
    [
        (MXFP8, "mi300x", "error"),
        (MXFP8, "mi325x", "error"),
        (MXFP8, "mi350x", None),
        (MXFP8, "mi355x", None),
        (CURRENT, "mi300x", None),
        (CURRENT, "mi355x", None),
        (NVFP4, "mi355x", None),
        ("bf16_mixed", "mi300x", None),
        (MXFP8, "h100", None),  # by its compute capability: PB602
    ],
)
def test_a_gpu_of_amd_is_judged_by_the_formats_of_its_matrix_units(
    precision: Any, gpu: str, expected: str | None
) -> None:
    case = full(precision, f"{gpu}x8,mcore0.19.2")
    assert severity("PB621", case) == expected
    is_low_on_amd = precision != "bf16_mixed" and gpu != "h100"
    is_nvfp4 = precision == NVFP4
    assert severity("PB614", case) == ("warning" if is_low_on_amd and expected is None and not is_nvfp4 else None)
    assert severity("PB623", case) == ("warning" if is_nvfp4 else None)


@pytest.mark.parametrize(
    ("te", "sizes", "expected"),
    [
        ("2.9", {"seq_length": 4000}, "warning"),
        ("2.13", {"seq_length": 4000}, "warning"),
        ("2.14", {"seq_length": 4000}, None),
        ("2.9", {"seq_length": 4096}, None),
        ("2.9", {"hidden_size": 4160, "kv_channels": 128}, "warning"),
        ("2.9", {}, None),  # nothing says how many tokens there are
        ("2.9", {"seq_length": 4096, "ffn_hidden_size": 14400}, None),  # which is not gathered
    ],
)
def test_blockwise_tensors_are_gathered_in_whole_blocks_before_te_2_14(
    te: str, sizes: dict[str, Any], expected: str | None
) -> None:
    model = {**SEQUENCE_PARALLEL, **sizes}
    case = run(BLOCKWISE, f"h100x8,te{te},cuda12.9,mcore0.19.2", model=model, train={"micro_batch_size": 1})
    assert severity("PB401", case) == expected


@pytest.mark.parametrize(
    ("te", "expected"),
    [
        ("2.16.0", None),
        ("2.16", "info"),  # 2.16.0 or 2.16.1
        ("2.16.1", "warning"),
        ("2.17.0", None),
        ("2.17.1", "warning"),
        ("2.18", "warning"),
        ("2.20", "warning"),
    ],
)
def test_pickled_states_are_refused_by_the_releases_that_have_the_variable(te: str, expected: str | None) -> None:
    case = full(DELAYED, f"h100x8,te{te},cuda12.9,mcore0.19.2", is_resumed=True, environment={})
    assert severity("PB542", case) == expected


def test_tensor_parallel_overlap_is_told_what_it_lacks() -> None:
    steps = []
    for ranks in (1, 2):
        model = dict(DENSE, tp_comm_overlap=True, tensor_model_parallel_size=ranks)
        finding = found("PB402", run("bf16_mixed", model=model))
        assert finding is not None
        steps.append(finding.remedies[0])
    assert steps == [
        "use tensor_model_parallel_size=2 or more with sequence_parallel=True",
        "set sequence_parallel=True",
    ]


@pytest.mark.parametrize(("te", "expected"), [("2.14", "error"), ("2.18", "error"), ("2.19", None), ("2.20", None)])
def test_nvfp4_trains_on_compute_capability_12_from_te_2_19_on(te: str, expected: str | None) -> None:
    assert severity("PB604", full(NVFP4, f"rtxprox8,te{te},cuda12.9,mcore0.19.2")) == expected


def test_nvfp4_without_its_transform_takes_fp16() -> None:
    precision = {**NVFP4, "bf16": False, "fp16": True}
    assert severity("PB252", full(precision, "b200x8,te2.14,cuda12.9")) == "error"
    without = {"NVTE_NVFP4_DISABLE_RHT": "1"}
    assert severity("PB252", full(precision, "b200x8,te2.14,cuda12.9", environment=without)) is None


def test_adapters_on_stored_weights_are_a_warning_where_a_crash_was_reported() -> None:
    stored = {"fp8_param_gather": True}
    by_scheme = {
        "blockwise": severity("PB545", full(BLOCKWISE | stored, H100, peft={"dim": 16})),
        "tensorwise": severity("PB545", full(CURRENT | stored, H100, peft={"dim": 16})),
        "not stored": severity("PB545", full(CURRENT_PLAIN, H100, peft={"dim": 16})),
    }
    assert by_scheme == {"blockwise": "warning", "tensorwise": "info", "not stored": None}


@pytest.mark.parametrize(
    ("precision", "graphs", "by_rule"),
    [
        ("fp16_mixed", "transformer_engine", {"PB473": "error"}),
        ("fp16_mixed", "local", {"PB473": None}),
        ("bf16_mixed", "transformer_engine", {"PB473": None, "PB157": None}),
        (
            recipe("bf16_mixed", fp32_residual_connection=True),
            "transformer_engine",
            {"PB473": None, "PB157": "warning"},
        ),
    ],
)
def test_captured_layers_take_bf16_inputs(precision: Any, graphs: str, by_rule: dict[str, str | None]) -> None:
    case = run(precision, "h100x8,te2.14,mcore0.20", model=dict(DENSE, cuda_graph_impl=graphs))
    for name, expected in by_rule.items():
        assert severity(name, case) == expected, name


@pytest.mark.parametrize(
    ("scope", "expected"),
    [(["attn"], None), (["attn", "moe_router"], None), (["moe"], "warning"), ("full", "warning"), (None, "warning")],
)
def test_captured_experts_are_those_of_the_scope(scope: Any, expected: str | None) -> None:
    model = dict(MOE, moe_grouped_gemm=True, cuda_graph_impl="transformer_engine")
    for field, release in {"cuda_graph_scope": "0.17.1", "cuda_graph_modules": "0.19.2"}.items():
        finding = found("PB475", full(CURRENT, f"h100x8,te2.14,cuda12.9,mcore{release}", {**model, field: scope}))
        assert (finding.severity if finding else None) == expected
        assert finding is None or finding.path == f"model.{field}"


@pytest.mark.parametrize(
    ("precision", "changes", "expected"),
    [
        (CURRENT, {}, "error"),
        ("bf16_mixed", {}, None),
        (CURRENT, {"recompute_granularity": "selective", "recompute_method": None}, None),
        (CURRENT, {"recompute_method": "block"}, None),  # which Megatron skips in a prediction layer
        (CURRENT, {"mtp_num_layers": None}, None),
    ],
)
def test_a_prediction_layer_is_without_gradients_where_fp8_recomputes_it(
    precision: Any, changes: dict[str, Any], expected: str | None
) -> None:
    model = dict(DENSE, mtp_num_layers=1, recompute_granularity="full", recompute_method="uniform")
    assert severity("PB471", full(precision, "h100x8,te2.9,cuda12.9,mcore0.17.1", {**model, **changes})) == expected


@pytest.mark.parametrize(
    ("dtype", "optimizer", "expected"),
    [
        ("fp32", {}, None),
        ("bf16", {}, "warning"),
        (None, {}, "warning"),
        ("bf16", {"use_precision_aware_optimizer": True}, None),
    ],
)
def test_megatron_fsdp_has_masters_of_the_dtype_that_is_stated(
    dtype: str | None, optimizer: dict[str, Any], expected: str | None
) -> None:
    ddp = dict(MEGATRON_FSDP, megatron_fsdp_main_params_dtype=dtype)
    case = full({"bf16": True}, H100, optimizer={**OVERLAP, **optimizer}, ddp=ddp)
    assert severity("PB333", case) == expected


@pytest.mark.parametrize(
    ("modules", "expected"), [(None, "warning"), (["core_attn"], "warning"), ([], None), (["mla_up_proj"], None)]
)
def test_fp8_attention_is_recomputed_where_its_core_is(modules: list[str] | None, expected: str | None) -> None:
    model = dict(DENSE, recompute_granularity="selective", recompute_modules=modules)
    precision = dict(MXFP8, fp8_dot_product_attention=True)
    assert severity("PB469", full(precision, "b200x8,te2.14,cuda12.9,mcore0.19.2", model)) == expected
