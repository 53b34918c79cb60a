"""`precision-bridge sources`: what a project says about its precision, in how many places."""

import json
import os
import shutil
from pathlib import Path

import pytest

from bridge.cli.main import main
from bridge.convert.survey import files as project_files
from bridge.convert.survey import survey as project_module
from bridge.convert.survey.source import ORDER
from bridge.convert.survey.survey import Survey, survey
from bridge.errors import PayloadError
from bridge.read.text.document import Document

SAMPLES = Path(__file__).parents[2] / "read" / "samples"
ACCELERATE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: fp16\nnum_processes: 8\n"
)
DEEPSPEED = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
BRIDGE = "from megatron.bridge.training.mixed_precision import get_mixed_precision_config\n"
TRAINER = "output_dir: out\nper_device_train_batch_size: 1\nbf16: true\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "accelerate.yaml").write_text(ACCELERATE)
    (tmp_path / "configs" / "ds.json").write_text(DEEPSPEED)
    (tmp_path / ".env").write_text("export ACCELERATE_MIXED_PRECISION=fp8\nNVIDIA_TF32_OVERRIDE='0'\nOTHER=1\n")
    (tmp_path / "ci.yaml").write_text("on: push\njobs: {test: {runs-on: ubuntu}}\n")
    (tmp_path / "broken.yaml").write_text("mixed_precision: [bf16\n")
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "ds.json").write_text(DEEPSPEED)
    shutil.copy(SAMPLES / "te_precision.yaml", tmp_path / "te.yaml")
    return tmp_path


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELERATE_MIXED_PRECISION", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)


def surveyed(folder: Path, **files: str) -> Survey:
    """Survey a folder of files: `run_sh` is `run.sh`, and `a__b_py` is `a/b.py`."""
    for name, text in files.items():
        stem, _, suffix = name.replace("__", "/").rpartition("_")
        (folder / f"{stem}.{suffix}").parent.mkdir(exist_ok=True, parents=True)
        (folder / f"{stem}.{suffix}").write_text(text)
    return survey(folder, {})


def test_each_source_says_what_it_says(project: Path) -> None:
    found = survey(project, {"ACCELERATE_MIXED_PRECISION": "bf16", "PATH": "/bin"})
    told = {(source.path, source.system): (source.kind, source.precision) for source in found.sources}
    assert told == {
        (".env", "accelerate"): (".env file", "bf16 + fp8"),
        (".env", "torch"): (".env file", None),
        ("configs/ds.json", "deepspeed"): ("unnamed deepspeed", "bf16"),
        ("te.yaml", "te-precision-file"): ("per module", None),
        ("environment", "accelerate"): ("process", "bf16"),
    }
    assert list(found.unread) == ["broken.yaml", "configs/accelerate.yaml"]
    assert "must be YAML" in found.unread["broken.yaml"]
    assert "looks like Accelerate" in found.unread["configs/accelerate.yaml"]


def test_a_te_precision_file_says_which_modules_run_in_what(project: Path) -> None:
    (source,) = [source for source in survey(project, {}).sources if source.kind == "per module"]
    assert source.says == "*output_layer* -> high precision; * -> nvfp4"


# -- which one wins ------------------------------------------------------------------------------------------------


def test_they_disagree_and_the_order_decides(project: Path) -> None:
    found = survey(project, {})
    assert not found.agree
    assert found.winner is not None
    assert found.winner.path == "configs/ds.json"
    shutil.copy(SAMPLES / "conf_only.sh", project / "run.sh")
    assert survey(project, {}).winner.path == "run.sh"


def test_a_deepspeed_file_that_a_script_names_wins_over_the_script(tmp_path: Path) -> None:
    script = "torchrun run_clm.py --output_dir o --do_train --fp16 --deepspeed configs/ds.json\n"
    found = surveyed(tmp_path, configs__ds_json=DEEPSPEED, run_sh=script)
    assert (found.winner.kind, found.winner.path) == ("deepspeed", "configs/ds.json")
    commented = script.replace(" --deepspeed", "  # --deepspeed")
    assert surveyed(tmp_path, run_sh=commented).winner.kind == "launch script"


