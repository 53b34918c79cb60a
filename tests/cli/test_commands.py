"""The command line as its users meet it: the real entry point."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.precision.precision_config import FIELDS_BY_SUBJECT
from tests import warm

COMMAND = str(Path(sys.executable).parent / "precision-bridge")


def run(*arguments: str, **environment: str) -> warm.Done:
    return warm.run([COMMAND, *arguments], env={**os.environ, **environment})


def test_recipes_lists_every_recipe_with_one_line() -> None:
    done = run("recipes")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert "bf16_mixed" in [line.split()[0] for line in lines]
    assert all(len(line.split("  ", 1)[1].strip()) > 10 for line in lines)
    listed = json.loads(run("recipes", "--json", "--tag", "mxfp8").stdout)
    assert [row["name"] for row in listed] == ["bf16_with_mxfp8_mixed", "fp16_with_mxfp8_mixed"]


def fields_of(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:3] for line in text.splitlines() if line.startswith("    ")}


def test_show_prints_what_a_recipe_states_and_what_follows_and_all_of_it_by_subject(tmp_path: Path) -> None:
    short = fields_of(run("recipes", "bf16-mixed").stdout)
    assert short == {
        "bf16": ["True", "stated"],
        "params_dtype": ["bf16", "stated"],
        "grad_reduce_in_fp32": ["True", "stated"],
        "pipeline_dtype": ["bf16", "stated"],
    }
    whole = run("recipes", "bf16_mixed", "--all").stdout
    rows = fields_of(whole)
    assert rows["fp8_recipe"] == ["tensorwise", "default"]
    assert rows["exp_avg_dtype"] == ["fp32", "owner's"]
    assert list(rows) == [name for names in FIELDS_BY_SUBJECT.values() for name in names]
    assert [line.strip() for line in whole.splitlines() if line[:3].strip() and line.startswith("  ")] == list(
        FIELDS_BY_SUBJECT
    )
    group = tmp_path / "mixed_precision"
    group.mkdir()
    (group / "sparse.yaml").write_text("bf16: true\nfp8: hybrid\nexp_avg_dtype: fp8\n")
    sparse = fields_of(run("recipes", "sparse", "--config-dir", str(tmp_path)).stdout)
    assert (sparse["exp_avg_dtype"], sparse["fp8_recipe"]) == (["uint8", "stated"], ["tensorwise", "follows"])
    assert sparse["params_dtype"] == ["bf16", "follows"]


def test_the_help_of_show_and_explain_lists_the_fields_by_subject() -> None:
    for command in ("recipes", "explain"):
        text = run(command, "--help").stdout
        assert "  Mixture of experts: moe_router_dtype, moe_router_padding_for_quantization," in text


def test_show_prints_json() -> None:
    shown = json.loads(run("recipes", "mxfp8", "--json", "--stated").stdout)
    assert shown["fields"]["fp8"] == "e4m3"
    assert "tf32" not in shown["fields"]
    assert shown["scheme"] == "mxfp8"


def test_diff_tells_the_differing_fields() -> None:
    done = run("recipes", "bf16_mixed", "fp16_mixed")
    assert done.stdout.splitlines() == [
        "                                    bf16_mixed -> fp16_mixed",
        "  fp16                              False (default) -> True",
        "  bf16                              True -> False (default)",
        "  params_dtype                      bf16 -> fp16",
        "  pipeline_dtype                    bf16 -> fp16",
        "  grad_reduce_in_fp32               True -> False",
    ]
    assert run("recipes", "mxfp8", "bf16_with_mxfp8_mixed").stdout == (
        "bf16_with_mxfp8_mixed and bf16_with_mxfp8_mixed say the same.\n"
    )
    told = json.loads(run("recipes", "bf16_mixed", "fp32", "--json").stdout)
    assert told["fields"][0] == {"field": "fp32", "a": False, "b": True, "a_stated": False, "b_stated": True}


def test_recipes_lists_the_yaml_recipes_of_a_teams_folder(tmp_path: Path) -> None:
    (tmp_path / "mixed_precision").mkdir()
    (tmp_path / "mixed_precision" / "mine.yaml").write_text("# BF16 of ours.\ndefaults: [bf16_mixed, _self_]\n")
    lines = run("recipes", "--config-dir", str(tmp_path)).stdout.splitlines()
    assert lines[-1].split(maxsplit=1) == ["mine", "BF16 of ours."]
    assert len(lines) == len(run("recipes").stdout.splitlines()) + 1
    assert run("recipes", "--config-dir", "nowhere").returncode == 2


def test_yaml_recipes_of_a_teams_folder_are_known_by_name(tmp_path: Path) -> None:
    (tmp_path / "mixed_precision").mkdir()
    (tmp_path / "mixed_precision" / "team_yaml.yaml").write_text(
        "# What we train with.\ndefaults: [fp8_current, _self_]\nfp8: e4m3\n"
    )
    folder = ("--config-dir", str(tmp_path))
    told = json.loads(run("recipes", "team_yaml", *folder, "--json").stdout)
    assert (told["name"], told["scheme"], told["fields"]["fp8"]) == ("team_yaml", "tensorwise", "e4m3")
    assert run("recipes", "team_yaml", *folder).stdout.startswith("team_yaml\n\nWhat we train with.\n\n")
    assert run("recipes", "fp8_current", "team_yaml", *folder).stdout.splitlines() == [
        "                                    bf16_with_fp8_current_scaling_mixed -> team_yaml",
        "  fp8                               hybrid -> e4m3",
    ]
    assert run("plan", "team_yaml", *folder).stdout.startswith("team_yaml; layers count from 1\n")
    assert run("recipes", "team_yml", *folder).stderr.startswith("mixed_precision: no such recipe, got 'team_yml'")


def test_explain_tells_meaning_homes_and_where_it_acts() -> None:
    told = json.loads(run("explain", "autocast_enabled", "bf16_autocast_mixed", "--json").stdout)
    assert told["homes"][0]["attribute"] == "enable_autocast"
    assert told["in_recipe"] == {
        "recipe": "bf16_autocast_mixed",
        "value": True,
        "stated": True,
        "by": "recipe bf16_autocast_mixed",
    }
    assert run("explain", "enable_autocast").stdout.startswith("autocast_enabled: bool = False\n")
    text = run("explain", "fp8_margin").stdout
    assert "Read under: delayed." in text
    assert "model.fp8_margin (TransformerConfig, megatron-core >= 0.16.1)" in text
    assert "No field of TransformerConfig" in run("explain", "fp32").stdout
    listed = [line.split()[0] for line in run("explain").stdout.splitlines() if line.startswith("  ")]
    assert listed == [name for names in FIELDS_BY_SUBJECT.values() for name in names]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("recipe", "bf16_mixed"), "precision-bridge: no command 'recipe'. Did you mean 'recipes'?\n"),
        (
            ("explain", "fp8_marign"),
            "Unknown field 'fp8_marign'. Did you mean 'fp8_margin', 'fp8_param' or 'fp8_recipe'?\n",
        ),
        (
            ("explain", "softmax"),
            "Unknown field 'softmax'. Did you mean 'attention_softmax_in_fp32'?\n",
        ),
        (
            ("recipes", "bf16_mixd"),
            "Unknown mixed-precision recipe 'bf16_mixd'. Did you mean 'bf16_mixed', 'fp16_mixed' or "
            "'bf16_with_fp8_mixed'? `precision-bridge recipes` lists all 18; BRIDGE_RECIPES=FILE.py adds yours.\n",
        ),
    ],
)
def test_a_misspelling_is_answered_with_the_nearest_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)


def test_explain_finds_a_recipe_of_a_teams_folder(tmp_path: Path) -> None:
    (tmp_path / "mixed_precision").mkdir()
    (tmp_path / "mixed_precision" / "mine.yaml").write_text("bf16: true\ngrad_reduce_in_fp32: false\n")
    text = run("explain", "grad_reduce_in_fp32", "mine", "--config-dir", str(tmp_path)).stdout
    assert "  In mine: False, stated by " in text


def test_a_reader_that_stops_early_is_no_error() -> None:
    done = subprocess.run(f"{COMMAND} explain | head -1", shell=True, capture_output=True, text=True, check=True)  # noqa: S602
    assert done.stderr == ""


def test_a_reader_that_stops_early_leaves_the_answers_exit_code_or_that_of_a_broken_pipe() -> None:
    wrong = f"{COMMAND} check bf16_mixed model.tensor_model_parallel_size=3 --json"
    for command, codes in ((wrong, {2, 141}), (f"{COMMAND} explain rules", {0, 141})):
        words = f"{command} | true; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=True)
        assert int(done.stdout) in codes
        assert done.stderr == ""


def test_a_source_that_fails_half_way_leaves_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(
        "from bridge.training.mixed_precision import MixedPrecisionConfig, register\n"
        "@register\ndef half_of_it():\n    return MixedPrecisionConfig(bf16=True)\n"
        "import a_package_that_is_not_there\n"
    )
    done = run("recipes", BRIDGE_RECIPES=str(tmp_path / "half.py"))
    assert done.stderr.startswith("Recipes not loaded: ")
    assert "half_of_it" not in done.stdout


def test_a_file_with_the_name_of_a_recipe_is_refused_by_show_too(tmp_path: Path) -> None:
    (tmp_path / "mixed_precision").mkdir()
    (tmp_path / "mixed_precision" / "bf16_mixed.yaml").write_text("bf16: true\n")
    done = run("recipes", "bf16_mixed", "--config-dir", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("mixed_precision/bf16_mixed: is both a registered recipe and a YAML file, got ")


def test_a_teams_recipes_are_listed_and_a_broken_source_is_named_on_stderr(tmp_path: Path) -> None:
    path = tmp_path / "team.py"
    path.write_text(
        "from bridge import MixedPrecisionConfig, register\n"
        "@register\ndef ours():\n    'What we train with.'\n    return MixedPrecisionConfig(bf16=True)\n"
    )
    done = run("recipes", BRIDGE_RECIPES=f"{path}:nowhere.py")
    assert any(line.split() == ["ours", "What", "we", "train", "with."] for line in done.stdout.splitlines())
    assert done.stderr.count("nowhere.py") == 2, "the entry, and the sentence why"
    assert done.stderr.startswith("Recipes not loaded: BRIDGE_RECIPES entry 'nowhere.py': BRIDGE_RECIPES: there is no")
    unknown = run("recipes", "ourz", BRIDGE_RECIPES=f"{path}:nowhere.py")
    assert len(unknown.stderr.splitlines()) == 2
    assert unknown.stderr.count("nowhere.py") == 2
