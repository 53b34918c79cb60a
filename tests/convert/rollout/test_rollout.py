"""Training against rollout: configs in the style of each framework, and serving configs of real forms."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.cli.main import main
from bridge.convert.rollout.frameworks import FRAMEWORKS
from bridge.front.loader import load_run
from bridge.preflight.rule_check import check

NEMO: dict[str, Any] = {
    "policy": {
        "model_name": "meta-llama/Llama-3.1-8B-Instruct",
        "precision": "bfloat16",
        "megatron_cfg": {
            "enabled": True,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "expert_model_parallel_size": 1,
            "fp8_cfg": {
                "enabled": True,
                "fp8": "e4m3",
                "fp8_recipe": "blockwise",
                "fp8_param": False,
            },
            "env_vars": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"},
        },
        "generation": {
            "backend": "vllm",
            "vllm_cfg": {"precision": "fp8", "kv_cache_dtype": "auto", "use_deep_gemm": True},
        },
    }
}
VERL = """\
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.name=ENGINE MORE
"""
IN_FP8 = (
    "+actor_rollout_ref.actor.megatron.override_transformer_config.fp8=e4m3 "
    "+actor_rollout_ref.actor.megatron.override_transformer_config.fp8_recipe=blockwise "
)
SLIME = """\
ray job submit --address=http://127.0.0.1:8265 \\
   --runtime-env-json='{"env_vars": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}}' -- python3 train.py \\
   --hf-checkpoint /models/Tiny-FP8 --ref-load /models/tiny --num-layers 4 --hidden-size 512 --ffn-hidden-size 1024 \\
   --num-attention-heads 8 --swiglu --disable-bias-linear --normalization RMSNorm --vocab-size 32000 --bf16 \\
   --transformer-impl transformer_engine --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 MORE
"""
OWN = """\
model: {num_layers: 28, hidden_size: 2048, ffn_hidden_size: 6144, num_attention_heads: 16, num_query_groups: 8,
  kv_channels: 128, gated_linear_unit: true, add_bias_linear: false, vocab_size: 151936, seq_length: 4096}