def test_a_program_wins_over_the_flags_of_the_script_that_starts_it_alone(tmp_path: Path) -> None:
    program = f'{BRIDGE}get_mixed_precision_config("fp16_mixed")\n'
    script = "torchrun train.py --num-layers 2 --hidden-size 8 --bf16\n"
    found = surveyed(tmp_path, train_py=program, run_sh=script)
    assert [(source.kind, source.precision) for source in found.ranked] == [
        ("started program", "fp16"),
        ("launch script", "bf16"),
    ]
    (tmp_path / "train.py").rename(tmp_path / "evaluate.py")
    assert [source.kind for source in survey(tmp_path, {}).ranked] == ["launch script", "program"]


def test_a_flag_of_accelerates_launcher_goes_over_a_variable_and_under_a_program(tmp_path: Path) -> None:
    launch = "accelerate launch --mixed_precision bf16 train.py --output_dir o --do_train\n"
    found = surveyed(
        tmp_path,
        run_sh=f"export ACCELERATE_MIXED_PRECISION=fp8\n{launch}",
        train_py=f'{BRIDGE}get_mixed_precision_config("fp16_mixed")\n',
    )
    assert [(source.kind, source.precision) for source in found.ranked] == [
        ("started program", "fp16"),
        ("accelerate flag", "bf16"),
        ("script variable", "bf16 + fp8"),
    ]


def test_two_of_one_kind_that_differ_have_no_winner(project: Path) -> None:
    shutil.copy(SAMPLES / "several.sh", project / "run.sh")
    assert survey(project, {}).winner is None


def test_each_launch_of_a_script_is_of_its_own_system(tmp_path: Path) -> None:
    script = (
        "torchrun run_clm.py --output_dir o --do_train --bf16\n"
        "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 8 --fp16\n"
    )
    found = surveyed(tmp_path, run_sh=script)
    told = {(source.system, source.kind, source.precision) for source in found.sources}
    assert told == {("huggingface", "launch script", "bf16"), ("megatron-lm", "launch script", "fp16")}
    assert all(source.evidence for source in found.sources)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '{"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}',
            'the layer above that fills in "auto" (transformers, accelerate) decides',
        ),
        (
            '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}',
            "the trainer that reads it (DeepSpeed 0.19.8 by itself keeps the model's own dtype) decides",
        ),
    ],
)
def test_a_deepspeed_file_that_leaves_it_to_the_trainer_does_not_win(tmp_path: Path, text: str, says: str) -> None:
    found = surveyed(tmp_path, ds_json=text, train_yaml=TRAINER)
    assert found.winner.path == "train.yaml"
    assert [source.says for source in found.partial] == [says]


def test_training_arguments_without_a_switch_leave_it_to_the_environment(tmp_path: Path) -> None:
    text = TRAINER.replace("true", "false")
    (tmp_path / ".env").write_text("ACCELERATE_MIXED_PRECISION=fp16\n")
    found = surveyed(tmp_path, train_yaml=text)
    assert found.winner.path == ".env"
    assert "the environment's ACCELERATE_MIXED_PRECISION, and without it" in found.partial[0].says


def test_sources_that_agree_say_so(tmp_path: Path, capsys) -> None:
    (tmp_path / "a.json").write_text(DEEPSPEED)
    (tmp_path / "b.yaml").write_text(TRAINER)
    assert survey(tmp_path, {}).agree
    assert main(["sources", str(tmp_path)]) == 0
    assert "All agree on bf16, under different semantics: " in capsys.readouterr().out
    (tmp_path / "a.json").unlink()
    assert main(["sources", str(tmp_path)]) == 0
    assert "All agree: bf16." in capsys.readouterr().out


# -- scripts and variables -----------------------------------------------------------------------------------------


