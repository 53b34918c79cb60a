"""Runs made small: what is kept, and that Megatron's own classes take every result."""

from __future__ import annotations

from math import gcd
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.front.loader import load_run
from bridge.model.layout import ParallelLayout
from bridge.model.shape_reader import require_shape
from bridge.plan.precision_plan import precision_plan
from bridge.precision.mode import get_scheme
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config
from bridge.rehearse.layers import select_kept_layers
from bridge.rehearse.layout import LayerSplit
from bridge.rehearse.shrink import shrink
from bridge.rehearse.small_run import SmallRun
from bridge.runtime.megatron.model.gpt import GPTConfig
from bridge.target.target import Target
from bridge.target.versions import parse_version

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "docs" / "showcase" / "llama3_70b.yaml"
NEMOTRON = ROOT / "docs" / "showcase" / "nemotron_h.yaml"
DEEPSEEK = ROOT / "docs" / "showcase" / "deepseek_v3.yaml"


def small_of(path: Path, *overrides: str, gpus: int | None = None, **limits: int) -> SmallRun:
    run = load_run(overrides, config_file=path)
    return shrink(run.sections, run.precision, target=Target(count=gpus), **limits)


def test_a_dense_layout_is_dealt_out_to_launches_of_four_processes():
    small = small_of(LLAMA, "+model.attention_backend=flash", gpus=64)
    assert small.sections["model"]["attention_backend"] == "auto"
    assert [(str(one), one.processes) for one in small.launches] == [
        ("TP 2 with SP x PP 2 x VPP 2", 4),
        ("CP 2 x DP 2", 4),
    ]
    model = small.sections["model"]
    assert model["ffn_hidden_size"] / model["hidden_size"] == 28672 / 8192
    assert (model["num_attention_heads"] / model["num_query_groups"], model["num_layers"]) == (8, 4)
    assert small.layers == ("1", "2", "21", "80")
    assert [str(one) for one in small_of(LLAMA, gpus=64, processes=1).launches] == ["one process"]


def test_a_mixture_of_experts_keeps_both_kinds_of_layers_and_two_experts_a_rank():
    small = small_of(DEEPSEEK, gpus=2048)
    model = small.sections["model"]
    assert (model["num_moe_experts"], model["moe_router_topk"]) == (4, 2)
    assert sorted(set(model["moe_layer_freq"])) == [0, 1]
    assert len(model["moe_layer_freq"]) == model["num_layers"] == len(small.layers)
    assert [(str(one), one.processes) for one in small.launches] == [("PP 2 x DP 2 x EP 2", 4)]
    assert not [name for name in model if name.startswith("num_layers_in_")]
    assert {name: value for name, value in small.launches[0].fields().items() if name.startswith("num_layers_in_")} == {
        "num_layers_in_first_pipeline_stage": 2,
        "num_layers_in_last_pipeline_stage": 1,
    }


def test_the_dispatcher_that_stands_for_flex_has_no_setting_of_flex() -> None:
    words = ("model.moe_token_dispatcher_type=flex", "+model.moe_enable_deepep=true")
    model = small_of(DEEPSEEK, *words, gpus=2048).sections["model"]
    assert "alltoall" in model["moe_token_dispatcher_type"]
    assert not model.get("moe_enable_deepep")


def test_a_hybrid_keeps_each_kind_of_layer_and_the_alignment_of_its_projections():
    small = small_of(NEMOTRON, "+model.mtp_hybrid_override_pattern='*M'", "+model.mtp_num_layers=1")
    assert small.layers == ("1", "2", "3", "4", "8", "117", "118")
    assert small.sections["model"]["hybrid_override_pattern"] == "M-M-*M-"
    assert [(one.path, one.value) for one in small.left_out] == [("model.mtp_num_layers", 1)]
    run = require_shape(load_run((), config_file=NEMOTRON).sections["model"])
    made = require_shape(small.sections["model"])
    for size in ("inner", "projected_width"):
        before, after = (getattr(shape.state_space, size) for shape in (run, made))
        assert gcd(before // 8, 16) == gcd(after // 2, 16)


DELTA = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4, "linear_num_key_heads": 16}
INDEXED = {"experimental_attention_variant": "dsa", "multi_latent_attention": True, "dsa_indexer_n_heads": 64}


