"""Commands about a run take what the training script takes, and what it leaves behind."""

import json
import sys
from pathlib import Path

import pytest

from bridge.front.container import build_container
from bridge.front.loader import load_run
from bridge.front.train import write_run_files
from bridge.precision.mode import format_label
from tests import warm

COMMAND = str(Path(sys.executable).parent / "precision-bridge")
ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"


def told(*arguments: str) -> tuple[int, str, str]:
    done = warm.run([COMMAND, *arguments], cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("command", ["check", "plan", "memory"])
def test_the_config_of_a_run_folder_can_be_read(command: str, tmp_path: Path) -> None:
    config = build_container(load_run(["mixed_precision=auto:fp8", "target=[h100x8,te2.9]", "model=gpt_tiny"], CONF))
    write_run_files(tmp_path, config, None)
    code, out, err = told(command, "--config", str(tmp_path / "config.yaml"))
    assert (code, err) == (0, "")
    assert "fp8" in out.lower() or "tensorwise" in out


def test_check_sees_what_is_stated_beside_auto() -> None:
    words = ["mixed_precision=auto:fp8", "mixed_precision.fp8_margin=2", "target=[h100x8,te2.9,cuda12.9]", "--json"]
    code, out, _ = told("check", *words)
    assert code == 0
    assert "PB210" in {finding["id"] for finding in json.loads(out)["findings"]}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["plan", "fp8_current", "model.num_layer=4"],
            "model.num_layer: no such field, got 4 (command line). Did you mean 'num_layers'?\n",
        ),
        (
            ["memory", "fp8_current", "model.hidden_siz=5"],
            "model.hidden_siz: no such field, got 5 (command line). Did you mean 'hidden_size'?\n",
        ),
        (
            ["plan", "fp8_current", "model.num_layers=1000000"],
            "model.num_layers: must be at most 10000, got 1000000 (command line). Use fewer.\n",
        ),
        (
            ["memory", "fp8_current", f"model.num_moe_experts={2**70}"],
            f"model.num_moe_experts: must be at most 10000, got {2**70} (command line). Use fewer.\n",
        ),
        (
            ["plan", "fp8_current", f"model.pipeline_model_parallel_size={10**6}"],
            f"model.pipeline_model_parallel_size: stages x chunks of a stage must be at most 4000, got {10**6}. "
            "Use fewer.\n",
        ),
        (
            ["memory", "fp8_current", f"model.hidden_size={10**12}"],
            f"model.hidden_size: must be at most {10**8}, got {10**12} (command line). Use a smaller number.\n",
        ),
        (
            ["memory", "fp8_current", "--target", "h100x99999999999"],
            "target: must have at most 10,000,000 GPUs, got 'h100x99999999999'. Use fewer.\n",
        ),
        (
            ["check", "fp8_current", "--target", f"h100x{'1' * 5000}"],
            f"target: must be a GPU such as h100x8 or a version such as te2.8, got 'h100x{'1' * 74}. "
            "Write h100x8,te2.8,cuda12.9,mcore0.16, for example.\n",
        ),
        (
            ["plan", "fp8_current", "model.num_layers=null"],
            "model.num_layers: must be at least 1, got null (command line). Use 1 or more.\n",
        ),
        (
            ["plan", "fp8_current", "num_layers=8"],
            "num_layers: no such section or group, got 8 (command line). Did you mean 'model.num_layers'?\n",
        ),
        (
            ["plan", "--config", "docs/showcase/llama3_70b.yaml", "num_layers=8"],
            "num_layers: no such section, got '8' (command line). Did you mean 'model.num_layers'?\n",
        ),
        (
            ["plan", "--config", "docs/showcase/llama3_70b.yaml", "train.train_itres=4"],
            "train.train_itres: no such field, got '4' (command line). Did you mean 'train_iters'?\n",
        ),
        (
            ["plan", "--config", "docs/images"],
            "docs/images: holds no file of a run (.yaml, .yml, .sh, .bash, .slurm, .sbatch, .sub, .slrm). Give another "
            "folder.\n",
        ),
        (
            ["plan", "mixed_precision=docs/showcase/llama3_70b.yaml"],
            "mixed_precision: must be a recipe's name, not a file, got 'docs/showcase/llama3_70b.yaml'. check, plan "
            "and memory read a run's file with --config.\n",
        ),
        (
            ["rehearse", "docs/showcase/llama3_70b.yaml", "docs/showcase/nemotron_h.yaml"],
            "docs/showcase/llama3_70b.yaml: this command, or one of its options, is about one run, got "
            "'docs/showcase/nemotron_h.yaml' too. Give one file.\n",
        ),
        (
            ["plan", "--config", "a\x1b[31m\nb.yaml"],
            "precision-bridge plan: 'a\\x1b[31m\\nb.yaml' holds a line end or another control character. "
            "Rename the file.\n",
        ),
        (
            ["convert", "a\nb"],
            "precision-bridge convert: 'a\\nb' holds a line end or another control character. Rename the file.\n",
        ),
        (
            ["report", "x" * 5000],
            f"{'x' * 100} ... {'x' * 82}/config.yaml: cannot be used: file name too long. Give another path.\n",
        ),
        (
            ["recipes", "a", "b", "x" * 9000],
            f"precision-bridge recipes: unrecognized arguments: {'x' * 100} ... {'x' * 95}\n",
        ),
        (
            ["audit", "/dev/zero"],
            "record: must be a record of a run (it is no regular file), got '/dev/zero'. Give the record.json of a run "
            "of this version.\n",
        ),
        (
            ["check", "--taget", "h100x8"],
            "precision-bridge check: unrecognized arguments: --taget. Did you mean '--target' or '--context'?\n",
        ),
        (
            ["recipes", "fp8_current", "--config", "run.yaml"],  # not --config-dir in short
            "precision-bridge recipes: unrecognized arguments: --config run.yaml. Did you mean '--config-dir'?\n",
        ),
        (["train", "--taget", "h100x8"], "unrecognized arguments: --taget. Write target=VALUE.\n"),
        (["train", "--target", "h100x8"], "unrecognized arguments: --target. Write target=VALUE.\n"),
        (
            ["plan", "fp8_current", "--picture", "/nowhere/at/all.png"],
            "--picture: cannot be written (no such file or directory), got '/nowhere/at/all.png'. Give another file.\n",
        ),
        (
            ["compare", "--twin", "fp8_current", "--base", "bf16_mixed", "--output", "/nowhere/twin.yaml"],
            "--output: cannot be written (no such file or directory), got '/nowhere/twin.yaml'. Give another file.\n",
        ),
    ],
)
def test_what_cannot_be_done_is_one_sentence(words: list[str], sentence: str) -> None:
    assert told(*words) == (2, "", sentence)