mixed_precision: bf16_with_mxfp8_mixed
"""
ATTENTION = "self_attention.linear_qkv"
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
pytestmark = pytest.mark.filterwarnings("ignore")

Answer = dict[str, Any]


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Answer]:
    """Return the exit code and the JSON of `manifest`."""
    code = main(["manifest", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def nemo(tmp_path: Path, *changes: str, parts: tuple[str, ...] = ()) -> str:
    """Return the path of a NeMo-RL config with values changed: "policy.precision=float16"."""
    content = json.loads(json.dumps(NEMO))
    for change in changes:
        key, _, text = change.partition("=")
        block = content
        *path, last = key.removeprefix("++").split(".")
        for name in path:
            block = block.setdefault(name, {})
        block[last] = yaml.safe_load(text)
    if parts:
        vllm = content["policy"]["generation"]["vllm_cfg"]
        vllm["quantization_ignored_layer_kws"] = list(parts)
    path_of_file = tmp_path / "grpo.yaml"
    path_of_file.write_text(yaml.safe_dump(content))
    return str(path_of_file)


def verl(tmp_path: Path, engine: str, more: str = "") -> str:
    path = tmp_path / "run_verl.sh"
    path.write_text(VERL.replace("ENGINE", engine).replace("MORE", more))
    return str(path)


def slime(tmp_path: Path, more: str = "") -> str:
    path = tmp_path / "run_slime.sh"
    path.write_text(SLIME.replace("MORE", more))
    return str(path)


def served(tmp_path: Path, quantization: Mapping[str, Any] | None, model_type: str = "llama") -> str:
    content: dict[str, Any] = {"model_type": model_type, "torch_dtype": "bfloat16"}
    if quantization is not None:
        content["quantization_config"] = quantization
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    return str(path)


def verdicts(answer: Answer) -> dict[str, set[str]]:
    """Return the verdicts of each subject."""
    found: dict[str, set[str]] = {}
    for row in answer["rows"]:
        found.setdefault(row["subject"], set()).add(row["verdict"])
    return found


def words_for(answer: Answer, side: str) -> list[str]:
    """Return the settings that would make one side agree."""
    for one in answer["agreeing"]:
        if one["side"] == side:
            return list(one["words"])
    return []


def test_nemo_rl_in_fp8_on_both_sides_is_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = asked(capsys, nemo(tmp_path), "--rollout", "--model-type", "llama")
    assert code == 0
    assert answer["verdict"] == "equal"
    assert answer["by_kinds_alone"] is True
    assert answer["agreeing"] == []
    assert {row["modules"] for row in answer["rows"]} == {None}


def test_a_rollout_in_fp8_of_training_in_bf16_differs_and_either_agreeing_config_agrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    off = "policy.megatron_cfg.fp8_cfg.enabled=false"
    words = ("--rollout", "--model-type", "llama")
    code, answer = asked(capsys, nemo(tmp_path, off), *words)
    assert code == 1
    assert verdicts(answer)[ATTENTION] == {"differs"}
    assert verdicts(answer)["output_layer"] == {"equal"}
    for side in ("rollout", "training"):
        changes = words_for(answer, side)
        assert changes, side
        code, changed = asked(capsys, nemo(tmp_path, off, *changes), *words)
        assert (code, changed["verdict"]) == (0, "equal"), side
        unstated = nemo(tmp_path, off, "policy.megatron_cfg.env_vars=null")
        code, typed = asked(capsys, unstated, *changes, *words)
        assert (code, typed["verdict"]) == (0, "equal"), side
        run = load_run(config_file=unstated, overrides=changes, strict=False)
        assert "PB134" not in {one.id for one in check(run).findings}, side


def test_first_and_last_layers_differ_by_their_place_without_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = "policy.generation.vllm_cfg"
    path = nemo(
        tmp_path,
        f"{block}.num_first_layers_in_bf16=2",
        f"{block}.num_last_layers_in_bf16=1",
    )
    code, answer = asked(capsys, path, "--rollout", "--model-type", "llama")
    assert code == 1
    places = {}
    for row in answer["rows"]:
        if row["subject"] == ATTENTION:
            places[row["layers"]] = row["verdict"]
    assert places == {
        "first 1-2, last 1": "differs",
        "layers between first and last": "equal",
    }
    changes = words_for(answer, "training")
    agreeing = nemo(
        tmp_path,
        f"{block}.num_first_layers_in_bf16=2",
        f"{block}.num_last_layers_in_bf16=1",
        *changes,
    )
    code, answer = asked(capsys, agreeing, "--rollout", "--model-type", "llama")
    assert (code, answer["verdict"]) == (0, "equal")


def test_scales_differ_where_one_side_has_powers_of_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = nemo(tmp_path, "policy.generation.vllm_cfg.pow2_weight_scaling_factors=true")
    code, answer = asked(capsys, path, "--rollout", "--model-type", "llama")
    assert code == 1
    assert verdicts(answer)["scales of weights"] == {"differs"}
    assert verdicts(answer)["scales of inputs"] == {"equal"}


def test_scales_cannot_be_known_where_no_variable_is_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = nemo(tmp_path, "policy.megatron_cfg.env_vars={}")
    code, answer = asked(capsys, path, "--rollout", "--model-type", "llama")
    assert code == 0
    assert answer["verdict"] == "cannot be known"
    assert verdicts(answer)["scales of weights"] == {"cannot be known"}


def test_a_cache_in_fp8_differs_and_no_training_removes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = nemo(tmp_path, "policy.generation.vllm_cfg.kv_cache_dtype=fp8")
    code, answer = asked(capsys, path, "--rollout", "--model-type", "llama")
    assert code == 1
    assert words_for(answer, "rollout") == ["++policy.generation.vllm_cfg.kv_cache_dtype=auto"]
    assert words_for(answer, "training") == []


def test_modules_of_latent_attention_that_rollout_keeps_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = nemo(tmp_path, parts=("a_proj", "b_proj"))
    code, answer = asked(capsys, path, "--rollout")
    assert code == 1
    found = verdicts(answer)
    assert found["self_attention.linear_q_down_proj"] == {"differs"}
    assert found["self_attention.linear_kv_up_proj"] == {"differs"}
    assert found["self_attention.linear_proj"] == {"equal"}
    assert found["mlp.router"] == {"cannot be known"}


def test_a_part_of_names_that_is_in_no_known_name_cannot_be_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = nemo(tmp_path, parts=("linear_attn.in_proj_a",))
    code, answer = asked(capsys, path, "--rollout")
    assert code == 0
    subject = "modules with linear_attn.in_proj_a in their names"
    assert verdicts(answer)[subject] == {"cannot be known"}
    assert "self_attention.linear_q_down_proj" not in verdicts(answer)


def test_mxfp8_of_nemo_rl_leaves_the_head_to_the_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = nemo(
        tmp_path,
        "policy.generation.vllm_cfg.is_mx=true",
        "policy.megatron_cfg.fp8_cfg.fp8_recipe=mxfp8",
    )
    code, answer = asked(capsys, path, "--rollout", "--model-type", "llama")
    assert code == 0
    assert verdicts(answer)[ATTENTION] == {"equal"}
    assert verdicts(answer)["output_layer"] == {"cannot be known"}


def test_another_engine_of_nemo_rl_cannot_be_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = nemo(tmp_path, "policy.generation.backend=megatron")
    code, answer = asked(capsys, path, "--rollout")
    assert code == 0
    assert verdicts(answer)[ATTENTION] == {"cannot be known"}
    assert verdicts(answer)["keys and values (cache)"] == {"cannot be known"}


def test_options_over_those_that_are_read_cannot_be_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = nemo(tmp_path, "policy.generation.vllm_kwargs.quantization=awq")
    code, answer = asked(capsys, path, "--rollout")
    assert code == 0
    assert verdicts(answer)[ATTENTION] == {"cannot be known"}


def test_verl_in_fp8_on_both_sides_keeps_the_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = verl(tmp_path, "vllm", IN_FP8 + "actor_rollout_ref.rollout.quantization=fp8")
    code, answer = asked(capsys, path, "--rollout")
    assert code == 0
    found = verdicts(answer)
    assert found[ATTENTION] == found["mlp.experts.linear_fc1"] == found["mlp.router"] == {"equal"}
    assert found["scales of weights"] == {"cannot be known"}


def test_verl_that_quantises_the_rollout_alone_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for engine in FRAMEWORKS["verl"]["engines"]:
        path = verl(tmp_path, engine, "actor_rollout_ref.rollout.quantization=fp8")
        code, answer = asked(capsys, path, "--rollout")
        assert code == 1, engine
        assert words_for(answer, "rollout") == ["++actor_rollout_ref.rollout.quantization=null"]
        agreeing = " ".join(words_for(answer, "training"))
        path = verl(tmp_path, engine, f"{agreeing} actor_rollout_ref.rollout.quantization=fp8")
        code, answer = asked(capsys, path, "--rollout")
        assert code == 0, engine
        assert verdicts(answer)[ATTENTION] == {"equal"}, engine


def test_the_checkpoint_of_verl_decides_a_rollout_without_quantization(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = verl(tmp_path, "vllm")
    code, answer = asked(capsys, path, "--rollout")
    assert (code, answer["verdict"]) == (0, "cannot be known")
    plain = served(tmp_path, None)
    code, answer = asked(capsys, path, "--rollout", plain)
    assert (code, answer["verdict"]) == (0, "equal")
    code, answer = asked(capsys, path, "--rollout", served(tmp_path, BLOCKS))
    assert (code, answer["verdict"]) == (1, "differs")


def test_the_checkpoint_of_slime_decides_and_its_config_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_fp8 = "--fp8-format e4m3 --fp8-recipe blockwise"
    path = slime(tmp_path, in_fp8)
    code, answer = asked(capsys, path, "--rollout")
    assert code == 0
    assert "/models/Tiny-FP8" in answer["rows"][0]["decided_by"]
    code, answer = asked(capsys, path, "--rollout", served(tmp_path, BLOCKS))
    assert code == 0
    found = {row["subject"]: row for row in answer["rows"]}
    assert found[ATTENTION]["verdict"] == "equal"
    assert found[ATTENTION]["modules"] == 12
    assert found["output_layer"]["verdict"] == "equal"
    code, answer = asked(capsys, slime(tmp_path), "--rollout", served(tmp_path, BLOCKS))
    assert code == 1
    assert words_for(answer, "training") == in_fp8.replace(" --fp8-r", "|--fp8-r").split("|")


def test_slime_sends_fp8_values_for_modules_that_the_list_of_the_checkpoint_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """slime's quantize_params_fp8 decides by Megatron's names, and does not read modules_to_not_convert."""
    edges = "--fp8-format e4m3 --fp8-recipe blockwise --first-last-layers-bf16"
    layers = [f"model.layers.{number}" for number in (0, 3)]
    listed = served(tmp_path, {**BLOCKS, "modules_to_not_convert": ["lm_head", *layers]})
    code, answer = asked(capsys, slime(tmp_path, edges), "--rollout", listed)
    assert code == 0
    attention = {row["layers"]: row for row in answer["rows"] if row["subject"] == ATTENTION}
    assert {layers: row["verdict"] for layers, row in attention.items()} == {
        "layers 1, 4": "cannot be known",
        "layers 2-3": "equal",
    }
    assert (
        "training sends FP8 values for it, since slime or miles does not read" in attention["layers 1, 4"]["decided_by"]
    )
    assert verdicts(answer)["output_layer"] == {"equal"}


def test_a_cache_of_sglang_in_fp8_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = slime(tmp_path, "--sglang-kv-cache-dtype fp8_e4m3")
    code, answer = asked(capsys, path, "--rollout", served(tmp_path, None))
    assert code == 1
    assert words_for(answer, "rollout") == ["--sglang-kv-cache-dtype auto"]


def test_a_cache_in_the_dtype_of_the_model_cannot_be_known_without_the_config_of_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang and vLLM store FP8 if the quantization config of the checkpoint has a cache in FP8."""
    for words in (["--rollout"], ["--rollout", served(tmp_path, None)]):
        code, answer = asked(capsys, slime(tmp_path), *words)
        assert code == 0
        (row,) = [row for row in answer["rows"] if row["subject"] == "keys and values (cache)"]
        if len(words) == 1:
            assert row["verdict"] == "cannot be known"
            assert "its config.json has a quantization_config or none" in row["decided_by"]
        else:
            assert row["verdict"] == "equal"