def test_a_gated_delta_net_keeps_both_kinds_of_layers_and_the_alignment_of_its_projections():
    run = {"num_layers": 48, "hidden_size": 2048, "num_attention_heads": 16, "linear_num_value_heads": 32, **DELTA}
    run |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "tensor_model_parallel_size": 2}
    small = shrink({"model": run}, get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed"))
    model = small.sections["model"]
    assert sorted({*model["linear_attention_freq"]}) == [0, 1]
    before, after = (require_shape(one).delta_net for one in (run, model))
    assert gcd(before.projected_width // 2, 16) == gcd(after.projected_width // 2, 16)
    assert after.num_value_heads == 2 * after.num_key_heads
    assert after.projected_width < before.projected_width / 20


def test_an_indexer_is_made_small():
    sizes = {"dsa_indexer_head_dim": 128, "dsa_indexer_topk": 2048, "q_lora_rank": 1536, "kv_lora_rank": 512}
    run = {"num_layers": 8, "hidden_size": 4096, "num_attention_heads": 64, **sizes, **INDEXED}
    model = shrink({"model": run}, get_mixed_precision_config("bf16_mixed")).sections["model"]
    assert [model[f"dsa_indexer_{name}"] for name in ("head_dim", "n_heads", "topk")] == [64, 16, 16]


def test_settings_that_would_keep_a_resume_from_the_same_loss_are_off():
    run = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "num_moe_experts": 8, "moe_router_topk": 2}
    drawn = {"moe_router_force_load_balancing": True, "moe_router_dtype": "bf16"}
    small = shrink({"model": run | drawn}, get_mixed_precision_config("bf16_mixed"))
    assert small.sections["model"]["moe_router_force_load_balancing"] is False
    assert [one.path for one in small.left_out] == ["model.moe_router_dtype"]


def test_the_layer_that_prediction_layers_are_built_as_is_kept():
    split = LayerSplit(parallel=ParallelLayout(), num_layers=8, virtual=1)
    kinds = ("delta_net", "delta_net", "delta_net", "transformer") * 2
    assert select_kept_layers(kinds, split, start=0, end=0, limit=8, needs_last=True) == (0, 7)


def test_experts_that_tensor_ranks_do_not_split_are_spread_over_them():
    over = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true", "model.expert_tensor_parallel_size=1")
    small = small_of(DEEPSEEK, *over, gpus=2048)
    assert [str(one) for one in small.launches] == ["TP 2 with SP x PP 2 x EP 2", "DP 2 x EP 2"]
    assert {one.fields()["expert_tensor_parallel_size"] for one in small.launches} == {1}


@pytest.mark.parametrize(
    ("ddp", "optimizer", "changed"),
    [
        (
            {"use_megatron_fsdp": True, "fsdp_double_buffer": True},
            {},
            "mixed_precision.reuse_grad_buf_for_mxfp8_param_ag",
        ),
        ({}, {"optimizer": "dist_muon", "muon_momentum": 0.9}, "optimizer.optimizer"),
    ],
)
def test_the_distributed_optimizer_stands_for_other_sharding(ddp, optimizer, changed):
    run = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8}
    precision = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8", fp8_param_gather=True)
    small = shrink({"model": run, "ddp": ddp, "optimizer": optimizer}, precision)
    assert changed in {one.field for one in small.changes}
    assert [small.sections[name]["use_distributed_optimizer"] for name in ("ddp", "optimizer")] == [True, True]
    assert not [name for name in small.sections["optimizer"] if name.startswith("muon_")]
    assert not [name for name in small.sections["ddp"] if name.startswith("fsdp_")]


@pytest.mark.parametrize(
    ("overrides", "mcore", "left_out"),
    [
        (("mixed_precision.fp8_dot_product_attention=true",), "0.16.1", ["mixed_precision.fp8_dot_product_attention"]),
        (("mixed_precision=bf16_with_nvfp4_mixed", "mixed_precision.fp4_param_gather=true"), "0.16.1", []),
        (
            ("mixed_precision=bf16_with_nvfp4_mixed", "mixed_precision.fp4_param_gather=true"),
            "0.20",
            ["mixed_precision.fp4_param_gather"],
        ),
    ],
)
def test_formats_that_no_run_here_has_are_left_out_where_the_target_has_them(overrides, mcore, left_out):
    run = load_run(overrides, config_file=LLAMA)
    here = parse_version("0.16.1")
    small = shrink(run.sections, run.precision, target=Target(mcore=parse_version(mcore)), local_version=here)
    assert [one.path for one in small.left_out] == left_out
    assert not {path.partition(".")[2] for path in left_out} & {*small.precision}


