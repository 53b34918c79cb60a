"""Runs of frameworks on top of Megatron Core: what they set at start, drop and leave open, by their own code."""

import base64
import json
from pathlib import Path

import pytest

from bridge.cli.main import main
from bridge.convert.conversion import import_runs
from bridge.errors import RunConfigError, UnreadFileError
from bridge.front.loader import load_run
from bridge.plan.planned_run import PlannedRun
from bridge.precision.mode import get_mode
from bridge.preflight.rule_check import check
from bridge.preflight.run import Run
from bridge.preflight.run_choice import RunChoice
from bridge.read.text.document import Document

MODEL = """\
NUM_LAYERS=4
flags=()
for ((i=0; i<NUM_LAYERS; i++)); do
  if (( i < 1 )); then flags+=(0); else flags+=(1); fi
done
printf -v FREQ "[%s]" "$(IFS=', '; echo "${flags[*]}")"
MODEL_ARGS=(--num-layers $NUM_LAYERS --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 --swiglu
   --disable-bias-linear --normalization RMSNorm --vocab-size 32000 --num-experts 8 --moe-router-topk 2
   --moe-ffn-hidden-size 512 --moe-grouped-gemm --moe-layer-freq "$FREQ")
"""
SCRIPT = """\
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/models/tiny.sh"
ROLLOUT_ARGS=(--hf-checkpoint /data/tiny --load /data/tiny_slime/ --num-rollout 10 --rollout-batch-size 8)
PERF_ARGS=(--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --use-dynamic-batch-size
   --max-tokens-per-gpu 4608)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --sglang-cuda-graph-bs 1 $(seq 2 8))
JOB="{\\"env_vars\\": {\\"PYTHONPATH\\": \\"/opt/Megatron-LM/\\"}}"
ray job submit --address=http://127.0.0.1:8265 --runtime-env-json="${JOB}" -- python3 train.py --actor-num-nodes 2 \\
   --actor-num-gpus-per-node 4 ${MODEL_ARGS[@]} ${ROLLOUT_ARGS[@]} ${PERF_ARGS[@]} ${SGLANG_ARGS[@]} MORE
"""
EXPERIMENT = """\
work_group: ${TEAM:amd}
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: ${MODEL:tiny}.yaml
    overrides:
      micro_batch_size: ${MICRO_BATCH:2}
      seq_length: 2048
      mock_data: true
      fp8: hybrid
"""


def slime(tmp_path: Path, more: str = "", words: tuple[str, ...] = ()) -> Run:
    """Return the run of a script in the style of slime."""
    (tmp_path / "models").mkdir(exist_ok=True)
    (tmp_path / "models" / "tiny.sh").write_text(MODEL)
    (tmp_path / "run.sh").write_text(SCRIPT.replace("MORE", more))
    return load_run(words, config_file=tmp_path / "run.sh")


def miles(tmp_path: Path, more: str) -> Run:
    """Return the run of a script in the style of miles, which differs in a path alone."""
    (tmp_path / "models").mkdir(exist_ok=True)
    (tmp_path / "models" / "tiny.sh").write_text(MODEL)
    (tmp_path / "run.sh").write_text(SCRIPT.replace("tiny_slime", "tiny_miles").replace("MORE", more))
    return load_run(config_file=tmp_path / "run.sh")


def primus(tmp_path: Path, *overrides: str, module: str = "", words: tuple[str, ...] = ()) -> Run:
    """Return the run of an experiment in the style of Primus, in a clone with a module file and a model file."""
    modules, models = (tmp_path / "primus" / "configs" / kind / "megatron" for kind in ("modules", "models"))
    for folder in (modules, models):
        folder.mkdir(parents=True, exist_ok=True)
    (modules / "base.yaml").write_text(
        "bf16: true\nfp8: null\nfp8_recipe: delayed\nuse_distributed_optimizer: false\nmicro_batch_size: 4\n"
        f"accumulate_allreduce_grads_in_fp32: false\n{module}"
    )
    (modules / "pre_trainer.yaml").write_text("extends: [base.yaml]\nuse_distributed_optimizer: true\n")
    (models / "tiny.yaml").write_text(
        "num_layers: 2\nhidden_size: 256\nffn_hidden_size: 512\nnum_attention_heads: 4\nswiglu: true\n"
        "add_bias_linear: false\nposition_embedding_type: rope\nbf16: false\n"
    )
    (tmp_path / "exp.yaml").write_text(EXPERIMENT + "".join(f"      {line}\n" for line in overrides))
    return load_run(words, config_file=tmp_path / "exp.yaml")


def formats_of_experts(run: Run) -> set[str]:
    """Return the formats of the experts' forward GEMMs."""
    found = set()
    for row in run.plan.rows():
        if row["module"].startswith("experts.") and row["item"] == "fprop":
            found.add(row["format"])
    return found