def test_variables_that_a_script_exports_are_sources(tmp_path: Path) -> None:
    shutil.copy(SAMPLES / "awkward.sh", tmp_path / "run.sh")
    said = {source.says for source in survey(tmp_path, {}).sources}
    assert {"NVIDIA_TF32_OVERRIDE=0", "NVTE_FP8_DPA_BWD=1"} <= said


@pytest.mark.parametrize(
    "script",
    [
        "export ACCELERATE_MIXED_PRECISION=fp8\npython train.py\n",
        "export ACCELERATE_MIXED_PRECISION=fp8\nmy-trainer go\n",
        "export ACCELERATE_MIXED_PRECISION=fp8\n",
        "ACCELERATE_MIXED_PRECISION=fp8 python train.py\n",
    ],
)
def test_exports_of_scripts_that_nothing_recognises_are_listed(tmp_path: Path, script: str) -> None:
    (source,) = surveyed(tmp_path, run_sh=script).sources
    assert (source.kind, source.says) == ("script variable", "ACCELERATE_MIXED_PRECISION=fp8")


def test_a_variable_whose_value_only_a_run_knows_is_listed_as_written(tmp_path: Path) -> None:
    (source,) = surveyed(tmp_path, run_sh="export ACCELERATE_MIXED_PRECISION=$(cat mode)\npython x.py\n").sources
    assert (source.says, source.precision) == ("ACCELERATE_MIXED_PRECISION=$(cat mode)", None)


def test_a_script_that_is_not_understood_is_named_where_it_bears_on_precision(tmp_path: Path) -> None:
    found = surveyed(
        tmp_path,
        build_docs_sh="#!/bin/bash\n# half of the docs, in fp16\ncd docs && make html\n",
        run_sh="python train.py --precision bf16 --amp-dtype bf16\n",
        torn_sh="echo bf16; if true; then\n",
        harmless_sh="if true; then\n",
    )
    assert sorted(found.unread) == ["run.sh", "torn.sh"]
    assert found.unread["torn.sh"].startswith(f"{tmp_path / 'torn.sh'}, line 1: must be bash that can be read here")


