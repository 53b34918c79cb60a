"""Megatron-LM's files: arguments that become the fields of the configs, and what it sets at start."""

import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from bridge.cli.main import main
from bridge.errors import RunConfigError
from bridge.front.loader import load_run
from bridge.precision.mode import get_mode
from bridge.preflight.rule_check import check, get_report
from bridge.preflight.run import Run

SCRIPT = """
HIDDEN=2048
export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size $HIDDEN --num-attention-heads=16 \\
    --group-query-attention --num-query-groups 4 --seq-length 4096 --max-position-embeddings 4096 --swiglu \\
    --disable-bias-linear --num-experts 8 --moe-router-topk 2 --pipeline-model-parallel-size 4 \\
    --num-layers-per-virtual-pipeline-stage 2 --tensor-model-parallel-size 2 --sequence-parallel \\
    --micro-batch-size 1 --global-batch-size 64 --use-distributed-optimizer --overlap-grad-reduce \\
    --lr 1e-4 --bf16 --fp8-format hybrid --fp8-recipe tensorwise --recompute-granularity selective \\
    --recompute-modules moe_act mlp --rotary-base $BASE
"""
ARGUMENTS = (
    "--num-layers: 4\n  --hidden-size: 64\n  --num-attention-heads: 4\n  --micro-batch-size: 1\n  --seq-length: 64"
)


def read(tmp_path: Path, text: str, name: str = "model_config.yaml", words: tuple[str, ...] = ()) -> Run:
    """Return the run of a file."""
    (tmp_path / name).write_text(text)
    return load_run(words, config_file=tmp_path / name)


def of_arguments(tmp_path: Path, *more: str, words: tuple[str, ...] = ()) -> Run:
    """Return the run of an argument file with further arguments."""
    given = [*more] if any("bf16" in argument for argument in more) else ["--bf16: true", *more]
    return read(tmp_path, "\n  ".join(["MODEL_ARGS:", ARGUMENTS, *given]) + "\n", words=words)