def test_slime_trains_in_bf16_with_the_distributed_optimizer(tmp_path: Path) -> None:
    run = slime(tmp_path)
    assert run.reading.framework == "slime"
    assert run.model["bf16"] is True
    assert (
        run.section("optimizer")["use_distributed_optimizer"] is run.section("ddp")["use_distributed_optimizer"] is True
    )
    assert run.section("ddp")["grad_reduce_in_fp32"] is True  # Megatron-LM's checks come after
    assert run.origin_of("model.bf16") == run.origin_of("ddp.use_distributed_optimizer") == "slime at start"
    assert run.origin_of("ddp.grad_reduce_in_fp32") == "Megatron-LM at start"
    assert run.origin_of("model.hidden_size") == "run.sh"
    sources = {one.path: one.source for one in run.reading.derived}
    assert "slime/backends/megatron_utils/arguments.py" in sources["model.bf16"]
    assert "624b824a" in sources["model.bf16"]
    assert not run.has_any_decider


def test_slime_packs_samples_and_keeps_generation_apart(tmp_path: Path) -> None:
    run = slime(tmp_path)
    assert run.model["seq_length"] == 4608 * 2
    assert run.section("train")["micro_batch_size"] == 1
    assert run.model.items() >= {"moe_token_dispatcher_type": "alltoall", "variable_seq_lengths": True}.items()
    assert run.reading.generation["--sglang-mem-fraction-static"] == "0.7"
    assert "Counted here: model.seq_length=9216 (the tokens of a full micro batch" in " ".join(run.reading.lines)
    assert "Add --target h100x8" in " ".join(run.reading.lines)
    assert run.model["moe_layer_freq"] == "[0,1,1,1]"
    assert run.plan.shape.experts is not None