LAYOUT = "model.pipeline_model_parallel_layout"


def test_a_layout_of_the_runs_own_has_two_stages_of_the_same_content():
    layout = "'Et*3|(tt|)*29,m|L'"
    words = ("model.virtual_pipeline_model_parallel_size=2", "~model.num_layers_in_first_pipeline_stage")
    small = small_of(DEEPSEEK, f"{LAYOUT}={layout}", *words, "~model.num_layers_in_last_pipeline_stage", gpus=2048)
    decoders, ends = ["decoder"] * (int(small.sections["model"]["num_layers"]) - 2), ["embedding", "decoder"]
    assert small.launches[0].fields()["pipeline_model_parallel_layout"] == [
        ends,
        decoders,
        ["decoder", "mtp"],
        ["loss"],
    ]


def test_rows_of_modules_follow_their_layers_and_a_row_without_one_is_named():
    rows = [
        {"select": {"layers": [0, 40, -1], "module": "linear_fc2"}, "precision": "bf16"},
        {"select": "decoder.layers.79.*", "precision": "mxfp8"},
        {"select": "*.linear_qkv", "precision": "bf16"},
    ]
    run = load_run((), config_file=LLAMA)
    precision = MixedPrecisionConfig.from_dict(run.precision.to_dict() | {"modules": rows})
    small = shrink(run.sections, precision, target=Target(count=64))
    assert (small.layers, small.unshown_choices) == (("1", "2", "41", "80"), [])
    assert [row["select"] for row in small.precision["modules"]] == [
        {"layers": [0, 2, 3], "module": "linear_fc2"},
        "decoder.layers.3.*",
        "*.linear_qkv",
    ]
    small = shrink(run.sections, precision, target=Target(count=64), max_layers=1)
    assert small.unshown_choices == []
    rows += [{"select": {"layers": [layer], "module": "linear_proj"}, "precision": "bf16"} for layer in range(9, 19)]
    precision = MixedPrecisionConfig.from_dict(run.precision.to_dict() | {"modules": rows})
    dropped = shrink(run.sections, precision, target=Target(count=64)).unshown_choices
    assert dropped[-1] == "The row layers 18: linear_proj of modules: none of its layers is among the kept ones."


def test_a_size_that_the_scheme_refuses_is_refused_in_the_rehearsal_too():
    width = small_of(LLAMA, "model.ffn_hidden_size=28640").sections["model"]["ffn_hidden_size"]
    assert gcd(28640 // 4, 16) == gcd(width // 2, 16) == 8
    tokens = small_of(LLAMA, "model.seq_length=8184").sections["model"]["seq_length"]
    assert gcd(8184 // 2, 16) == gcd(tokens // 2, 16) == 4


@pytest.mark.parametrize(
    ("start", "end", "limit", "expected"),
    [(1, 1, 8, (0, 1, 99)), (4, 2, 8, (0, 1, 2, 3, 4, 98, 99)), (40, 2, 4, (0, 1, 40, 99)), (0, 0, 8, (0,))],
)
def test_first_and_last_layers_are_kept(start, end, limit, expected):
    kept = select_kept_layers(
        ("transformer",) * 100,
        LayerSplit(parallel=ParallelLayout(), num_layers=100, virtual=1),
        start=start,
        end=end,
        limit=limit,
    )
    assert kept == expected


SCHEMES = ("bf16_mixed", "bf16_with_fp8_current_scaling_mixed", "bf16_with_mxfp8_mixed", "bf16_with_nvfp4_mixed")


def stages(draw, pp: int, vpp: int) -> dict:
    """Return the fields of one way to split layers over stages, and their number."""
    each = draw(st.integers(1, 6)) * vpp
    kind = draw(st.sampled_from(("even", "first", "last", "both", "counted", "layout"))) if pp > 1 else "even"
    first, last = (draw(st.integers(1, 4)) * vpp for _ in range(2))
    if kind == "layout":
        counts = [draw(st.integers(1, 3)) for _ in range(pp * vpp)]
        counts[-1] = draw(st.integers(0, 2))
        chunks = [["decoder"] * count for count in counts]
        chunks[0].insert(0, "embedding")
        chunks[-1].append("loss")
        return {"num_layers": sum(counts), "pipeline_model_parallel_layout": chunks}
    if kind == "counted":
        switches = {f"account_for_{name}_in_pipeline_split": True for name in ("embedding", "loss")}
        return {"num_layers": pp * each * 2 - 2, **switches}
    ends = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    ends = {name: count for name, count in ends.items() if kind == "both" or kind in name}
    return {"num_layers": (pp - len(ends)) * each + sum(ends.values()), **ends}


@st.composite
def models(draw) -> dict:
    """A model and layout that Megatron takes."""
    tp, pp, vpp, cp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4, 8), (1, 2, 3, 4), (1, 2, 3), (1, 2, 4)))
    groups = tp * draw(st.sampled_from((1, 2, 3)))
    heads = groups * draw(st.sampled_from((1, 2, 7, 8, 16)))
    channels = draw(st.sampled_from((16, 24, 64, 96, 128)))
    model = {
        **stages(draw, pp, vpp),
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "hidden_size": heads * channels,
        "ffn_hidden_size": tp * draw(st.integers(8, 400)) * 8,
        "seq_length": 2 * cp * tp * draw(st.integers(16, 400)),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "sequence_parallel": tp > 1 and draw(st.booleans()),
        "add_bias_linear": False,
        "gated_linear_unit": draw(st.booleans()),
    }
    if vpp > 1 and pp > 1:
        model["virtual_pipeline_model_parallel_size"] = vpp
    if draw(st.booleans()):
        model["kv_channels"] = channels
        model["hidden_size"] = 64 * draw(st.integers(1, 100))
    if draw(st.booleans()):
        experts = draw(st.sampled_from((4, 8, 60, 256)))
        expert = draw(st.sampled_from((1, 2, 4)))
        model |= {"num_moe_experts": experts, "moe_router_topk": draw(st.integers(2, 4)), "moe_ffn_hidden_size": 1408}
        model |= {"expert_model_parallel_size": expert, "expert_tensor_parallel_size": 1}
        model |= {"moe_layer_freq": draw(st.sampled_from((1, 2, [0] + [1] * (model["num_layers"] - 1))))}
    return model


