"""Megatron-LM's files beyond the plain launch: argument files, fragments, and programs that train nothing."""

import itertools

import pytest

from bridge.convert.conversion import import_runs
from bridge.convert.systems import detect_system
from bridge.errors import PayloadError
from bridge.precision.mode import get_mode
from bridge.read.foreign.reports import ImportReport
from bridge.read.megatron_lm import importer as megatron_lm
from bridge.read.megatron_lm.recognition import recognise
from bridge.read.text.document import Document
from tests.read.properties import reasons


def read(text: str, name: str = "run.sh") -> ImportReport:
    (run,) = megatron_lm.import_all(megatron_lm.read(Document.from_text(text, name)))
    return run


# -- argument files ---------------------------------------------------------------------------------------------------

MODEL = "bf16: True\nnum_layers: 4\nhidden_size: 12288\nnum_attention_heads: 96\nseq_length: 2048\n"
TRAINER = (
    "seq_length: 4096\nmicro_batch_size: 1\nglobal_batch_size: 96\ntrain_iters: 500000\nweight_decay: 0.1\n"
    "adam_beta1: 0.9\nadam_beta2: 0.95\ninit_method_std: 0.006\nclip_grad: 1.0\nlr: 6.0e-5\nmin_lr: 6.0e-6\n"
    "lr_decay_style: cosine\nlog_interval: 1\neval_iters: -1\n"
)


@pytest.mark.parametrize(("text", "mode", "recipe"), [(MODEL, "bf16", "bf16_mixed"), (TRAINER, "fp32", None)])
def test_a_file_of_bare_arguments_is_recognised(text: str, mode: str, recipe: str | None) -> None:
    document = Document.from_text(text, "args.yaml")
    assert detect_system(document)[0].name == "megatron-lm"
    run = read(text, "args.yaml")
    assert (get_mode(run.config), run.recipe) == (mode, recipe)


def test_arguments_that_say_nothing_of_precision_leave_it_to_the_command_line() -> None:
    run = read(TRAINER, "trainer.yaml")
    (entry,) = run.unmapped
    assert (run.mode_is_stated, run.semantics, run.recipe) == (False, "unstated", None)
    assert (entry.field, entry.reason) == ("mode", "unsupported")
    assert entry.detail == "nothing in the file states it; the command line that names this file decides"
    assumed = run.assume_default()
    assert (assumed.mode_is_stated, get_mode(assumed.config), assumed.recipe) == (True, "fp32", "fp32")
    assert [(entry.field, entry.reason) for entry in assumed.unmapped] == [("mode", "implied default")]


def test_an_argument_file_that_switches_a_mode_off_states_fp32() -> None:
    assert read(TRAINER + "bf16: false\n", "trainer.yaml").mode_is_stated


@pytest.mark.parametrize(
    "text",
    [
        "num_layers: 4\nhidden_size: 8\nnum_attention_heads: 2\nseq_length: 4\n",
        MODEL + "model_type: chatglm\n",
        MODEL + "pipe_parallel_size: 2\n",
        MODEL + "output_dir: x\n",
        MODEL + "optimizer:\n  lr: 1\n",
        "bf16: true\nlr: 1\nseed: 2\nnum_workers: 3\n",
    ],
)
def test_a_file_that_may_be_another_systems_is_not(text: str) -> None:
    assert recognise(Document.from_text(text, "a.yaml")) is None


@pytest.mark.parametrize(
    ("written", "mode", "in_fp32", "reason"),
    [
        ("accumulate_allreduce_grads_in_fp32: False", "bf16", True, ["dead knob"]),
        ("accumulate_allreduce_grads_in_fp32: True", "bf16", True, []),
        ("accumulate_allreduce_grads_in_fp32: False", "fp16", False, []),
    ],
)
def test_a_written_reduction_is_no_default(written: str, mode: str, in_fp32: bool, reason: list[str]) -> None:
    run = read(f"{mode}: True\nnum_layers: 2\n{written}\n", "args.yaml")
    assert run.config.grad_reduce_in_fp32 is in_fp32
    assert reasons(run, "accumulate_allreduce_grads_in_fp32") == reason
    assert reasons(run, "--accumulate-allreduce-grads-in-fp32") == []


FSDP = ("--bf16", "--use-megatron-fsdp")
ACCUMULATE, MAIN, SENT = (
    "--accumulate-allreduce-grads-in-fp32",
    "--megatron-fsdp-main-grads-dtype",
    "--megatron-fsdp-grad-comm-dtype",
)


