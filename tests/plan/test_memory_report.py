"""The memory model against the bytes of live Megatron objects, and against published sizes."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from bridge.cli.main import main
from bridge.errors import RunConfigError
from bridge.model.layout import ParallelLayout
from bridge.plan.memory_activations import build_segments
from bridge.plan.memory_parameters import list_chunk_parameters
from bridge.plan.memory_report import build_memory_report
from bridge.plan.precision_plan import precision_plan
from bridge.plan.workload import Workload
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from bridge.runtime.megatron.process.training_process import training_process
from bridge.target.versions import Version, get_installed_version
from tests import warm
from tests.model.test_shape import LLAMA_3_70B
from tests.work import calls

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 160,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 32,
    "make_vocab_size_divisible_by": 8,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LAYOUTS = {
    "dp2": {},
    "dp2-replicated": {"use_distributed_optimizer": False},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2-tied": {"pipeline_model_parallel_size": 2, "share_embeddings_and_output_weights": True},
}
RECIPES = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp32": "fp32",
    "bf16-narrow-gradients": {"bf16": True, "grad_reduce_in_fp32": False},
    "fp8-current": "bf16_with_fp8_current_scaling_mixed",
    "fp8-delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}
STORED_LOW = ("fp8-current", "fp8-delayed", "mxfp8")
EXACT = ("weights", "gradients", "master weights", "optimizer state")


def case(recipe: str, layout: str) -> dict:
    options = dict(LAYOUTS[layout])
    sharded = {"use_distributed_optimizer": options.pop("use_distributed_optimizer", True)}
    model = {**SHAPE, **options}
    if recipe in STORED_LOW:
        model |= {"normalization": "RMSNorm", "add_bias_linear": False}
    overlap = {"overlap_grad_reduce": True, "bucket_size": 20000}
    return {
        "model": model,
        "optimizer": {"lr": 1e-3, **sharded},
        "ddp": {**sharded, **overlap},
        "mixed_precision": RECIPES[recipe],
    }


def works(recipe: str, layout: str) -> bool:
    return not (
        recipe in STORED_LOW and layout == "dp2-replicated"
    )  # Megatron stores FP8 under the distributed optimizer only


CASES = {f"{recipe}-{layout}": (recipe, layout) for recipe in RECIPES for layout in LAYOUTS if works(recipe, layout)}


def predicted(recipe: str, layout: str, rank: int):
    given = case(recipe, layout)
    precision = given["mixed_precision"]
    config = REGISTRY.get(precision) if isinstance(precision, str) else MixedPrecisionConfig.from_dict(precision)
    model = {**given["model"], "vocab_size": 256}
    parallel = ParallelLayout.from_model(model).fit_to_world_size(2)
    plan = precision_plan(
        config, model, parallel, optimizer=given["optimizer"], ddp=given["ddp"], mcore=get_installed_version("mcore")
    )
    data_rank = rank if parallel.data > 1 else 0
    report = build_memory_report(plan, ddp=given["ddp"], data_rank=data_rank)
    return report.ranks[rank if parallel.pipeline > 1 else 0]


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """All cases, built one after the other by one launch of two processes."""
    folder = tmp_path_factory.mktemp("memory")
    cases = folder / "cases.json"
    cases.write_text(json.dumps({name: case(*place) for name, place in CASES.items()}))
    for done in warm.launch(["python", "-m", "tests.plan.memory_live", cases], processes=2, cwd=ROOT):
        assert done.returncode == 0, done.stderr[:6000]
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*-[01].json")}


@pytest.mark.parametrize("name", CASES)
def test_parameters_gradients_masters_and_state_are_those_of_the_live_objects(name, live):
    for rank in (0, 1):
        rank_memory = predicted(*CASES[name], rank)
        found = live[f"{name}-{rank}"]
        assert {kind: rank_memory.bytes_of[kind] for kind in EXACT} == {kind: found[kind] for kind in EXACT}
        assert rank_memory.parameters == found["parameters"]


def test_the_unused_buffer_of_an_mxfp8_model_is_counted_before_megatron_core_0_17():
    given = {**SHAPE, "normalization": "RMSNorm", "add_bias_linear": False, "vocab_size": 256}

    def weights(release):
        precision, sharded = REGISTRY.get("bf16_with_mxfp8_mixed"), {"use_distributed_optimizer": True}
        plan = precision_plan(precision, given, optimizer=sharded, ddp=sharded, mcore=Version(release))
        (place,) = plan.parallel.split_layers(4)
        in_bf16 = sum(one.numel for one in list_chunk_parameters(plan, place) if not one.is_stored_low)
        return build_memory_report(plan).ranks[0].bytes_of["weights"], 2 * in_bf16

    (before, in_bf16), (after, _) = weights("0.16.1"), weights("0.17.0")
    assert before - after == in_bf16
    assert weights("0.19.2")[0] == after


def test_equal_layers_are_counted_once():
    def different(num_layers):
        plan = precision_plan(REGISTRY.get("bf16_with_fp8_current_scaling_mixed"), {**SHAPE, "num_layers": num_layers})
        (place,) = plan.parallel.split_layers(num_layers)
        return len({*list_chunk_parameters(plan, place)}), len({layer.alike for layer in plan.layers})

    assert different(400) == different(4)


@pytest.mark.parametrize(("optimizer", "ranks"), [("muon", 1), ("dist_muon", 4)])
def test_muon_keeps_one_moment_of_a_matrix_and_its_layer_wise_form_deals_parameters_out(optimizer, ranks):
    given = {**SHAPE, "normalization": "RMSNorm", "add_bias_linear": False, "vocab_size": 256}
    plan = precision_plan(REGISTRY.get("bf16_mixed"), given, ParallelLayout(data=4), optimizer={"optimizer": optimizer})
    (place,) = plan.parallel.split_layers(4)
    parameters = list_chunk_parameters(plan, place)
    everything = sum(one.numel for one in parameters)
    matrices = sum(one.numel for one in parameters if one.module.startswith("linear_") and one.name == "weight")
    rank = build_memory_report(plan).ranks[0]
    assert 0 < matrices < everything
    assert rank.bytes_of["master weights"] == everything // ranks * 4
    assert rank.bytes_of["optimizer state"] == pytest.approx((8 * everything - 4 * matrices) / ranks, rel=1e-9)


# -- against Megatron's modules, without parallelism ------------------------------------------------------------------

EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 96,
    "moe_layer_freq": [0, 1, 1, 0],
    "moe_token_dispatcher_type": "allgather",
}
KINDS_OF_MODEL = {
    "plain": {},
    "softmax-offset": {"softmax_type": "learnable"},
    "gated-rms-no-bias": {"gated_linear_unit": True, "normalization": "RMSNorm", "add_bias_linear": False},
    "qkv-bias": {"add_bias_linear": False, "add_qkv_bias": True},
    "qk-layernorm": {"qk_layernorm": True, "kv_channels": 24},
    "qk-l2-norm": {"qk_l2_norm": True, "qk_layernorm": True, "kv_channels": 24},
    "experts": {**EXPERTS, "add_bias_linear": False},
    "prediction": {"mtp_num_layers": 1},
    "tied": {"share_embeddings_and_output_weights": True},
}


def megatron_parameters(given: dict) -> list[int]:
    """Return the sizes of the parameters of Megatron's own GPT model, in its order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_decoder_block_spec,
            get_gpt_mtp_block_spec,
        )
        from megatron.core.transformer import TransformerConfig
    own = ("seq_length", "make_vocab_size_divisible_by", "share_embeddings_and_output_weights")
    config = TransformerConfig(
        **{key: value for key, value in given.items() if key not in own},
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    with training_process(config, seed=1):
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, qk_l2_norm=config.qk_l2_norm)
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=256,
            max_sequence_length=32,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=given.get("share_embeddings_and_output_weights", False),
            mtp_block_spec=mtp,
        )
        return [parameter.numel() for parameter in model.parameters()]