ROWS = (
    {"select": {"layers": [0, -1], "module": "linear_proj"}, "precision": "bf16"},
    {"select": "decoder.layers.0.*", "precision": "mxfp8"},
)


@given(model=models(), recipe=st.sampled_from(SCHEMES), kept=st.integers(0, 2), rows=st.sampled_from(((), ROWS)))
@settings(max_examples=25, deadline=None)
def test_megatron_takes_every_model_that_was_made_small(model, recipe, kept, rows):
    precision = get_mixed_precision_config(recipe)
    if rows:
        precision = MixedPrecisionConfig.from_dict(precision.to_dict() | {"modules": rows})
    if get_scheme(precision) is not None and model["num_layers"] > 2 * kept:
        counts = {"num_layers_at_start_in_bf16": kept, "num_layers_at_end_in_bf16": kept}
        precision = MixedPrecisionConfig.from_dict(precision.to_dict() | {"first_last_layers_bf16": True} | counts)
    before = precision_plan(precision, model)
    small = shrink({"model": model, "train": {"micro_batch_size": 3}}, precision)
    made = small.sections["model"]
    own = MixedPrecisionConfig.from_dict(small.precision)
    for one in small.launches:
        fields = {**made, **one.fields()}
        GPTConfig(**fields, pipeline_dtype=torch.bfloat16)
        after = precision_plan(own, fields)
        assert after.settings.scheme == before.settings.scheme
        assert bool(after.low_precision_layers()) == bool(before.low_precision_layers())
        for label, number in zip(small.layers, range(1, len(small.layers) + 1), strict=True):
            pairs = ((after, number), (before, int(label)))
            assert after.layers[number].low == before.layers[int(label)].low
            assert after.layers[number].kind == before.layers[int(label)].kind
            schemes = [[(one.name, one.scheme) for one in plan.layers[at].modules] for plan, at in pairs]
            assert schemes[0] == schemes[1]
        assert one.processes <= 4
    assert made["hidden_size"] <= max(model["hidden_size"], 256)


def test_the_parts_that_a_graph_captures_are_taken_out_as_no_graph_is_captured():
    run = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "cuda_graph_scope": ["full_iteration"]}
    small = shrink({"model": {**run, "cuda_graph_modules": ["attn"]}, "train": {"micro_batch_size": 1}}, None)
    assert not {"cuda_graph_scope", "cuda_graph_modules"} & small.sections["model"].keys()