def test_a_loop_counts_to_the_default_of_a_variable(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(MODEL.replace("NUM_LAYERS=4", 'NUM_LAYERS="${LAYERS:-3}"'))
    (tmp_path / "run.sh").write_text(SCRIPT.replace("MORE", ""))
    run = load_run(config_file=tmp_path / "run.sh")
    assert (run.model["num_layers"], run.model["moe_layer_freq"]) == (3, "[0,1,1]")


def test_a_sourced_file_sources_the_file_next_to_itself(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "base.sh").write_text(MODEL)
    (tmp_path / "models" / "tiny.sh").write_text('source "$(dirname -- "${BASH_SOURCE[0]}")/base.sh"\n')
    (tmp_path / "run.sh").write_text(SCRIPT.replace("MORE", ""))
    run = load_run(config_file=tmp_path / "run.sh")
    assert run.model["num_layers"] == 4
    assert run.reading.uncertainty.mode_decider is None


def test_a_sourced_file_that_is_not_there_may_state_the_mode(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(f'source "${{ROOT}}/gone.sh"\n{MODEL}')
    (tmp_path / "run.sh").write_text(SCRIPT.replace("MORE", ""))
    run = load_run(config_file=tmp_path / "run.sh", strict=False)
    assert str(run.reading.uncertainty.mode_decider).endswith("gone.sh, which the script sources,")


def test_fp16_is_fp16_for_slime_too(tmp_path: Path) -> None:
    run = slime(tmp_path, "--fp16")
    assert run.model["fp16"] is True
    assert run.model.get("bf16") in (None, False)


def test_lengths_of_samples_that_no_file_states_are_open(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(MODEL)
    (tmp_path / "run.sh").write_text(SCRIPT.replace("--use-dynamic-batch-size", "").replace("MORE", ""))
    run = load_run(config_file=tmp_path / "run.sh")
    assert "the lengths of the samples" in run.reading.uncertainty.unread_options
    assert run.origin_of("model.seq_length") == "open"


def test_the_note_on_lengths_of_samples_names_the_length_that_memory_counts(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(MODEL)
    (tmp_path / "run.sh").write_text(SCRIPT.replace("--use-dynamic-batch-size", "").replace("MORE", ""))
    counted = {}
    for length in (4096, 8192):
        run = load_run(config_file=tmp_path / "run.sh", overrides=(f"model.seq_length={length}",))
        assert (
            "The files do not state the lengths of the samples: activations are counted for model.seq_length tokens "
            "a sample. Add model.seq_length=VALUE to count another length."
        ) in run.reading.uncertainty.open_points
        memory = PlannedRun(prediction=run.prediction).memory
        counted[length] = memory.largest.bytes_of["activations"]
    assert 0 < counted[4096] < counted[8192]


def test_slime_gives_its_processes_a_variable_that_blackwell_refuses(tmp_path: Path) -> None:
    words = "--transformer-impl transformer_engine --fp8-format e4m3 --fp8-recipe blockwise"
    on_blackwell = check(slime(tmp_path, words, ("target=b200x8",)))
    assert [one.id for one in on_blackwell.findings if one.path.startswith("environment.")] == ["PB521"]
    variables = '--train-env-vars \'{"NVTE_FP8_BLOCK_SCALING_FP32_SCALES":"0"}\''
    stated = check(slime(tmp_path, f"{words} {variables}", ("target=b200x8",)))
    assert not [one for one in stated.findings if one.path.startswith("environment.")]


def test_miles_asks_the_gpu_for_that_variable(tmp_path: Path) -> None:
    run = miles(tmp_path, "--fp8-format e4m3 --fp8-recipe blockwise")
    assert "NVTE_FP8_BLOCK_SCALING_FP32_SCALES" not in run.reading.environment  # no target: not known
    on_hopper = load_run(("target=h100x8",), config_file=tmp_path / "run.sh")
    assert on_hopper.reading.environment["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] == "1"
    on_blackwell = load_run(("target=b200x8",), config_file=tmp_path / "run.sh")
    assert "NVTE_FP8_BLOCK_SCALING_FP32_SCALES" not in on_blackwell.reading.environment


@pytest.mark.parametrize(("optimizer", "is_sharded"), [("adam", True), ("muon", False)])
def test_miles_shards_the_optimizer_of_adam_alone(tmp_path: Path, optimizer: str, is_sharded: bool) -> None:
    run = miles(tmp_path, f"--optimizer {optimizer}")
    assert run.reading.framework == "miles"
    assert bool(run.section("ddp").get("use_distributed_optimizer")) is is_sharded


def test_miles_forwards_few_arguments_onto_a_model_of_megatron_bridge(tmp_path: Path) -> None:
    words = "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 4 --first-last-layers-bf16"
    forwarded = miles(tmp_path, words)
    assert forwarded.model["fp8_amax_history_len"] == 4
    dropped = miles(tmp_path, f"{words} --megatron-to-hf-mode bridge")
    assert dropped.model["fp8"] == "hybrid"
    assert not {"fp8_amax_history_len", "first_last_layers_bf16"} & dropped.model.keys()
    found = {one.path: one for one in check(dropped).findings if one.id == "PB801"}
    assert found.keys() == {"--fp8-amax-history-len", "--first-last-layers-bf16"}
    assert "miles does not forward it" in found["--fp8-amax-history-len"].rule
    assert "model_provider.py" in found["--fp8-amax-history-len"].rule
    assert not [one for one in check(forwarded).findings if one.id == "PB801"]


def test_the_mlp_of_a_model_of_megatron_bridge_is_that_of_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    miles(tmp_path, "--megatron-to-hf-mode bridge")
    for word, is_assumed in (("--swiglu", False), ("", True)):
        (tmp_path / "models" / "tiny.sh").write_text(MODEL.replace("--swiglu", word))
        assert main(["memory", str(tmp_path / "run.sh"), "--json"]) == 0
        assumed = json.loads(capsys.readouterr().out)["rests_on_unknown"]
        assert ("model.gated_linear_unit" in assumed) is is_assumed


def test_defaults_of_the_parser_are_assumed_of_a_model_of_megatron_bridge(tmp_path: Path) -> None:
    def parser_sentences(words: str) -> list[str]:
        lines = miles(tmp_path, words).reading.lines
        return [line for line in lines if "Megatron-LM sets" in line and "bias_activation_fusion" in line]

    (sentence,) = parser_sentences("--megatron-to-hf-mode raw")
    assert sentence.startswith("Megatron-LM sets at start:")
    (sentence,) = parser_sentences("--megatron-to-hf-mode bridge")
    assert sentence.startswith("Assumed, as Megatron-LM sets it at start:")
    assert "check_for_nan_in_grad" not in sentence


@pytest.mark.parametrize(
    ("words", "shares"),
    [
        ("--use-fault-tolerance --ft-components train", False),
        ("--indep-dp", False),
        ("--use-fault-tolerance --ft-components rollout", True),
        ("--ft-components train", True),
    ],
)
def test_replicas_of_miles_that_share_no_optimizer_are_named(tmp_path: Path, words: str, shares: bool) -> None:
    uncertainty = miles(tmp_path, words).reading.uncertainty
    sentences = [point for point in uncertainty.open_points if "shares no optimizer state" in point]
    assert bool(sentences) is not shares
    assert ("optimizer.use_distributed_optimizer" in uncertainty.unread_sources) is not shares


def test_a_recipe_for_modules_may_stand_in_its_option(tmp_path: Path) -> None:
    text = (
        "configs: {bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}}\n"
        "matchers: {proj: {type: glob, enabled: true, pattern: '*.linear_proj', config: bf16}}\n"
    )
    inline = base64.b64encode(text.encode()).decode()
    run = miles(tmp_path, f"--te-precision-config-file base64:{inline} --fp8-format hybrid --fp8-recipe tensorwise")
    assert run.model["quant_recipe"]["matchers"]["proj"]["pattern"] == "*.linear_proj"
    assert "--te-precision-config-file: read from the text behind base64:." in run.reading.notes
    with pytest.raises(RunConfigError, match="--te-precision-config-file: "):
        miles(tmp_path, "--te-precision-config-file base64:*")


def test_a_run_that_trains_without_megatron_core_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunConfigError, match="--train-backend fsdp: trains on PyTorch's FSDP, without Megatron Core"):
        miles(tmp_path, "--train-backend fsdp")


def test_the_refusal_of_a_run_offers_the_run_of_the_file_that_trains(tmp_path: Path) -> None:
    launch = SCRIPT[SCRIPT.index("ray job submit") :]
    generation = launch.replace("MORE", "--debug-rollout-only")
    with pytest.raises(RunConfigError, match="trains nothing") as raised:
        slime(tmp_path, f"--debug-rollout-only\n{launch.replace('MORE', '')}{generation}")
    (note,) = raised.value.__notes__
    assert note.startswith("The file has 3 runs; this is run 1,")
    assert "--launch 2 is" in note
    assert "--launch 3" not in note
    run = load_run(config_file=tmp_path / "run.sh", choice=RunChoice(number=2))
    assert run.model["bf16"] is True


def test_a_branch_that_trains_without_megatron_core_is_not_offered(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(MODEL)
    condition = 'if [ "$BACKEND" = fsdp ]; then MORE="--train-backend fsdp --bf16"; fi\n'
    script = SCRIPT.replace("tiny_slime", "tiny_miles").replace("MORE", "${MORE}")
    (tmp_path / "run.sh").write_text(condition + script)
    run = load_run(config_file=tmp_path / "run.sh", choice=RunChoice(variables={"MORE": ""}))
    assert len(run.reading.launches.labels) == 2
    assert run.reading.launches.branches == ()
    (sentence,) = run.reading.launches.sentences
    assert "run 2 trains nothing on Megatron Core: " in sentence
    assert "--launch" not in sentence


def test_a_command_that_ends_before_its_arguments_is_refused_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(MODEL)
    script = SCRIPT.replace("MORE", "").replace("--actor-num-gpus-per-node 4 ", "--actor-num-gpus-per-node 4\n   ")
    (tmp_path / "run.sh").write_text(script)
    line = script.splitlines().index("   --actor-num-gpus-per-node 4") + 2
    with pytest.raises(RunConfigError) as raised:
        load_run(config_file=tmp_path / "run.sh")
    assert str(raised.value).endswith(
        f"must hold arguments of Megatron-LM's training, and ends before line {line}, whose options belong to no "
        "command. End the line before it with a backslash, and nothing behind that."
    )


def test_a_launch_that_may_be_either_is_read_as_what_both_set(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(MODEL)
    (tmp_path / "run.sh").write_text(
        SCRIPT.replace("/data/tiny_slime/", "/data/tiny").replace("MORE", "--optimizer muon")
    )
    run = load_run(config_file=tmp_path / "run.sh")
    assert run.reading.framework == "slime or miles"
    assert run.model["bf16"] is True
    assert "use_distributed_optimizer" not in run.section("ddp")  # slime sets it, and miles does not


def test_an_option_that_nobody_knows_is_dropped_by_slime_and_said_so(tmp_path: Path) -> None:
    run = slime(tmp_path, "--ffn-hidden-sise 4096 --rollout-seed 3")
    (finding,) = [one for one in check(run).findings if one.id == "PB801"]
    assert finding.path == "--ffn-hidden-sise"
    assert "slime's parser drops arguments that it does not know" in finding.rule
    assert run.model["ffn_hidden_size"] == 2816


def test_miles_counts_as_the_release_that_its_branch_of_megatron_stands_on(tmp_path: Path) -> None:
    for run in (miles(tmp_path, ""), slime(tmp_path)):
        release = run.reading.release
        assert release is not None
        assert str(release.version) == "0.16.1"
        assert "Megatron-LM 1dcf0daf of 2026-02-14" in release.reason


def test_gated_attention_of_slime_is_an_option_that_no_code_reads(tmp_path: Path) -> None:
    run = slime(tmp_path, "--use-gated-attention")
    assert not [one for one in check(run).findings if one.id == "PB801"]
    assert run.reading.uncertainty.no_plan_reason is None
    assert not [line for line in run.reading.lines if "gated" in line]


@pytest.mark.parametrize("option", ["--post-self-attn-layernorm", "--post-mlp-layernorm"])
def test_an_option_of_slimes_own_megatron_is_known_and_not_planned(tmp_path: Path, option: str) -> None:
    run = slime(tmp_path, option)
    assert not [one for one in check(run).findings if one.id == "PB801"]
    reason = run.reading.uncertainty.no_plan_reason
    assert reason is not None
    assert reason.startswith(f"{option}: slime's patch of Megatron-LM adds it to each layer")


def test_int4_weights_of_slime_are_not_planned(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(MODEL)
    script = SCRIPT.replace('\\"PYTHONPATH\\"', '\\"OPEN_TRAINING_INT4_FAKE_QAT_FLAG\\": \\"1\\", \\"PYTHONPATH\\"')
    (tmp_path / "run.sh").write_text(script.replace("MORE", ""))
    run = load_run(config_file=tmp_path / "run.sh")
    assert run.reading.uncertainty.no_plan_reason is not None
    assert run.reading.uncertainty.no_plan_reason.startswith("OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1")
    with pytest.raises(RunConfigError, match="rounds the weights of experts to INT4"):
        _ = run.plan


def test_convert_knows_the_mode_of_slime_too(tmp_path: Path) -> None:
    slime(tmp_path)
    (run,) = import_runs(Document.load(tmp_path / "run.sh"))
    assert get_mode(run.imported.config) == "bf16"
    assert run.imported.decided_by is None


@pytest.mark.parametrize(
    ("before", "name"), [("", "tiny"), ('MODEL_TYPE="tiny"\n', "${MODEL_TYPE}"), ("MODEL_TYPE=tiny\n", "$MODEL_TYPE")]
)
def test_model_arguments_of_a_clone_of_miles_are_read_and_not_run(tmp_path: Path, before: str, name: str) -> None:
    (tmp_path / "miles" / "backends" / "megatron_utils").mkdir(parents=True)
    (tmp_path / "scripts" / "models").mkdir(parents=True)
    (tmp_path / "scripts" / "models" / "tiny.py").write_text(
        "import os\nfrom model_args_utils import moe_layer_freq\nopen('ran', 'w').close\nLAYERS = 2 + 1\n\n\n"
        "def model_args(nlayers=None):\n"
        "    nlayers = nlayers if nlayers is not None else int(os.environ.get('N') or LAYERS)\n"
        "    return (f'--num-layers {nlayers} --hidden-size 512 --num-attention-heads 8 --vocab-size 1000 '\n"
        "            f'--moe-layer-freq {moe_layer_freq(nlayers=nlayers, first_k_dense_replace=1)} --num-experts 4 ')\n"
    )
    (tmp_path / "run.sh").write_text(
        f'{before}LINE="$(python3 "${{ROOT}}/miles/utils/external_utils/model_args_utils.py" "{name}")" || exit 1\n'
        'read -ra MODEL_ARGS <<< "${LINE}"\n'
        "python3 train.py --hf-checkpoint a --rollout-batch-size 8 ${MODEL_ARGS[@]} --use-dynamic-batch-size "
        "--max-tokens-per-gpu 2048\n"
    )
    run = load_run(config_file=tmp_path / "run.sh")
    assert run.reading.framework == "miles"
    assert run.model["num_layers"] == 3
    assert run.model["moe_layer_freq"] == "[0,1,1]"
    assert "MODEL_ARGS: read from scripts/models/tiny.py." in run.reading.notes
    assert not (tmp_path / "ran").exists()


def test_primus_lays_its_files_over_each_other(tmp_path: Path) -> None:
    run = primus(tmp_path)
    assert run.reading.framework == "Primus"
    assert run.model["bf16"] is True  # of the module file, over the model file
    assert run.model["fp8"] == "hybrid"
    assert run.section("train")["micro_batch_size"] == 2
    assert run.section("ddp")["use_distributed_optimizer"] is True
    assert (
        run.section("ddp")["grad_reduce_in_fp32"] is True
    )  # `false` is the parser's default, which its checks turn on
    assert run.model["vocab_size"] == 131073
    assert run.origin_of("model.fp8") == "exp.yaml"
    assert run.origin_of("model.hidden_size") == "tiny.yaml"
    assert run.origin_of("optimizer.use_distributed_optimizer") == "pre_trainer.yaml"
    assert run.origin_of("model.vocab_size") == "Primus at start"
    assert run.plan.layers


def test_a_variable_that_primus_exports_replaces_another_value(tmp_path: Path) -> None:
    run = primus(tmp_path)
    assert run.reading.environment["NVTE_ROCM_ENABLE_MXFP8"] == "1"
    assert [line for line in run.reading.lines if "NVTE_ROCM_ENABLE_MXFP8" in line] == [
        "Primus sets NVTE_ROCM_ENABLE_MXFP8=1 for its training processes, whatever else sets it "
        "(runner/helpers/envs/base_env.sh)."
    ]


def test_a_variable_of_primus_may_state_that_there_is_no_value(tmp_path: Path) -> None:
    run = primus(tmp_path, "num_virtual_stages_per_pipeline_rank: ${PRIMUS_VPP:null}")
    assert run.model.get("virtual_pipeline_model_parallel_size") is None
    assert not [finding for finding in check(run).findings if finding.severity == "error"]


PRIMUS_SCRIPT = """\
export EXP=exp.yaml
export PRIMUS_TP=2
MBS=${MBS:-3}
./primus-cli MODE -- train pretrain --config "$EXP" --data_path data --micro_batch_size "$MBS" fp8_recipe=tensorwise \
    --global_batch_size "$((NNODES * 8))" --use_distributed_optimizer
"""


def primus_script(tmp_path: Path, mode: str = "direct", *overrides: str) -> Run:
    """Return the run of a script that starts the experiment of `primus` with further settings."""
    primus(tmp_path, *overrides)
    (tmp_path / "run.sh").write_text(PRIMUS_SCRIPT.replace("MODE", mode))
    return load_run(config_file=tmp_path / "run.sh", strict=False)


def test_the_command_line_of_primus_counts_over_its_experiment(tmp_path: Path) -> None:
    run = primus_script(tmp_path, "direct", "tensor_model_parallel_size: ${PRIMUS_TP:1}")
    assert run.reading.framework == "Primus"
    assert run.model["tensor_model_parallel_size"] == 2  # a variable that the script exports
    assert run.section("train")["micro_batch_size"] == 3
    assert run.model["fp8_recipe"] == "tensorwise"
    assert run.origin_of("model.fp8_recipe").startswith("run.sh:4")
    assert run.origin_of("model.num_layers").startswith("tiny.yaml")
    assert run.find_decider("train.global_batch_size") == "the value $((NNODES * 8))"
    assert any("--config exp.yaml: read from" in line for line in run.reading.lines)


def test_a_value_with_quotes_within_a_word_of_primus_is_open(tmp_path: Path) -> None:
    primus(tmp_path)
    layout = "--pipeline_model_parallel_layout \"'Et|tL'\""
    text = PRIMUS_SCRIPT.replace("MODE", "direct").replace("fp8_recipe=tensorwise", layout)
    (tmp_path / "run.sh").write_text(text)
    run = load_run(config_file=tmp_path / "run.sh", strict=False)
    assert run.find_decider("model.pipeline_model_parallel_layout") == "the value 'Et|tL'"
    assert any("layout: the word has quotes in it" in line for line in run.reading.lines)


def test_a_container_of_primus_has_only_some_variables_of_the_script(tmp_path: Path) -> None:
    layers = ("num_layers: ${LAYERS:4}", "tensor_model_parallel_size: ${PRIMUS_TP:1}")
    primus(tmp_path, *layers)
    text = PRIMUS_SCRIPT.replace("MBS=$", "export LAYERS=6\nMBS=$")
    found = {}
    for mode in ("direct", "slurm srun -N 2"):
        (tmp_path / "run.sh").write_text(text.replace("MODE", mode))
        run = load_run(config_file=tmp_path / "run.sh", strict=False)
        found[mode] = (run.model["num_layers"], run.model["tensor_model_parallel_size"])
    assert found == {"direct": (6, 2), "slurm srun -N 2": (4, 2)}


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("EXP=exp.yaml", "EXP=$1", "which is not found from here"),
        ("EXP=exp.yaml", "EXP=other.yaml", "no experiment on Megatron-LM"),
    ],
)
def test_a_script_of_primus_without_an_experiment_that_is_read_is_refused(
    tmp_path: Path, old: str, new: str, sentence: str
) -> None:
    primus(tmp_path)
    (tmp_path / "other.yaml").write_text((tmp_path / "exp.yaml").read_text().replace("megatron", "torchtitan"))
    (tmp_path / "run.sh").write_text(PRIMUS_SCRIPT.replace("MODE", "direct").replace(old, new))
    with pytest.raises(UnreadFileError, match=sentence):
        load_run(config_file=tmp_path / "run.sh")


def test_a_variable_of_primus_may_be_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    primus(tmp_path)
    words = ["plan", "--config", str(tmp_path / "exp.yaml"), "--context", "variables=MICRO_BATCH=8", "--json"]
    assert main(words) == 0
    assert "MICRO_BATCH" not in json.loads(capsys.readouterr().out).get("read", {}).get("open", [])


def test_gradients_of_primus_are_kept_in_bf16_where_it_is_stated(tmp_path: Path) -> None:
    assert primus(tmp_path, "grad_reduce_in_bf16: true").section("ddp")["grad_reduce_in_fp32"] is False


def count_copies(run: Run) -> int:
    """Return the bytes of the low-precision copies of weights on a rank."""
    return run.planned.memory.ranks[0].bytes_of["low-precision copies"]


def test_primus_may_keep_no_transposes_of_fp8_weights(tmp_path: Path) -> None:
    kept = primus(tmp_path)
    dropped = primus(tmp_path, "no_fp8_weight_transpose_cache: true")
    assert dropped.origin_of("model.keep_fp8_weight_transpose_cache") == "Primus at start"
    layer = 3 * 256 * 256 + 256 * 256 + 2 * 512 * 256 + 512 * 256
    largest = 2 * 512 * 256
    assert count_copies(kept) - count_copies(dropped) == 2 * layer - largest
    assert any("do not keep transposed FP8 copies" in note for note in dropped.planned.memory.notes)
    turbo = ("no_fp8_weight_transpose_cache: true", "enable_primus_turbo: true", "use_turbo_gemm: true")
    assert count_copies(primus(tmp_path, *turbo)) == count_copies(kept)


def test_grouped_experts_of_primus_keep_the_transposes_of_their_weights(tmp_path: Path) -> None:
    experts = ("num_experts: 4", "moe_grouped_gemm: true", "moe_ffn_hidden_size: 512")
    kept = primus(tmp_path, *experts)
    dropped = primus(tmp_path, *experts, "no_fp8_weight_transpose_cache: true")
    attention = 3 * 256 * 256 + 256 * 256
    assert count_copies(kept) - count_copies(dropped) == 2 * attention - 3 * 256 * 256


def test_adapters_of_primus_train_in_the_place_of_the_weights(tmp_path: Path) -> None:
    stage = "stage: sft\nlora: {enabled: false, dim: 32, target_modules: [linear_qkv, linear_fc1]}\n"
    whole = primus(tmp_path, module=stage)
    run = primus(tmp_path, "lora: {enabled: true, dim: 8, target_modules: [linear_proj]}", module=stage)
    assert "peft" not in whole.reading.sections
    assert run.section("peft")["dim"] == 8
    names = {module.name for layer in run.plan.layers for module in layer.modules if module.kind == "adapter"}
    assert names == {"linear_proj.adapter.linear_in", "linear_proj.adapter.linear_out"}
    # Weights of 2 layers: 256 x 8 and 8 x 256. Adam keeps two moments in FP32.
    assert run.planned.memory.ranks[0].bytes_of["optimizer state"] == 2 * 2 * 256 * 8 * 8
    assert "all weights are counted as trained" not in " ".join(run.reading.lines)


def test_a_trainer_of_primus_that_does_not_fine_tune_has_no_adapters(tmp_path: Path) -> None:
    run = primus(tmp_path, "stage: pretrain", "lora: {enabled: true}")
    assert "peft" not in run.reading.sections


def test_experts_of_primus_turbo_do_not_compute_in_delayed_fp8(tmp_path: Path) -> None:
    experts = ("num_experts: 4", "moe_grouped_gemm: true", "enable_primus_turbo: true", "use_turbo_grouped_gemm: true")
    run = primus(tmp_path, *experts)
    assert formats_of_experts(run) == {"bf16"}
    (finding,) = [one for one in check(run).findings if one.id == "PB801"]
    assert finding.path == "use_turbo_grouped_gemm"
    assert "State fp8_recipe tensorwise" in finding.remedy
    mended = primus(tmp_path, *experts, "fp8_recipe: tensorwise")
    assert formats_of_experts(mended) == {"e4m3"}
    assert not [one for one in check(mended).findings if one.id == "PB801"]


@pytest.mark.parametrize("switch", ["use_turbo_grouped_gemm: true", "moe_use_legacy_grouped_gemm: true"])
def test_a_switch_of_experts_is_no_finding_in_a_dense_model_of_primus(tmp_path: Path, switch: str) -> None:
    dense = ("moe_grouped_gemm: true", "enable_primus_turbo: true", switch)
    run = primus(tmp_path, *dense)
    found = check(run).findings
    assert not [one for one in found if one.id in ("PB281", "PB801")]
    assert run.model.get("quant_recipe") is None
    assert [one for one in check(primus(tmp_path, *dense, "num_experts: 4")).findings if one.id == "PB801"]


def test_a_field_that_primus_itself_reads_is_not_said_to_be_without_effect(tmp_path: Path) -> None:
    run = primus(tmp_path, "num_experts: 4", "moe_grouped_gemm: true", "moe_use_legacy_grouped_gemm: true")
    assert not any("moe_use_legacy_grouped_gemm has no effect" in note for note in run.plan.settings.notes)


def test_experts_of_primus_turbo_that_are_not_padded_are_no_finding(tmp_path: Path) -> None:
    experts = ("num_experts: 4", "moe_grouped_gemm: true", "fp8_recipe: tensorwise", "use_turbo_grouped_gemm: true")
    padded = check(primus(tmp_path, *experts, "enable_primus_turbo: true")).findings
    assert ["cannot be judged" in one.rule for one in padded if one.id == "PB421"] == [False]
    option = "turbo_grouped_gemm_without_padding: true"
    not_padded = check(primus(tmp_path, *experts, "enable_primus_turbo: true", option)).findings
    assert ["cannot be judged" in one.rule for one in not_padded if one.id == "PB421"] == []


def test_advice_about_nvfp4_is_none_for_mxfp4(tmp_path: Path) -> None:
    no_fp8 = ("model.fp8=null",)
    mxfp4 = check(primus(tmp_path, "fp4: e2m1", "fp4_recipe: mxfp4", words=no_fp8)).findings
    assert not [one for one in mxfp4 if one.id == "PB249"]
    nvfp4 = check(primus(tmp_path, "fp4: e2m1", "fp4_recipe: nvfp4", words=no_fp8)).findings
    assert [one for one in nvfp4 if one.id == "PB249"]


def test_mxfp4_of_rocm_transformer_engine_is_planned_for_primus(tmp_path: Path) -> None:
    run = primus(tmp_path, "fp4: e2m1", "fp4_recipe: mxfp4", words=("model.fp8=null",))
    gemms = [row for row in run.plan.rows() if row["module"].endswith("linear_qkv")]
    assert {row["format"] for row in gemms if row["item"] in ("fprop", "dgrad", "wgrad")} == {"e2m1"}
    assert any(one.startswith("fp4_recipe mxfp4: a recipe of ROCm") for one in run.reading.uncertainty.open_points)
    assert not [one for one in check(run).findings if one.id in ("PB202", "PB614")]


def test_mxfp4_is_no_scheme_of_megatron_itself(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {bf16: true, fp4: e2m1, fp4_recipe: mxfp4}\n")
    run = load_run(config_file=tmp_path / "run.yaml", strict=False)
    assert [one.severity for one in check(run).findings if one.id == "PB202"] == ["error"]


def test_mxfp4_needs_a_gpu_that_multiplies_it(tmp_path: Path) -> None:
    words = ("model.fp8=null", "target=mi300xx8")
    findings = check(primus(tmp_path, "fp4: e2m1", "fp4_recipe: mxfp4", words=words)).findings
    assert [one.path for one in findings if one.id == "PB621"] == ["target.gpu"]
    words = ("model.fp8=null", "target=mi355xx8")
    findings = check(primus(tmp_path, "fp4: e2m1", "fp4_recipe: mxfp4", words=words)).findings
    assert not [one for one in findings if one.id in ("PB614", "PB621")]


def test_mxfp4_of_primus_turbo_computes_in_bf16_without_its_linear_layers(tmp_path: Path) -> None:
    mxfp4 = ("fp4: e2m1", "fp4_recipe: mxfp4", "enable_primus_turbo: true")
    run = primus(tmp_path, *mxfp4, words=("model.fp8=null",))
    assert {row["format"] for row in run.plan.rows() if row["item"] == "fprop"} == {"bf16"}
    assert run.origin_of("model.fp4") == "Primus at start"
    (finding,) = [one for one in check(run).findings if one.id == "PB801"]
    assert finding.path == "enable_primus_turbo"
    assert "Set use_turbo_gemm to true" in finding.remedy
    turbo = primus(tmp_path, *mxfp4, "use_turbo_gemm: true")
    assert turbo.reading.uncertainty.no_plan_reason.startswith("use_turbo_gemm: linear layers are in Primus-Turbo's")


def test_bases_in_a_file_of_primus_are_said_not_to_be_read(tmp_path: Path) -> None:
    models = tmp_path / "primus" / "configs" / "models" / "megatron"
    primus(tmp_path)
    text = (models / "tiny.yaml").read_text()
    (models / "tiny.yaml").write_text(f"bases:\n  - language_model.yaml\n{text}")
    (models / "language_model.yaml").write_text("num_layers: 9\nkv_channels: 7\n")
    run = load_run(config_file=tmp_path / "exp.yaml")
    assert run.model["num_layers"] == 2
    assert run.model.get("kv_channels") != 7
    assert [note for note in run.reading.notes if note.startswith("tiny.yaml: names language_model.yaml in `bases`")]


def test_an_experiment_outside_of_a_clone_rests_on_assumptions(tmp_path: Path) -> None:
    (tmp_path / "exp.yaml").write_text(EXPERIMENT)
    sizes = ("model.num_layers=2", "model.hidden_size=256", "model.num_attention_heads=4")
    run = load_run(sizes, config_file=tmp_path / "exp.yaml")
    assert run.origin_of("ddp.use_distributed_optimizer") == "assumed"
    assert any(one.startswith("pre_trainer.yaml: not there") for one in run.reading.uncertainty.open_points)


def test_an_array_that_the_script_does_not_set_may_be_stated(tmp_path: Path) -> None:
    with pytest.raises(RunConfigError, match=r"add --context variables='EVAL_ARGS=VALUE'"):
        slime(tmp_path, "${EVAL_ARGS[@]}")
    run = load_run(config_file=tmp_path / "run.sh", choice=RunChoice(variables={"EVAL_ARGS": ""}))
    assert run.origin_of("model.bf16") == "slime at start"
    assert run.reading.uncertainty.default_decider is None