def test_a_launch_script_becomes_the_fields_of_the_configs(tmp_path):
    run = read(tmp_path, SCRIPT, "train.sh", ("model.num_layers=48",))
    expected = {"num_layers": 48, "hidden_size": 2048, "num_query_groups": 4, "gated_linear_unit": True}
    expected |= {"activation_func": "silu", "add_bias_linear": False, "num_moe_experts": 8, "sequence_parallel": True}
    expected |= {"virtual_pipeline_model_parallel_size": 6, "position_embedding_type": "learned_absolute"}
    expected |= {"recompute_modules": ["moe_act", "mlp"], "bf16": True, "params_dtype": "bf16", "fp8": "hybrid"}
    assert run.model.items() >= (expected | {"fp8_recipe": "tensorwise", "ffn_hidden_size": 5440}).items()
    expected = {"lr": 1e-4, "use_distributed_optimizer": True, "bf16": True, "fp8_recipe": "tensorwise"}
    assert run.section("optimizer").items() >= expected.items()
    expected = {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
    assert run.section("ddp").items() >= expected.items()
    assert run.section("train") == {"micro_batch_size": 1, "global_batch_size": 64}
    assert run.precision is None
    assert run.reading.environment == {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    assert run.reading.uncertainty.open_points == (
        "model.rotary_base: the value $BASE is decided when the run starts; the default counts here.",
        "model.vocab_size: the tokenizer decides it. Add model.vocab_size=VALUE.",
        "The number of GPUs: the run has 8, and no target states it. Add --target h100x8, for example.",
    )


def test_one_chunk_on_each_stage_is_no_interleaved_pipeline(tmp_path):
    stages = ("--pipeline-model-parallel-size: 2", "--num-layers-per-virtual-pipeline-stage: 2")
    assert of_arguments(tmp_path, *stages).model.get("virtual_pipeline_model_parallel_size") is None


def test_an_argument_file_keeps_who_set_a_value(tmp_path):
    run = of_arguments(tmp_path, "--bf16: true", "--fp8-format: e4m3", words=("model.num_layers=8",))
    assert run.origin_of("model.fp8") == "model_config.yaml"
    assert run.origin_of("model.num_layers") == "command line"
    assert run.origin_of("ddp.grad_reduce_in_fp32") == "Megatron-LM at start"
    assert "Megatron-LM sets at start: ddp.grad_reduce_in_fp32=True (bf16)." in run.reading.lines


@pytest.mark.parametrize(
    ("argument", "section", "expected"),
    [
        ("--no-rope-fusion: true", "model", {"apply_rope_fusion": False}),
        ("--no-gradient-accumulation-fusion: true", "model", {"gradient_accumulation_fusion": False}),
        ("--swiglu: true", "model", {"ffn_hidden_size": 128, "bias_activation_fusion": True}),
        ("--sequence-parallel: true", "model", {"sequence_parallel": False}),
        ("--disable-bias-linear: true", "model", {"add_bias_linear": False, "bias_activation_fusion": None}),
        ("--untie-embeddings-and-output-weights: true", "model", {"share_embeddings_and_output_weights": False}),
        ("--multi-latent-attention: true", "model", {"kv_lora_rank": 32, "q_lora_rank": None}),
        ("--decoder-first-pipeline-num-layers: 1", "model", {"num_layers_in_first_pipeline_stage": 1}),
        ("--transformer-impl: local", "model", {"attention_softmax_in_fp32": False}),
        ("--hybrid-layer-pattern: M*-M", "model", {"num_layers": 4, "is_hybrid_model": True}),
        ("--fp8-param-gather: true", "model", {"fp8_param": True}),
        ("--fp8-param-gather: true", "ddp", {"fp8_param_gather": True}),
        ("--grad-reduce-in-bf16: true", "ddp", {"grad_reduce_in_fp32": False}),
        ("--accumulate-allreduce-grads-in-fp32: false", "ddp", {"grad_reduce_in_fp32": True}),
        ("--ddp-bucket-size: 1000", "ddp", {"bucket_size": 1000}),
        ("--use-megatron-fsdp: true", "optimizer", {"use_distributed_optimizer": True}),
        ("--no-check-for-nan-in-loss-and-grad: true", "ddp", {"check_for_nan_in_grad": False}),
        ("--exp-avg-dtype: bf16", "optimizer", {"exp_avg_dtype": "bf16"}),
    ],
)
def test_an_argument_becomes_the_field_that_megatron_lm_gives_it(tmp_path, argument, section, expected):
    held = of_arguments(tmp_path, "--bf16: true", argument).section(section)
    assert {name: held.get(name) for name in expected} == expected


def test_the_scope_of_cuda_graphs_has_the_name_that_every_release_knows(tmp_path):
    run = of_arguments(tmp_path, "--bf16: true", "--cuda-graph-scope: attn", words=("target=mcore0.17.1",))
    assert run.model["cuda_graph_scope"] == ["attn"]
    assert run.prediction.absent["model"] == {}


def test_an_override_closes_what_the_file_leaves_open(tmp_path):
    run = of_arguments(
        tmp_path, "--rotary-base: ${BASE}", words=("model.rotary_base=10", "model.vocab_size=8", "target=h100x8")
    )
    assert run.reading.uncertainty.open_points == (
        "The program: the file does not name it; pretrain_gpt.py is assumed.",
    )


def test_inference_has_no_optimizer_and_no_gradients(tmp_path):
    run = read(tmp_path, f"MODE: inference\nMODEL_ARGS:\n  {ARGUMENTS}\n  --bf16: true\n  --fp8-param-gather: true\n")
    assert (run.section("optimizer"), run.section("ddp")) == ({}, {})
    (sentence,) = (one for one in run.reading.uncertainty.open_points if one.startswith("The run trains nothing"))
    assert "it has no optimizer and no gradients" in sentence
    assert check(run).context.gradient_flow is None


def test_members_of_enums_are_printed_in_two_ways(tmp_path):
    lines = [
        "num_layers ... 2",
        "hidden_size ... 64",
        "num_attention_heads ... 4",
        "bf16 ... True",
        "attention_backend ... AttnBackend.flash",
    ]
    lines += ["cuda_graph_modules ... [<CudaGraphModule.attn: 1>, <CudaGraphModule.moe_router: 4>]"]
    text = "\n".join(["---------- arguments ----------", *lines, "---------- end of arguments ----------"])
    model = read(tmp_path, text, "train.log").model
    assert (model["attention_backend"], model["cuda_graph_modules"]) == ("flash", ["attn", "moe_router"])


def test_a_cut_log_shows_a_language_model_with_the_defaults_of_others(tmp_path):
    lines = ["num_layers ... 2", "hidden_size ... 64", "num_attention_heads ... 4", "bf16 ... True", "img_h ... 224"]
    text = "\n".join(["---------- arguments ----------", *lines])
    assert read(tmp_path, text, "train.log").model["num_layers"] == 2


def test_the_newest_iteration_of_a_checkpoint_is_read(tmp_path):
    for iteration, layers in ((10, 2), (20, 4)):
        folder = tmp_path / f"iter_{iteration:07d}"
        folder.mkdir()
        arguments = Namespace(
            num_layers=layers, hidden_size=64, num_attention_heads=4, bf16=True, padded_vocab_size=512
        )
        torch.save({"args": arguments, "iteration": iteration}, folder / "common.pt")
    run = load_run((), config_file=tmp_path)
    assert (run.model["num_layers"], run.model["vocab_size"], run.model["bf16"]) == (4, 512, True)


def test_the_newest_release_is_assumed_where_the_file_names_none(tmp_path):
    reading = of_arguments(tmp_path).reading
    assert str(reading.release.version) == "0.20"
    assert reading.release.reason == "assumed: no release is read from the file, and this is the newest known one"


DEEPSPEED = """
cat > ds.json <<EOF
{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}
EOF
deepspeed pretrain_gpt.py --deepspeed --deepspeed_config ds.json --num-layers 4 --hidden-size 64 \\
    --num-attention-heads 4 --micro-batch-size 1 --bf16
"""


def test_under_deepspeed_its_engine_decides_about_the_precision(tmp_path):
    assert get_mode(read(tmp_path, DEEPSPEED, "train.sh").precision) == "bf16"


def test_a_job_of_ray_has_the_environment_of_its_cluster(tmp_path):
    start = (
        "export NVTE_FUSED_ATTN=0\n{}python train.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --bf16\n"
    )
    assert read(tmp_path, start.format(""), "train.sh").reading.environment == {"NVTE_FUSED_ATTN": "0"}
    reading = read(tmp_path, start.format("ray job submit -- "), "train.sh").reading
    assert reading.environment == {}
    assert reading.uncertainty.open_points[0] == (
        "train.py: a program whose own defaults are not known; those of Megatron-LM are assumed here."
    )


JOB = "-- python train.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --bf16\n"
VARIABLES = '{"env_vars": {"NVTE_FUSED_ATTN": "0", "NVTE_FLASH_ATTN": 1, "HOME": "$HOME"}}'


@pytest.mark.parametrize(
    "option",
    [
        f"--runtime-env-json='{VARIABLES.replace('$HOME', '/x')}'",
        f"--no-wait --runtime-env-json '{VARIABLES}'",
        '--runtime-env-json="$JOB_ENV"',
    ],
)
def test_the_variables_that_a_job_of_ray_is_given_are_those_of_the_run(tmp_path, option):
    quoted = VARIABLES.replace('"', '\\"').replace("$HOME", "$HERE/x")
    here = 'HERE="$(cd "$(dirname "$0")" && pwd)"'
    text = f'export NVTE_DEBUG=1\n{here}\nJOB_ENV="{quoted}"\nray job submit {option} {JOB}'
    environment = read(tmp_path, text, "train.sh").reading.environment
    assert {name: value for name, value in environment.items() if name != "HOME"} == {
        "NVTE_FUSED_ATTN": "0",
        "NVTE_FLASH_ATTN": "1",
    }


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--runtime-env-json=$(python env.py)", "--runtime-env-json"),
        ("--runtime-env env.yaml", "--runtime-env env.yaml"),
        ("--runtime-env-json='[1]'", "--runtime-env-json"),
    ],
)
def test_the_variables_of_a_job_that_cannot_be_read_are_named(tmp_path, option, named):
    reading = read(tmp_path, f"ray job submit {option} {JOB}", "train.sh").reading
    assert reading.environment == {}
    assert f"{named}: it may set variables of the run, and could not be read." in reading.uncertainty.open_points