@pytest.mark.parametrize("name", KINDS_OF_MODEL)
def test_every_kind_of_model_has_megatrons_parameters_in_megatrons_order(name):
    given = {**SHAPE, **KINDS_OF_MODEL[name]}
    plan = precision_plan(MixedPrecisionConfig(), {**given, "vocab_size": 256})
    (place,) = plan.parallel.split_layers(plan.shape.num_layers)
    assert [parameter.numel for parameter in list_chunk_parameters(plan, place)] == megatron_parameters(given)


def test_published_models_are_counted_once():
    def parameters(model, **layout):
        return build_memory_report(precision_plan(REGISTRY.get("bf16_mixed"), {**model, **layout})).parameters

    tied = {**LLAMA_3_70B, "share_embeddings_and_output_weights": True}
    assert parameters(LLAMA_3_70B) == parameters(LLAMA_3_70B, tensor_model_parallel_size=8) == 70_553_706_496
    assert parameters(LLAMA_3_70B) - parameters(tied) == 128256 * 8192


# -- activations ------------------------------------------------------------------------------------------------------


def test_recomputation_and_pipelines_change_what_is_kept_at_a_time():
    model = {**SHAPE, "vocab_size": 256, "bf16": True, "pipeline_model_parallel_size": 4}

    def activations(**changes):
        plan = precision_plan(None, model)
        report = build_memory_report(plan, workload=replace(Workload.from_sections(model), **changes))
        return [rank.bytes_of["activations"] for rank in report.ranks]

    everything = activations()
    freed = activations(keeps_outputs=False)
    sent = 32 * 64 * 2  # bytes of a micro-batch between two stages
    assert (freed[1] - sent) / (freed[2] - sent) == 3 / 2  # stage 1 of 4 holds 3 micro-batches, stage 2 holds 2
    assert [everything[stage] - freed[stage] for stage in range(4)] == [4 * sent, 3 * sent, 2 * sent, 0]
    assert activations(micro_batches=2, keeps_outputs=False)[1] == freed[2]
    assert activations(recompute="full")[1] < activations(recompute="selective", modules=("mlp",))[1] < everything[1]


