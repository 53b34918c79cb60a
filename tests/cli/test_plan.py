"""plan, memory, align and twin as their users meet them: the real entry point."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bridge.cli.main import main
from tests import warm
from tests.cli.test_commands import run

ROOT = Path(__file__).parents[2]
CONF = ("--config-path", str(ROOT / "conf"))
SHOWCASE = sorted((ROOT / "docs/showcase").glob("*.yaml"))
CURRENT = "bf16_with_fp8_current_scaling_mixed"


def test_plan_says_what_each_layer_runs_in():
    done = run("plan", CURRENT, *CONF, COLUMNS="130")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{CURRENT}; layers count from 1\n")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["2-5"] in [line[:1] for line in lines]
    assert "16 of 25 linear layers compute in FP8 (tensorwise scaling)." in done.stdout
    assert "Everywhere: master fp32 (sharded), gradient fp32, reduced fp32" in done.stdout


def test_plan_takes_overrides_as_the_training_script_does():
    words = ("mixed_precision.num_layers_at_end_in_bf16=2", "model.num_layers=8", "mixed_precision.fp8=e4m3")
    told = json.loads(run("plan", CURRENT, *words, *CONF, "--json").stdout)
    assert told["groups"][2]["layers"] == ["2", "3", "4", "5", "6"]
    formats = {row["format"] for group in told["groups"] for row in group["rows"] if row["item"] == "dgrad"}
    assert formats == {"bf16", "e4m3"}


def test_plan_prints_every_row_as_csv_and_draws_a_picture(tmp_path):
    rows = list(csv.DictReader(io.StringIO(run("plan", CURRENT, *CONF, "--csv").stdout)))
    assert {row["layer"] for row in rows} == {"embedding", *map(str, range(1, 7)), "output"}
    picture = tmp_path / "plan.png"
    done = run("plan", CURRENT, *CONF, "--picture", str(picture))
    assert done.stdout == f"{picture}: 8 rows.\n"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plan_compares_with_another_recipe_and_with_a_file(tmp_path):
    told = json.loads(run("plan", CURRENT, *CONF, "--against", "bf16_mixed", "--json").stdout)
    assert {row["before"] for row in told["differences"] if row["item"] == "fprop" and row["column"] == "format"} == {
        "e4m3"
    }
    text = run("plan", CURRENT, *CONF, "--against", CURRENT, COLUMNS="130").stdout
    assert text == f"The plans of {CURRENT} and {CURRENT} are the same.\n"
    other = tmp_path / "other.yaml"
    other.write_text("mixed_precision: fp16_mixed\nmodel: {num_layers: 6, hidden_size: 256, num_attention_heads: 8}\n")
    assert "fp16" in run("plan", CURRENT, *CONF, "--against", str(other)).stdout


def test_plan_keeps_stated_fields_over_the_recipe_that_it_compares_with():
    stated = "mixed_precision.fp8_dot_product_attention=true"
    told = json.loads(run("plan", CURRENT, stated, *CONF, "--against", CURRENT, "--json").stdout)
    assert told["a"] == told["b"]
    assert "fp8_dot_product_attention" in told["b"]


def test_plan_lists_what_later_phases_change():
    words = ("plan", "nvfp4", "mixed_precision.fp4_param_gather=false", *CONF)
    schedule = "precision_schedule=[{until: 0.9}, {recipe: bf16_mixed}]"
    done = run(*words, schedule, "train.train_iters=100", COLUMNS="130")
    assert done.returncode == 0, done.stderr
    assert "steps 91-100: bf16_mixed" in done.stdout
    as_json = json.loads(run(*words, schedule, "train.train_iters=100", "--json").stdout)
    (phase,) = as_json["later_phases"]
    assert (phase["first"], phase["last"], phase["precision"]) == (91, 100, "bf16_mixed")
    assert as_json["low_precision_linears"] > 0 == phase["plan"]["low_precision_linears"]
    refused = run("plan", "nvfp4", schedule, *CONF)
    assert refused.returncode == 2
    assert "stores the weights in FP4" in refused.stderr


def test_memory_is_per_stage_and_in_bytes_as_json():
    words = ("model=gpt_tiny", "model.pipeline_model_parallel_size=2", "model.num_layers=4")
    told = json.loads(run("memory", "bf16_mixed", *words, *CONF, "--json").stdout)
    assert [rank["stage"] for rank in told["ranks"]] == [0, 1]
    for rank in told["ranks"]:
        kinds = rank["bytes_of"]
        assert kinds["master weights"] * 2 == kinds["optimizer state"]
        assert kinds["gradients"] == 2 * kinds["weights"]
        assert rank["total"] == sum(kinds.values())
    assert set(told["activations_by_recompute"]) == {"none", "selective (mlp)", "full"}


ONE_STAGE = ("--config", str(ROOT / "docs/showcase/llama3_70b.yaml"), "model.pipeline_model_parallel_size=1")


def test_memory_holds_the_fullest_rank_against_its_gpu_and_check_refuses_what_does_not_fit():
    told = run("memory", *ONE_STAGE, COLUMNS="130")
    assert "129 GiB of the 79.0 GiB of one H100 on stage 0: does not fit." in told.stdout
    assert "error PB618" in told.stdout
    assert told.returncode == 2
    fitting = run("memory", *ONE_STAGE[:2], COLUMNS="130")
    assert (
        "58.9 GiB of the 79.0 GiB of one H100 on stage 0: 20.1 GiB are left for what is not counted." in fitting.stdout
    )
    assert fitting.returncode == 0
    checked = run("check", *ONE_STAGE)
    assert checked.returncode == 2
    assert "error PB618 target = 'h100x64,mcore0.16,te2.9,cuda12.9': 129 GiB of 79 GiB on stage 0: does not fit." in (
        checked.stdout
    )
    assert run("check", *ONE_STAGE[:2]).returncode == 0
    assert "does not fit" not in run("memory", *ONE_STAGE, "+ddp.use_torch_fsdp2=true").stdout
    sharded = ("+ddp.use_megatron_fsdp=true", "+ddp.data_parallel_sharding_strategy=optim_grads_params")
    assert "are left for what is not counted" in run("memory", *ONE_STAGE, *sharded, COLUMNS="130").stdout


def test_no_change_is_listed_in_which_check_finds_more_than_in_the_run(capsys):
    sizes = ["model.num_layers=40", "model.hidden_size=8192", "model.num_attention_heads=64", "model.seq_length=4160"]
    large = [*sizes, "train.global_batch_size=512", "train.micro_batch_size=1", "--json"]

    def printed(*words):
        main([*words, *large])
        return json.loads(capsys.readouterr().out)

    def worse_than_info(*words):
        return {one["id"] for one in printed("check", *words)["findings"] if one["severity"] != "info"}

    proposed = []
    blockwise = "bf16_with_fp8_subchannel_scaling_mixed"
    for recipe, te in (("bf16_with_fp8_current_scaling_mixed", "2.9"), (blockwise, "2.9"), (blockwise, "2.14")):
        target = ("--target", f"h100x64,te{te}")
        options = [option["changes"] for option in printed("memory", recipe, "--fit", *target)["fit"]["options"]]
        first = [f"{name}={json.dumps(value)}" for name, value in options[0].items()]
        assert worse_than_info(recipe, *first, *target) <= worse_than_info(recipe, *target)
        proposed.append({name for changes in options for name in changes})
    current, before, since = proposed
    assert "model.tensor_model_parallel_size" in (current - before) & since
    assert "model.pipeline_model_parallel_size" in before


def test_memory_lists_the_changes_with_which_a_run_fits():
    content = json.loads(run("memory", *ONE_STAGE, "--fit", "--json").stdout)
    options = content["fit"]["options"]
    assert [option["price"] for option in options] == sorted(option["price"] for option in options)
    words = [f"{name}={json.dumps(value)}" for name, value in options[0]["changes"].items()]
    again = json.loads(run("memory", *ONE_STAGE, *(f"++{word}" for word in words), "--json").stdout)
    assert max(rank["total"] for rank in again["ranks"]) == options[0]["needed_bytes"] < content["gpu_bytes"]
    told = run("memory", *ONE_STAGE, "--fit", COLUMNS="130").stdout
    assert "Fits with, cheapest first" in told
    assert "model.tensor_model_parallel_size=8" in told


def test_plan_heeds_the_version_of_the_target():
    words = ("plan", "bf16_with_mxfp8_mixed", "+model.fp8_output_proj=true", *CONF)
    old, new = (
        run(*words, "--target", f"b200x8,mcore{version}", COLUMNS="160").stdout for version in ("0.16.1", "0.18.2")
    )
    assert "model.fp8_output_proj has no effect in megatron-core 0.16.1, which has no such field" in old
    assert "24 of 25 linear layers compute in FP8 (mxfp8 scaling)." in old
    assert "25 of 25 linear layers compute in FP8 (mxfp8 scaling)." in new


def test_a_model_that_cannot_be_planned_is_refused_by_every_calculator():
    for command in (("plan",), ("memory",), ("plan", "--align")):
        done = run(*command, "bf16_mixed", "+model.heterogeneous_block_specs=true", *CONF)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            "model.heterogeneous_block_specs: cannot plan: each layer has modules of its own, got True. Override it "
            "for a plan of the other layers, or ask `precision-bridge check`, which judges the rest of the run.\n"
        )


def test_more_ranks_share_masters_and_state():
    whole, shared = (
        json.loads(run("memory", "bf16_mixed", *CONF, "--json", "--target", f"h100x{count}").stdout)["ranks"][0]
        for count in (1, 8)
    )
    assert whole["bytes_of"]["weights"] == shared["bytes_of"]["weights"]
    assert shared["bytes_of"]["optimizer state"] < whole["bytes_of"]["optimizer state"] / 7


def test_align_names_what_does_not_fit():
    done = run("plan", "--align", "bf16_with_mxfp8_mixed", "model.ffn_hidden_size=1000", *CONF, COLUMNS="200")
    assert "does not fit: model.ffn_hidden_size: linear_fc1 (layers 1-6) takes N in multiples of 32" in done.stdout
    assert "Use 992 or 1024." in done.stdout
    assert json.loads(run("plan", "--align", "bf16_mixed", *CONF, "--json").stdout)["misfits"] == []


def test_a_twin_differs_in_precision_alone_and_the_training_script_takes_it(tmp_path):
    path = tmp_path / "twin.yaml"
    words = ("model.num_query_groups=4", "mixed_precision.fp8=e4m3", "+model.fp8_output_proj=false")
    done = run("compare", "--twin", CURRENT, *words, *CONF, "--base", "bf16_mixed", "--output", str(path))
    assert done.returncode == 0, done.stderr
    first, *rows = done.stdout.splitlines()
    assert first.startswith(f"{path}: differs in ")
    assert "precision fields and in nothing else" in first
    others = [row.split()[0] for row in rows[:-1] if not row.split()[0].startswith("mixed_precision.")]
    assert others == ["model.fp8_output_proj"]
    assert rows[-1] == "  linear layers in FP8 or FP4: 16 of 25 -> 0 of 25"
    twin = yaml.safe_load(path.read_text())
    assert twin["mixed_precision"] == "bf16_mixed"
    assert twin["model"]["num_query_groups"] == 4
    command = ["python", str(ROOT / "scripts/train.py"), "--config-path", ".", "--config-name", "twin"]
    done = warm.run([*command, "--cfg", "job", "checkpoint.save=here"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["model"] == twin["model"]
    checkpoint = yaml.safe_load(done.stdout)["checkpoint"]
    assert checkpoint.pop("save") == "here"
    unset = {"save_interval": None, "save_last": True, "load": None, "checksum": True, "trust": False}
    assert checkpoint == unset


def test_a_twin_keeps_precision_fields_that_no_recipe_decides_unstated(tmp_path):
    path = tmp_path / "twin.yaml"
    done = run(
        "compare",
        "--twin",
        CURRENT,
        "+model.attention_softmax_in_fp32=true",
        *CONF,
        "--base",
        "bf16_mixed",
        "--output",
        str(path),
    )
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(path.read_text())["model"]["attention_softmax_in_fp32"] is True


def test_a_twin_of_a_model_that_cannot_be_planned_says_so(tmp_path):
    path = tmp_path / "twin.yaml"
    words = ("+model.heterogeneous_block_specs=true", "--base", "bf16_mixed", "--output", str(path))
    done = run("compare", "--twin", CURRENT, *words, *CONF)
    assert done.returncode == 0, done.stderr
    unknown = "not known, as the model cannot be planned"
    assert done.stdout.splitlines()[-1] == f"  linear layers in FP8 or FP4: {unknown} -> {unknown}"
    assert yaml.safe_load(path.read_text())["model"]["heterogeneous_block_specs"] is True


def test_a_twin_leaves_out_precision_that_other_sections_state(tmp_path):
    config = tmp_path / "run.yaml"
    model = "{num_layers: 4, hidden_size: 64, num_attention_heads: 4, fp8: hybrid, first_last_layers_bf16: true}"
    config.write_text(f"mixed_precision: {CURRENT}\nmodel: {model}\ntarget: h100x8\n")
    path = tmp_path / "twin.yaml"
    told = json.loads(run("compare", "--twin", "--config", str(config), "--output", str(path), "--json").stdout)
    assert {row["field"] for row in told["differs_in"]} >= {"model.fp8", "mixed_precision.fp8"}
    assert all(row["precision"] for row in told["differs_in"])
    assert "fp8" not in yaml.safe_load(path.read_text())["model"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "bf16_mixd", *CONF), "mixed_precision: no such recipe, got 'bf16_mixd' (command line)."),
        (("plan", "--config", "nowhere.yaml"), "nowhere.yaml: cannot be read: No such file or directory."),
        (("plan", "--config-path", "nowhere"), "--config-path: there is no such folder, got 'nowhere'."),
        (("plan", *CONF, "--picture", "plan.gif"), "--picture: must end in .png, .svg, .pdf, got 'plan.gif'."),
        (("memory", *CONF, "--target", "g100x3"), "target: "),
        (("plan", *CONF, "model.num_query_groups=3"), "model.num_query_groups: must divide the 8 attention heads"),
        (
            ("compare", "--twin", *CONF, "--base", "bf16_mixd", "--output", "x.yaml"),
            "Unknown mixed-precision recipe 'bf16_mixd'.",
        ),
        (
            ("compare", "--twin", *CONF, "--json"),
            "--json: prints the proof, so the twin needs a file, got no --output.",
        ),
    ],
)
def test_what_cannot_be_answered_is_one_sentence_and_exit_code_2(arguments, message):
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr


def test_sizes_that_megatron_refuses_are_answered_with_the_error_and_with_what_was_counted():
    """Ranks that do not hold the layout a whole number of times, and layers that its stages do not divide."""
    run_of = (*CONF, "--target", "h100x6", "model.tensor_model_parallel_size=4")
    told = run("memory", *run_of, COLUMNS="200").stdout
    assert "8 ranks: TP 4 x DP 2" in told
    assert "Counted as 8 GPUs: 6 do not hold this layout a whole number of times." in told
    assert "error PB406 target.count: the GPUs of the run must be a multiple of TP 4 x PP 1 x CP 1 = 4, got 6" in told
    uneven = (*CONF, "model.num_layers=7", "model.pipeline_model_parallel_size=2")
    plan = json.loads(run("plan", *uneven, "--json").stdout)
    assert [one["id"] for one in plan["check"]] == ["PB413"]
    ranks = json.loads(run("memory", *uneven, "--json").stdout)["ranks"]
    assert [one["stage"] for one in ranks] == [0, 1]
    full = (*uneven, "--target", "h100x2,memory=1GiB", "model.hidden_size=8192")
    assert [one["id"] for one in json.loads(run("plan", *full, "--json").stdout)["check"]] == ["PB413"]
    whole = json.loads(run("plan", *full, "model.num_layers=8", "--json").stdout)
    assert [one["id"] for one in whole["check"]] == ["PB618"]


@pytest.mark.parametrize("command", ["plan", "memory", "plan --align"])
@pytest.mark.parametrize("path", SHOWCASE, ids=lambda path: path.stem)
def test_a_large_model_is_answered(path, command):
    done = run(*command.split(), "--config", str(path), COLUMNS="130")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 5


def test_plans_are_made_without_torch_and_megatron():
    arguments = ["plan", "--config", str(SHOWCASE[0]), "--json"]
    code = (
        "import sys\nfrom bridge.cli.main import main\n"
        f"code = main({arguments!r})\n"
        "print([m for m in ('torch', 'megatron', 'matplotlib', 'rich') if m in sys.modules], code, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[] 0\n"


@pytest.mark.parametrize("command", ["plan", "memory", "plan --align", "plan --modules"])
def test_an_answer_names_each_override_that_the_recipe_replaces_and_each_error_of_the_check(command, capsys):
    words = [*command.split(), CURRENT, *CONF, "model.fp8=null", "model.tensor_model_parallel_size=3"]
    assert main(words) == 2
    lines = capsys.readouterr().out.splitlines()
    assert (
        "  warning PB123 model.fp8: the recipe states 'hybrid' and wins over the owner's own value, got None (command "
        "line). Choose a recipe without FP8; or drop it to go with the recipe."
    ) in lines
    (indivisible,) = (line for line in lines if line.startswith("  error PB408 model.num_attention_heads: "))
    assert "does not divide by TP 3: each rank has to get the same part" in indivisible
    main([*words, "--json"])
    found = {(one["id"], one["path"]) for one in json.loads(capsys.readouterr().out)["check"]}
    assert {("PB123", "model.fp8"), ("PB408", "model.num_attention_heads")} <= found


def test_a_value_of_a_wrong_type_is_refused_whatever_the_recipe_makes_of_it(capsys):
    assert main(["plan", CURRENT, *CONF, "ddp.grad_reduce_in_fp32=maybe"]) == 2
    sentence = "ddp.grad_reduce_in_fp32: must be true or false, got 'maybe' (command line). Correct it.\n"
    assert capsys.readouterr().err == sentence


def test_a_refused_plan_of_a_script_with_several_runs_names_the_others(capsys):
    assert main(["plan", str(ROOT / "tests/read/samples/several.sh")]) == 2
    assert "--launch 3 is line 12, pretrain_gpt.py" in capsys.readouterr().err