@pytest.mark.parametrize(
    ("words", "in_fp32", "reported"),
    [
        (FSDP, False, {MAIN: ["implied default"], ACCUMULATE: []}),
        ((*FSDP, ACCUMULATE), False, {MAIN: ["implied default"], ACCUMULATE: ["dead knob"]}),
        ((*FSDP, "--grad-reduce-in-bf16"), False, {MAIN: [], "--grad-reduce-in-bf16": []}),
        ((*FSDP, MAIN, "fp32"), True, {MAIN: [], ACCUMULATE: []}),
        ((*FSDP, MAIN, "fp32", SENT, "bf16"), False, {MAIN: [], SENT: []}),
        (("--bf16", "--use-custom-fsdp", MAIN, "auto"), False, {MAIN: ["implied default"]}),
    ],
)
def test_megatron_fsdp_decides_in_what_gradients_are_reduced(words, in_fp32: bool, reported) -> None:
    run = megatron_lm.import_(list(words))
    assert run.config.grad_reduce_in_fp32 is in_fp32
    assert {field: reasons(run, field) for field in reported} == reported
    written = dict(itertools.pairwise(words))
    assert run.config.to_dict().get("megatron_fsdp_grad_comm_dtype") == written.get(SENT)


# -- files that start nothing -----------------------------------------------------------------------------------------

FIGURE = (
    'PP=2\nMEGATRON_EXTRA_PARAMS="--activations-checkpoint-method uniform "\n. `pwd`/CONFIG.sh\n. SBATCH.sh\nexit 0\n'
)


def test_a_fragment_that_says_nothing_names_what_decides() -> None:
    run = read(FIGURE)
    assert [loss.field for loss in run.unmapped] == ["launch", "mode", "source `pwd`/CONFIG.sh", "source SBATCH.sh"]
    assert (run.mode_is_stated, run.recipe, run.mapped) == (False, None, {})


def test_a_fragment_whose_arguments_are_not_all_is_no_fp32_run() -> None:
    run = read("export MEGATRON_ARGS='--num-layers 2 --hysteresis 4'\n")
    assert (run.recipe, run.decided_by) == (None, "the script that uses these arguments")


def test_each_way_through_a_fragment_is_told() -> None:
    script = 'if [ -n "$F" ]; then P="--bf16 --fp8-format hybrid"; else P=""; fi\nexport ARGS="--num-layers 2 $P"\n'
    second, first = megatron_lm.import_all(Document.from_text(script, "run.sh"))
    assert (first.config.fp8, first.label) == ("hybrid", 'arguments in P, ARGS; line 1, if [ -n "$F" ]')
    assert second.label == 'arguments in ARGS; line 1, not [ -n "$F" ]'
    assert [loss.field for loss in second.unmapped] == ["launch", "mode", 'line 1, not [ -n "$F" ]']


def test_a_script_that_starts_nothing_says_so() -> None:
    (run,) = megatron_lm.import_all(Document.from_text(". ./CONFIG.sh\nsbatch SRUN.sh\nexit 0\n", "run.sh"))
    assert [loss.field for loss in run.unmapped] == ["launch", "mode", "source ./CONFIG.sh"]
    assert run.recipe is None


# -- programs that train nothing --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program", ["-m examples.inference.launch_inference_server", "tools/run_text_generation_server.py"]
)
def test_inference_is_kept_and_told(program: str) -> None:
    (run,) = import_runs(Document.from_text(f"torchrun {program} --num-layers 2 --bf16", "run.sh"))
    assert run.imported.config.bf16
    first = run.imported.unmapped[0]
    assert (first.field, first.reason) == (run.imported.label, "semantics")
    assert first.detail.startswith("inference by its name, not training")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("fairseq-train $DATA --arch t --memory-efficient-fp16 --fp16", "it starts fairseq"),
        ("fairseq-hydra-train --fp16 $@", "it starts fairseq"),
        ("fairseq-train data --fp16 --max-tokens 4096 --lr 0.1", "it starts fairseq"),
        ("cat a | python x/fairseq_cli/interactive.py $M --fp16 > y", "it starts fairseq"),
        ("python megatron/convert_llama_nemo_to_hf.py --in-path x", "whose arguments no system here knows"),
    ],
)
def test_another_systems_program_is_not_megatrons(script: str, says: str) -> None:
    with pytest.raises(PayloadError, match=says):
        import_runs(Document.from_text(script, "run.sh"))


def test_a_tool_beside_a_training_is_no_run() -> None:
    script = "python tools/convert_data.py --in x\ntorchrun pretrain_gpt.py $GPT_ARGS"
    (run,) = import_runs(Document.from_text(script, "run.sh"))
    assert run.source["run"] == "line 2, pretrain_gpt.py"


def test_only_model_args_are_runs_where_a_file_has_them() -> None:
    text = (
        "BASE_MODEL_ARGS: &base\n  --num-layers: 2\n  --bf16: true\n"
        "MODEL_ARGS:\n  <<: *base\n"
        "MODEL_ARGS_2:\n  <<: *base\n  --fp8-format: hybrid\n"
        "THROUGHPUT_TEST_PARAMS:\n  --start_step: 5\n"
    )
    first, second = import_runs(Document.from_text(text, "model_config.yaml"))
    assert [run.imported.label for run in (first, second)] == ["MODEL_ARGS", "MODEL_ARGS_2"]
    assert [run.imported.config.fp8 for run in (first, second)] == [None, "hybrid"]