def test_a_block_of_no_layers_is_no_recomputation_and_a_group_of_no_layers_is_an_error():
    block = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 0}
    load = Workload.from_sections({**SHAPE, **block})
    assert (load.recompute, load.layers) == ("none", 1)
    assert Workload.from_sections({**SHAPE, "recompute_num_layers": 0}).recompute == "none"
    with pytest.raises(RunConfigError, match=r"recompute_num_layers: must be a whole number of at least 1, got 0\."):
        Workload.from_sections({**SHAPE, **block, "recompute_method": "uniform"})


def test_low_precision_linears_keep_narrower_inputs():
    model = {**SHAPE, "vocab_size": 256, "normalization": "RMSNorm", "add_bias_linear": False}

    def kept(recipe):
        plan = precision_plan(REGISTRY.get(recipe), model)
        return round(
            sum(
                part.kept
                for part in build_segments(plan, plan.parallel.split_layers(4)[0], Workload.from_sections(model))
            )
        )

    # Under MXFP8 a layer keeps the inputs of qkv and fc1 (64 wide) and of fc2 (160) in one byte instead of two, with a
    # scale for 32 values, and the projection's input as the attention keeps it anyway.
    assert kept("bf16_mixed") - kept("mxfp8") == 4 * 32 * (64 * 2 + 160) * (1 - 1 / 32)


# -- low-precision copies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "capability", "wanted"),
    [
        ("bf16_mixed", None, 0),
        ("bf16_with_fp8_current_scaling_mixed", (9, 0), 1),  # stored in FP8, and transposed for Hopper
        ("bf16_with_fp8_current_scaling_mixed", (10, 0), 0),
        ("bf16_with_fp8_current_scaling_mixed", None, 1),
        ("bf16_with_fp8_subchannel_scaling_mixed", (9, 0), 2),  # BF16 weights, and both copies
        ("bf16_with_mxfp8_mixed", (10, 0), 1 + 2 / 32),
        ("bf16_with_nvfp4_mixed", (10, 0), 0.5 + 2 / 16),
    ],
)
def test_copies_take_the_bytes_that_the_scheme_and_the_gpu_ask_for(recipe, capability, wanted):
    model = {**SHAPE, "hidden_size": 512, "ffn_hidden_size": 2048, "vocab_size": 256, "num_layers": 3}
    precision = REGISTRY.get(recipe).override(first_last_layers_bf16=False)
    report = build_memory_report(precision_plan(precision, model), capability=capability)
    elements = 3 * (512 * (512 + 512) + 512 * 512 + 2 * 512 * 2048)
    assert report.ranks[0].bytes_of["low-precision copies"] / elements == pytest.approx(wanted, abs=0.002)


def test_amax_state_is_that_of_delayed_scaling():
    def amax(recipe):
        plan = precision_plan(REGISTRY.get(recipe), {**SHAPE, "vocab_size": 256})
        return build_memory_report(plan).ranks[0].bytes_of["amax state"]

    assert amax("bf16_with_fp8_current_scaling_mixed") == 0
    assert amax("bf16_with_fp8_delayed_scaling_mixed") == 4 * 4 * (1024 + 1) * 5 * 4  # 16 linears, 5 slots, FP32


def test_all_experts_on_one_rank_are_counted_soon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/showcase/deepseek_v3.yaml").read_text()
    file = tmp_path / "run.yaml"
    kept = (line for line in text.splitlines() if "pipeline" not in line and "expert_model_parallel_size" not in line)
    file.write_text("\n".join(kept))
    assert calls(lambda: main(["memory", "--config", str(file)])) < 2_000_000
    assert "682,636,472,320 on the largest rank" in capsys.readouterr().out