def test_a_dotenv_value_ends_where_its_comment_begins(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("ACCELERATE_MIXED_PRECISION=bf16  # the default\nNVTE_FP8_DPA_BWD='1' # on\n")
    said = [source.says for source in survey(tmp_path, {}).sources]
    assert said == ["ACCELERATE_MIXED_PRECISION=bf16", "NVTE_FP8_DPA_BWD=1"]


# -- what is not read ----------------------------------------------------------------------------------------------


def test_files_that_are_too_large_are_named_where_they_look_relevant(tmp_path: Path) -> None:
    rest = '", "x": "' + "x" * 600_000 + '"}'
    found = surveyed(
        tmp_path,
        data_json='{"text": "plain' + rest,
        mixed_json='{"bf16": "on' + rest,
        run_sh="torchrun a.py --bf16\n" + "#" * 600_000,
        train_py="# nothing\n" + "x = 1\n" * 100_000,
    )
    assert sorted(found.unread) == ["mixed.json", "run.sh"]
    assert "must not be larger than 512 KiB" in found.unread["run.sh"]


def test_broken_files_without_a_word_on_precision_are_passed_over(tmp_path: Path) -> None:
    found = surveyed(tmp_path, a_yaml="a: [1\n", b_json="{", c_py="x = (", d_py="x = 'mixed_precision' (")
    assert list(found.unread) == ["d.py"]
    assert found.unread["d.py"].startswith(f"{tmp_path / 'd.py'}, line 1: must be Python")


def test_a_project_file_in_toml_is_no_script(tmp_path: Path) -> None:
    text = '[project]\ndependencies = [\n    "torch; python_version < \'4\'",\n]\nx = { fp16 = 1 }\nexport = "bf16"\n'
    assert surveyed(tmp_path, pyproject_toml=text).unread == {}


def test_it_says_that_it_stopped_after_so_many_files(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(project_files, "MAX_FILES", 2)
    found = surveyed(tmp_path, a_json=DEEPSPEED, b_json=DEEPSPEED, c_json=DEEPSPEED)
    assert len(found.sources) == 2
    assert found.limits == ("stopped after 2 files, others may follow: give a smaller folder",)
    assert main(["sources", str(tmp_path)]) == 0
    assert "not complete: stopped after 2 files" in capsys.readouterr().out


def test_odd_files_and_folders_are_survived(tmp_path: Path, capsys) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone.yaml").symlink_to(tmp_path / "nowhere")
    with (tmp_path / os.fsdecode(b"odd\xff\x1b.yaml")).open("w") as stream:
        stream.write(TRAINER)
    assert main(["sources", str(tmp_path)]) == 0
    assert "odd\ufffd?.yaml" in capsys.readouterr().out


def test_it_says_what_it_did_not_look_at(tmp_path: Path) -> None:
    found = surveyed(tmp_path, tests__x_py="x = 1", test_y_py="y = 1", a__conftest_py="")
    assert found.sources == ()
    assert found.limits == ("Python tests were not looked at: 3",)


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_prints_a_verdict(project: Path, capsys) -> None:
    assert main(["sources", str(project)]) == 0
    printed, _, unread = capsys.readouterr().out.partition("not read: ")
    assert " ".join(unread.split()).startswith(
        f"{project / 'broken.yaml'}, line 2: must be YAML; did not find expected ',' or ']'. Correct it there. "
        f"not read: {project / 'configs/accelerate.yaml'}: looks like Accelerate (it has `distributed_type` and "
    )
    assert printed.splitlines() == [
        "unnamed deepspeed:",
        "  bf16 (deepspeed)         configs/ds.json",
        ".env file:",
        "  bf16 + fp8 (accelerate)  .env: ACCELERATE_MIXED_PRECISION=fp8",
        "these do not decide the precision of a whole run:",
        "  torch              .env: NVIDIA_TF32_OVERRIDE=0",
        "  te-precision-file  te.yaml: *output_layer* -> high precision; * -> nvfp4",
        "",
        "They disagree. Of those that one run uses, the one that stands first above wins.",
        "configs/ds.json wins (unnamed deepspeed): nothing names it here, so that it counts, and then first,",
        "  where it is given by hand.",
        "Without it, .env wins (.env file).",
        "This is about the files that were read; those that were not are named below.",
    ]


def test_the_command_prints_json(project: Path, capsys) -> None:
    assert main(["sources", str(project), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"sources", "agree", "winner", "unread", "limits"}
    assert told["winner"]["path"] == "configs/ds.json"


def test_many_files_are_grouped_and_none_of_them_is_the_winner(tmp_path: Path, capsys) -> None:
    for place in range(20):
        text = TRAINER if place % 5 else TRAINER.replace("bf16", "fp16")
        surveyed(tmp_path, **{f"examples__a_rather_long_name_of_a_folder__another_one__train_{place:02}_yaml": text})
    surveyed(tmp_path, ds_json=DEEPSPEED)
    assert main(["sources", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 20
    assert sum("more (--all lists them)" in line for line in lines) == 1
    told = " ".join(" ".join(lines).split())
    assert "21 files are more than one run uses" in told
    assert " wins (" not in told
    assert main(["sources", str(tmp_path), "--all"]) == 0
    out = capsys.readouterr().out
    assert all(f"train_{place:02}.yaml" in out for place in range(20))


def test_several_that_say_the_same_win_together(tmp_path: Path, capsys) -> None:
    (tmp_path / ".env").write_text("ACCELERATE_MIXED_PRECISION=fp16\n")
    surveyed(tmp_path, a_yaml=TRAINER, b_yaml=TRAINER)
    assert main(["sources", str(tmp_path)]) == 0
    assert "a.yaml and 1 more that say the same win (training file)" in capsys.readouterr().out


def test_an_empty_project_has_no_source(tmp_path: Path, capsys) -> None:
    assert main(["sources", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("No source of precision was found.")
    with pytest.raises(PayloadError, match="must be a folder"):
        survey(tmp_path / "missing")


def test_the_order_is_the_one_of_the_manual() -> None:
    manual = (Path(__file__).parents[3] / "docs" / "howto" / "sources.md").read_text()
    rows = [line.split("`")[1] for line in manual.splitlines() if line.startswith("| `")]
    assert rows == list(ORDER)


def test_an_unexpected_error_takes_one_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_reader: object, document: Document, _name: str) -> None:
        if document.path.endswith("b.yaml"):
            raise KeyError("x")

    monkeypatch.setattr(project_module._Reader, "read", broken)
    found = surveyed(tmp_path, a_yaml=TRAINER, b_yaml=TRAINER)
    path = tmp_path / "b.yaml"
    assert found.unread == {"b.yaml": f"{path}: reading it ended in an unexpected KeyError"}


def test_a_linked_folder_is_said_to_be_passed_over(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").symlink_to("here")
    assert survey(tmp_path, {}).limits == ("folders that are symbolic links were not followed: 1",)


# -- what was not judged -----------------------------------------------------------------------------------------------

FP8 = "python3 train.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --bf16 --fp8-format e4m3\n"
OPEN = "python3 train.py --num-layers 4 --hidden-size 64 --num-attention-heads 4\n"


def printed_of(tmp_path: Path, capsys, **files: str) -> str:
    for name, text in files.items():
        (tmp_path / name.replace("_", ".")).write_text(text)
    assert main(["sources", str(tmp_path)]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_script_that_leaves_its_mode_open_is_not_said_to_agree(tmp_path: Path, capsys) -> None:
    printed = printed_of(tmp_path, capsys, one_sh=FP8, two_sh=OPEN)
    assert "1 of 2 states it: bf16 + fp8 delayed (left open by two.sh)." in printed
    assert "All agree" not in printed
    assert survey(tmp_path, {}).agree is None
    assert survey(tmp_path, {}).winner is None


def test_a_file_that_is_not_read_is_counted_and_named_with_the_reason(tmp_path: Path, capsys) -> None:
    policy = "policy: {precision: bfloat16, megatron_cfg: {enabled: true}}\n"
    printed = printed_of(tmp_path, capsys, one_sh=FP8, a_yaml=policy, b_yaml=policy)
    assert "1 of 3 states it: bf16 + fp8 delayed (not read: 2)." in printed
    assert "not read: 2 files (a.yaml, b.yaml): looks like NeMo RL (it has `policy.megatron_cfg`)" in printed


def test_a_folder_of_files_that_are_not_read_is_not_said_to_hold_none(tmp_path: Path, capsys) -> None:
    policy = "policy: {precision: bfloat16, megatron_cfg: {enabled: true}}\n"
    printed = printed_of(tmp_path, capsys, a_yaml=policy)
    assert printed.startswith("No source of precision was read. not read: ")


def test_a_configuration_of_no_known_system_whose_keys_state_a_precision_is_named(tmp_path: Path) -> None:
    found = surveyed(tmp_path, a_yaml="train: {engine: {precision: bf16}}\n", b_yaml="precision: null\nlayers: 2\n")
    assert [*found.unread] == ["a.yaml"]
    assert found.unread["a.yaml"].endswith("a key states a precision. Look at train.engine.precision.")


def test_a_precision_that_a_program_assigns_is_a_source(tmp_path: Path) -> None:
    text = (
        "from megatron.bridge.recipes.common import base\ndef one():\n    cfg = base()\n    cfg.mixed_precision = {}\n"
    )
    recipes = {"a_py": '"bf16_mixed"', "b_py": '"bf16_with_mxfp8_mixed"'}
    found = surveyed(tmp_path, **{name: text.replace("{}", recipe) for name, recipe in recipes.items()})
    assert [(one.path, one.precision) for one in found.ranked] == [("a.py", "bf16"), ("b.py", "bf16 + fp8 mxfp8")]
    assert found.agree is False