def test_a_section_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: 3\n")
    code, _, err = told("check", "--config", str(tmp_path / "run.yaml"))
    assert code == 2
    assert err == "model: must be a mapping of fields, got 3 (run.yaml). Write model.FIELD=VALUE.\n"


def test_overrides_may_stand_behind_an_option() -> None:
    words = ["model.tensor_model_parallel_size=2", "--target", "h100x2"]
    before, after = told("memory", "fp8_current", *words), told("memory", "fp8_current", *words[1:], words[0])
    assert before == after
    assert before[0] == 0


def test_a_choice_keeps_the_recipes_name_and_what_was_stated_beside_it() -> None:
    words = ["mixed_precision=auto:fp8", "target=[h100x8,te2.9]", "mixed_precision.fp8_param_gather=false"]
    config = build_container(load_run([*words, "model=gpt_tiny"], CONF))
    assert format_label(config.mixed_precision) == "bf16_with_fp8_current_scaling_mixed, fp8_param_gather=False"
    assert config.precision_choice["request"] == "auto:fp8"
    assert config.precision_choice["recipe"] == "bf16_with_fp8_current_scaling_mixed"


def test_an_empty_file_is_one_sentence(tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.touch()
    sentence = f"{empty}: is empty, and describes no run. Give a file with sections such as model.\n"
    assert told("check", "--config", str(empty)) == (2, "", sentence)


def test_every_command_names_a_run_without_a_recipe_by_its_scheme(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, bf16: true, "
        "fp8: e4m3, fp8_recipe: blockwise}\n"
    )
    for command in ("check", "plan", "memory"):
        _, out, _ = told(command, "--config", str(tmp_path / "run.yaml"))
        assert out.startswith("bf16 with fp8 blockwise, without a recipe")


def test_a_class_in_the_place_of_a_run_is_refused_and_not_called(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"_target_: os.system\n_args_: ['touch {tmp_path}/made']\n")
    rule = "_target_: configurations are data, and nothing in them is instantiated, got 'os.system' (run.yaml)."
    remedy = "Register a recipe with recipes_from, or set the field's value."
    for command in ("check", "plan"):
        assert told(command, "--config", str(tmp_path / "run.yaml")) == (2, "", f"{rule} {remedy}\n")
    assert not (tmp_path / "made").exists()


def test_memory_says_how_many_gpus_it_counts_where_no_target_does() -> None:
    _, out, _ = told("memory", "bf16_mixed", "model.tensor_model_parallel_size=2")
    assert "  No target states the number of GPUs; counted as 2, the least that this layout needs.\n" in out


def test_memory_counts_the_gpus_that_a_file_states(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    words = (
        "pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
        "--max-position-embeddings 64 --micro-batch-size 1 --vocab-size 256 --bf16 "
        "--tensor-model-parallel-size 2 --use-distributed-optimizer"
    )
    for gpus, sentence, data in (
        (8, "No target states the number of GPUs; counted as 8, as the file states.", 4),
        (5, "Counted as 6 GPUs: 5 do not hold this layout a whole number of times.", 3),
    ):
        script.write_text(f"torchrun --nproc-per-node {gpus} {words}\n")
        _, out, _ = told("memory", str(script))
        assert f"a rank of {2 * data} ranks: TP 2 x DP {data}" in out
        assert f"  {sentence}\n" in out
    _, out, _ = told("memory", str(script), "--target", "h100x2")
    assert "a rank of 2 ranks: TP 2 x DP 1" in out


def test_a_loss_scale_beyond_fp32_is_found() -> None:
    code, out, _ = told("check", "fp16_mixed", "optimizer.initial_loss_scale=1e300")
    assert code == 2
    assert "must be above 0 and finite in FP32." in out