def test_a_program_of_megatron_lm_without_bf16_is_a_run_in_fp32(tmp_path):
    run = read(tmp_path, SCRIPT.replace("--bf16 --fp8-format hybrid --fp8-recipe tensorwise", ""), "train.sh")
    assert run.reading.uncertainty.mode_decider is None
    assert not {"bf16", "fp16", "params_dtype"} & run.model.keys()
    assert "grad_reduce_in_fp32" not in run.section("ddp")


def test_a_file_that_leaves_a_size_open_names_it(tmp_path):
    with pytest.raises(RunConfigError, match=r"does not state model\.num_layers, .* Add model\.num_layers=VALUE\.$"):
        read(tmp_path, SCRIPT.replace("--num-layers 24", "--num-layers $1"), "train.sh")


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("MODEL_ARGS:\n", "a.yaml", "MODEL_ARGS: must be a mapping of arguments to their values, got None"),
        (f"MODEL_ARGS:\n  {ARGUMENTS}\n  --img-h: 336\n", "a.yaml", "describes a vision model, whose layers"),
        (
            "python pretrain_bert.py --num-layers 2 --hidden-size 8\n",
            "a.sh",
            "describes BERT, .* got 'pretrain_bert.py'",
        ),
        (
            "python tasks/main.py --task RET-FINETUNE-NQ --num-layers 2 --hidden-size 8 --fp16\n",
            "a.sh",
            "describes a retriever, .* got '--task RET-FINETUNE-NQ'",
        ),
        ("python tasks/main.py --task MNLI --num-layers 2 --hidden-size 8 --fp16\n", "a.sh", "describes BERT"),
        ("python train.py --config x.yaml\n", "a.sh", "must start a run of Megatron-LM, got 'train.py'"),
        (
            'all() { "$@"; }\nexport NAME=x\nall uv run bash ./b.sh\nexec "$DIR/c.sh" "$@"\n',
            "a.sh",
            r"got 'no program' and the start of other scripts, \./b\.sh, \$DIR/c\.sh\. Give the script of the run",
        ),
    ],
)
def test_a_file_without_a_language_model_is_refused_with_its_reason(tmp_path, text, name, message):
    with pytest.raises(RunConfigError, match=message):
        read(tmp_path, text, name)