def test_a_list_for_routers_leaves_56_projections_of_a_dense_model_in_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fault of verl pull requests 7519 and 7918, on Qwen3-1.7B: 28 layers of gate_proj and up_proj."""
    run = tmp_path / "run.yaml"
    run.write_text(OWN)
    routers = [f"model.layers.{number}.mlp.gate" for number in range(28)]
    config = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head", *routers]}
    path = served(tmp_path, config, "qwen3")
    code, answer = asked(capsys, str(run), "--rollout", path, "--for", "vllm")
    assert code == 1
    different = [row for row in answer["rows"] if row["verdict"] == "differs"]
    assert [(row["subject"], row["modules"]) for row in different] == [("mlp.linear_fc1", 56)]
    assert (different[0]["training"], different[0]["rollout"]) == ("MXFP8", "bf16")
    assert any("7918" in note for note in answer["notes"])
    path = served(tmp_path, {**config, "ignore": ["lm_head"]}, "qwen3")
    code, answer = asked(capsys, str(run), "--rollout", path, "--for", "vllm")
    assert code == 0
    assert verdicts(answer)["mlp.linear_fc1"] == {"equal"}


def test_lists_that_engines_read_differently_cannot_be_known_without_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(OWN.replace("bf16_with_mxfp8_mixed", "bf16_with_fp8_subchannel_scaling_mixed"))
    path = served(tmp_path, {**BLOCKS, "modules_to_not_convert": ["self_attn"]}, "qwen3")
    code, answer = asked(capsys, str(run), "--rollout", path)
    assert code == 0
    assert verdicts(answer)[ATTENTION] == {"cannot be known"}
    code, answer = asked(capsys, str(run), "--rollout", path, "--for", "sglang")
    assert code == 1
    code, answer = asked(capsys, str(run), "--rollout", path, "--for", "vllm")
    assert verdicts(answer)[ATTENTION] == {"equal"}


def test_flags_of_vllm_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(OWN.replace("bf16_with_mxfp8_mixed", "bf16_mixed"))
    flags = "vllm serve Qwen/Qwen3-1.7B --dtype bfloat16 --quantization fp8 --kv-cache-dtype=fp8"
    code, answer = asked(capsys, str(run), "--rollout", flags, "--model-type", "qwen3")
    assert code == 1
    found = verdicts(answer)
    assert found[ATTENTION] == found["keys and values (cache)"] == {"differs"}
    assert found["output_layer"] == {"equal"}
    tensors = [row["rollout"] for row in answer["rows"]]
    code, answer = asked(capsys, str(run), "--rollout", flags.replace(" fp8 ", " fp8_per_tensor "))
    assert [row["rollout"] for row in answer["rows"]] == tensors
    code, answer = asked(capsys, str(run), "--rollout", flags.replace(" fp8 ", " fp8_per_block "))
    assert "FP8, weights in 128x128 blocks, inputs in 1x128" in [row["rollout"] for row in answer["rows"]]
    online = "python -m sglang.launch_server --quantization fp8"
    code, answer = asked(capsys, str(run), "--rollout", online, "--model-type", "qwen3")
    assert code == 0
    assert verdicts(answer)[ATTENTION] == {"cannot be known"}


def test_nvfp4_without_sizes_is_one_scheme_and_needs_the_sizes_for_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {gated_linear_unit: true}\nmixed_precision: bf16_with_nvfp4_mixed\n")
    config = served(tmp_path, None)
    code, answer = asked(capsys, str(path), "--rollout", config)
    (agreement,) = answer["agreeing"]
    assert (code, agreement["quantization_config"]) == (1, None)
    assert agreement["why_not"] == (
        "A quantization_config for NVFP4 lists the modules of the model, which are not known without its sizes. "
        "State them, for example model.num_layers=VALUE."
    )
    sizes = ["num_layers=4", "hidden_size=512", "ffn_hidden_size=1024", "num_attention_heads=4", "vocab_size=1024"]
    code, answer = asked(capsys, str(path), "--rollout", config, *(f"model.{size}" for size in sizes))
    (agreement,) = answer["agreeing"]
    assert (code, agreement["why_not"]) == (1, "")
    assert agreement["quantization_config"]["format"] == "nvfp4-pack-quantized"


def test_a_run_without_a_rollout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(OWN)
    assert main(["manifest", str(run), "--rollout"]) == 2
    assert "is no run of NeMo-RL, verl, slime or miles" in capsys.readouterr().err
    assert main(["manifest", str(run), "--rollout", "serve --quantization fp8"]) == 2
    assert "--rollout: must name the engine of its flags" in capsys.readouterr().err
    assert main(["manifest", str(run), "--rollout", "--out", "x.json"]) == 2
    assert "--out: is no option of the comparison" in capsys.readouterr().err


def test_the_table_names_the_differences_and_what_would_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = nemo(tmp_path, "policy.megatron_cfg.fp8_cfg.enabled=false")
    assert main(["manifest", path, "--rollout", "--model-type", "llama"]) == 1
    out = capsys.readouterr().out
    assert "Training and rollout differ." in out
    assert "mlp.linear_fc2 (all layers): training has bf16; rollout FP8, weights in" in out
    assert "A rollout that agrees:\n  ++policy.generation.vllm_cfg.precision=bfloat16\n" in out