def test_a_program_of_megatron_bridge_next_to_its_script_is_none_of_megatron_lm(tmp_path):
    script = (
        "torchrun ${HERE}/mine.py --micro-batch-size 1 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --bf16\n"
    )
    (tmp_path / "mine.py").write_text("from megatron.bridge.training.config import ConfigContainer\n")
    with pytest.raises(RunConfigError, match=r"starts mine\.py, a program of Megatron Bridge with options of its own"):
        read(tmp_path, script, "run.sh")
    (tmp_path / "mine.py").write_text("from megatron.training import pretrain\n")
    assert read(tmp_path, script, "run.sh").section("train")["micro_batch_size"] == 1


def test_a_misspelt_argument_is_named_with_the_one_that_was_meant(tmp_path):
    found = of_arguments(tmp_path, "--fp8-formt: hybrid", "--eval-global-batch-size: 4").reading.uncertainty.open_points
    assert (
        "--fp8-formt: no argument of Megatron-LM that is known, and it is not read. Did you mean --fp8-format?" in found
    )
    assert not any("eval-global-batch-size" in one for one in found)


FP4_LAUNCH = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --hidden-size 4096 --num-attention-heads 32 "
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --vocab-size 1024 "
    "--lr 1e-4 --train-iters 10 --bf16 --use-distributed-optimizer --use-precision-aware-optimizer --fp4-format e2m1 "
    "--fp4-param-gather"
)


def test_fp4_weights_need_another_fp8_recipe_than_the_parsers_default(tmp_path, capsys) -> None:
    script = tmp_path / "run.sh"
    words = ["--config", str(script), "--target", "b200x8,te2.16,cuda13.0,mcore0.19"]
    script.write_text(FP4_LAUNCH, encoding="utf-8")
    assert main(["check", *words]) == 2
    shown = capsys.readouterr().out
    assert "error PB356 optimizer.fp8_recipe = 'delayed' (Megatron-LM at start)" in shown
    assert main(["check", *words, "optimizer.fp8_recipe=tensorwise"]) == 0
    script.write_text(f"{FP4_LAUNCH} --fp8-recipe tensorwise", encoding="utf-8")
    assert main(["check", *words]) == 0
    capsys.readouterr()
    assert main(["plan", *words]) == 0
    assert "master fp32 (sharded)" in capsys.readouterr().out


# -- models with other layers ------------------------------------------------------------------------------------------

OTHER_MODELS = {
    "BERT": "torchrun pretrain_bert.py --num-layers 4 --seq-length 512",
    "an encoder and a decoder": "torchrun pretrain_t5.py --encoder-num-layers 4 --decoder-num-layers 4",
    "a vision model": "torchrun pretrain_vision_classify.py --num-layers 4 --img-h 224 --img-w 224",
}
OF_ALL = (
    "--hidden-size 64 --num-attention-heads 4 --micro-batch-size 1 --fp16 --fp8-format hybrid --fp8-recipe tensorwise"
)


@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_a_model_with_other_layers_is_asked_every_rule_that_needs_none(tmp_path, kind, capsys):
    (tmp_path / "run.sh").write_text(f"{OTHER_MODELS[kind]} {OF_ALL} --tensor-model-parallel-size 3\n")
    words = ["--config", str(tmp_path / "run.sh"), "--target", "h100x8,te2.9,cuda12.9"]
    assert main(["check", *words, "--json"]) == 2
    printed = json.loads(capsys.readouterr().out)
    assert "PB406" in {one["id"] for one in printed["findings"]}
    assert re.fullmatch(
        rf"The model is {kind}: \d+ rules that read its layers were not asked \(.*PB413.*\)\.", printed["not_asked"]
    )
    assert main(["check", *words]) == 2
    assert f"  {printed['not_asked']}\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "memory", "plan --align", "plan --modules"])
def test_a_model_with_other_layers_is_refused_where_layers_are_planned(tmp_path, command, capsys):
    (tmp_path / "run.sh").write_text(f"{OTHER_MODELS['an encoder and a decoder']} {OF_ALL}\n")
    assert main([*command.split(), "--config", str(tmp_path / "run.sh")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"{tmp_path / 'run.sh'}: describes an encoder and a decoder, whose layers cannot be planned, "
        "got '--encoder-num-layers'. Give a run of a language model.\n"
    )


def test_a_language_model_is_asked_every_rule(tmp_path, capsys):
    (tmp_path / "run.sh").write_text(f"torchrun pretrain_gpt.py --num-layers 4 {OF_ALL}\n")
    main(["check", "--config", str(tmp_path / "run.sh"), "--json"])
    assert json.loads(capsys.readouterr().out)["not_asked"] is None


FOUND = "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
SIZED = f"{FOUND} --seq-length 64 --micro-batch-size 1 --vocab-size 96 --hidden-dropout 0 --attention-dropout 0 "


@pytest.mark.parametrize(("scale", "found"), [("0", []), ("0.0", []), ("-1", ["PB141"]), ("4096", [])])
def test_a_loss_scale_of_0_is_an_unset_one_to_the_parser(tmp_path, scale, found) -> None:
    run = read(tmp_path, f"{SIZED} --fp16 --loss-scale {scale}\n", "train.sh")
    assert [one.id for one in get_report(run).of("error")] == found
    assert get_report(run).context.has_dynamic_loss_scale is (float(scale) == 0)


@pytest.mark.parametrize(
    ("target", "severity"), [(None, "warning"), ("h100x8,mcore0.11.0", "error"), ("h100x8,mcore0.10.0", None)]
)
def test_the_variables_of_attention_are_judged_by_a_stated_release_alone(tmp_path, target, severity) -> None:
    (tmp_path / "train.sh").write_text(f"export NVTE_FUSED_ATTN=0\n{SIZED} --bf16\n")
    words = [f"target='{target}'"] if target is not None else []
    report = get_report(load_run(words, config_file=tmp_path / "train.sh"))
    assert [one.severity for one in report.findings if one.id == "PB528"] == ([severity] if severity else [])


SHORT = """
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 \\
    --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 8 --lr 1e-4 --bf16
"""


@pytest.mark.parametrize(
    ("release", "variable", "found"),
    [
        ("0.19.2", "CUDA_DEVICE_MAX_CONNECTIONS=1", False),
        ("0.18.2", "CUDA_DEVICE_MAX_CONNECTIONS=1", True),
        ("0.19.2", "NVTE_ALLOW_NONDETERMINISTIC_ALGO=1", True),
    ],
)
def test_megatron_lm_sets_the_variables_of_a_deterministic_run_from_0_19_on(tmp_path, release, variable, found):
    text = f"export {variable}\n{SHORT.strip()} --deterministic-mode\n"
    run = read(tmp_path, text, "run.sh", (f"target='h100x8,te2.14,cuda12.9,mcore{release}'",))
    assert ("PB523" in {one.id for one in get_report(run).findings}) is found


def test_a_script_with_both_modes_sets_both_fields(tmp_path):
    text = f"{SHORT.strip()} --deterministic-mode --batch-invariant-mode --attention-backend flash\n"
    run = read(tmp_path, text, "run.sh")
    assert (run.model["deterministic_mode"], run.model["batch_invariant_mode"]) == (True, True)
    assert "PB531" not in {one.id for one in get_report(run).findings}


def test_the_plan_follows_the_variables_of_a_script(tmp_path):
    text = f"export NVTE_BACKWARD_OVERRIDE=dequantized\n{SHORT.strip()} --fp8-format e4m3 --fp8-recipe mxfp8\n"
    plan = read(tmp_path, text, "run.sh").plan
    assert [plan.format_of(1, "linear_fc1", gemm) for gemm in ("fprop", "dgrad", "wgrad")] == ["e4m3", "bf16", "bf16"]
