"""Python programs of Megatron Bridge: the precisions that `convert` reads of their functions, by syntax alone."""

from pathlib import Path
from typing import Any

import pytest

from bridge.cli.main import main
from bridge.convert.conversion import import_runs
from bridge.errors import PayloadError
from bridge.precision.mode import get_mode
from bridge.read.text.document import Document

IMPORTS = """\
from megatron.bridge.recipes.nemotronh.base import base_config
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.mixed_precision import *
from megatron.bridge.recipes.tuning import tuned
"""


def found(body: str) -> list[tuple[str | None, dict[str, Any]]]:
    """Return what decides each run of a program, or None, and the fields that it states."""
    runs = import_runs(Document.from_text(f"{IMPORTS}{body}", "a.py"))
    assert {run.system.name for run in runs} == {"megatron-bridge"}
    return [(run.imported.decided_by, run.imported.config.to_dict()) for run in runs]


def labels(body: str) -> list[str]:
    return [run.imported.label for run in import_runs(Document.from_text(f"{IMPORTS}{body}", "a.py"))]


def only(body: str) -> dict[str, Any]:
    ((decided_by, fields),) = found(body)
    assert decided_by is None
    return fields


def test_a_recipe_and_a_field_assigned_after_it() -> None:
    body = "def one():\n    cfg = base_config()\n    cfg.mixed_precision = bf16_mixed()\n"
    fields = only(f"{body}    cfg.mixed_precision.grad_reduce_in_fp32 = False\n    return cfg\n")
    assert fields["bf16"] is True
    assert fields["grad_reduce_in_fp32"] is False


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('"bf16_with_mxfp8_mixed"', {"fp8_recipe": "mxfp8"}),
        ('get_mixed_precision_config("bf16_with_mxfp8_mixed")', {"fp8_recipe": "mxfp8"}),
        ("bf16_with_mxfp8_mixed()", {"fp8_recipe": "mxfp8"}),
        ("MixedPrecisionConfig(fp16=True, loss_scale=1024.0)", {"fp16": True, "loss_scale": 1024.0}),
        ("NAME", {"fp8_recipe": "mxfp8"}),
    ],
)
def test_each_form_of_a_precision_is_read(written: str, expected: dict[str, Any]) -> None:
    fields = only(f'NAME = "bf16_with_mxfp8_mixed"\ndef one(cfg):\n    cfg.mixed_precision = {written}\n')
    assert expected.items() <= fields.items()


def test_a_container_that_is_constructed_with_a_precision() -> None:
    body = "def one():\n    p = get_mixed_precision_config('bf16_mixed')\n    p.grad_reduce_in_fp32 = False\n"
    fields = only(f"{body}    return ConfigContainer(model=1, mixed_precision=p)\n")
    assert fields["grad_reduce_in_fp32"] is False


def test_a_precision_of_a_container_that_another_file_makes() -> None:
    assert labels("from mine import cfg\ncfg.mixed_precision = bf16_mixed()\n") == ["line 1, the module"]


@pytest.mark.parametrize(
    ("constructor", "assignment", "is_gathered"),
    [("", "fp8_param = True", True), ("", "hysteresis = 4", False), ("fp8_param=True", "hysteresis = 4", False)],
)
def test_the_twin_name_of_stored_weights_acts_where_it_is_assigned(
    constructor: str, assignment: str, is_gathered: bool
) -> None:
    body = f"def one(cfg):\n    cfg.mixed_precision = MixedPrecisionConfig({constructor})\n"
    fields = only(f"{body}    cfg.mixed_precision.bf16 = True\n    cfg.mixed_precision.{assignment}\n")
    assert bool(fields.get("fp8_param_gather")) is is_gathered


def test_functions_that_differ_are_runs_and_those_that_agree_are_one() -> None:
    body = "".join(
        f"def {name}(cfg):\n    cfg.mixed_precision = '{recipe}'\n"
        for name, recipe in (("a", "bf16_mixed"), ("b", "fp16_mixed"), ("c", "bf16_mixed"))
    )
    assert labels(body) == ["line 5, a and line 9, c", "line 7, b"]


def test_a_function_of_the_file_is_followed_with_its_arguments() -> None:
    body = "def inner(name, reduce=True):\n    cfg = base_config()\n"
    body += "    cfg.mixed_precision = get_mixed_precision_config(name)\n"
    body += "    cfg.mixed_precision.grad_reduce_in_fp32 = reduce\n    return cfg\n"
    body += "def outer():\n    cfg = inner('fp16_mixed', reduce=False)\n"
    body += "    cfg.mixed_precision.hysteresis = 4\n    return cfg\n"
    (_, (decided_by, fields)) = found(body)
    assert decided_by is None
    assert (fields["fp16"], fields["grad_reduce_in_fp32"], fields["hysteresis"]) == (True, False, 4)


def test_a_function_that_sets_the_container_it_is_given_is_followed() -> None:
    body = "def lower(cfg):\n    cfg.mixed_precision.grad_reduce_in_fp32 = False\n"
    body += (
        "def one():\n    cfg = base_config()\n    cfg.mixed_precision = bf16_mixed()\n    lower(cfg)\n    return cfg\n"
    )
    assert found(body)[1][1]["grad_reduce_in_fp32"] is False


def test_both_branches_of_a_condition_are_runs() -> None:
    body = "def one(cfg, low):\n    if low:\n        cfg.mixed_precision = 'bf16_with_mxfp8_mixed'\n    else:\n"
    body += "        cfg.mixed_precision = 'bf16_mixed'\n"
    assert labels(body) == ["line 5, one; where low", "line 5, one; where not low"]
    assert [fields.get("fp8") for _, fields in found(body)] == ["e4m3", None]


def test_a_condition_on_which_no_precision_depends_is_no_run() -> None:
    body = "def one(cfg, low):\n    if low:\n        cfg.mixed_precision = bf16_mixed()\n    else:\n"
    assert labels(f"{body}        cfg.mixed_precision = 'bf16_mixed'\n") == ["line 5, one"]


def test_of_many_conditions_the_last_ones_are_named_and_open() -> None:
    body = "def one(cfg, a, b, c, d, e):\n    cfg.mixed_precision = bf16_mixed()\n"
    fields = ("hysteresis", "loss_scale", "min_loss_scale", "initial_loss_scale", "loss_scale_window")
    for condition, name in zip("abcde", fields, strict=True):
        body += f"    if {condition}:\n        cfg.mixed_precision.{name} = 4.0\n"
    runs = import_runs(Document.from_text(f"{IMPORTS}{body}", "a.py"))
    assert len(runs) == 16
    records = {(one.field, one.value) for run in runs for one in run.imported.unmapped}
    assert records == {("mixed_precision.loss_scale_window", "`e`")}


def test_a_function_with_too_many_branches_is_open() -> None:
    body = "def one(cfg, k):\n    cfg.mixed_precision = bf16_mixed()\n"
    for number in range(24):
        body += f"    if k.a{number}:\n        if k.b{number}:\n            return cfg\n        cfg.c{number} = 1\n"
    ((decided_by, _),) = found(f"{body}    return cfg\n")
    assert decided_by == "a function with too many branches to be followed"


def test_a_function_that_raises_with_its_defaults_is_read_with_open_arguments() -> None:
    body = "def one(cfg, root=None):\n    if root is None:\n        raise ValueError\n"
    assert labels(f"{body}    return ConfigContainer(mixed_precision='bf16_mixed')\n") == ["line 5, one"]


def test_a_function_that_got_the_container_before_cannot_change_what_is_set_later() -> None:
    body = (
        "def one():\n    cfg = base_config()\n    tuned(cfg)\n    cfg.mixed_precision = bf16_mixed()\n    return cfg\n"
    )
    (run,) = import_runs(Document.from_text(f"{IMPORTS}{body}", "a.py"))
    assert (run.imported.recipe, run.imported.unmapped) == ("bf16_mixed", ())


def test_a_condition_that_the_file_answers_is_no_branch() -> None:
    body = "def inner(name):\n    cfg = base_config()\n    cfg.mixed_precision = get_mixed_precision_config(name)\n"
    body += "    if name == 'fp16_mixed':\n        cfg.mixed_precision.hysteresis = 4\n    return cfg\n"
    body += "def outer():\n    cfg = inner('bf16_mixed')\n    cfg.mixed_precision.loss_scale = None\n    return cfg\n"
    assert "hysteresis" not in found(body)[-1][1]


@pytest.mark.parametrize(
    ("body", "decided_by"),
    [
        (
            "def one():\n    cfg = base_config()\n    cfg.mixed_precision.hysteresis = 4\n",
            "`base_config()` of megatron.bridge",
        ),
        ("def one(cfg, name):\n    cfg.mixed_precision = name\n", "the argument name of one"),
        ("def one(cfg, args):\n    cfg.mixed_precision = args.p\n", "the argument args of one"),
        ("from mine import P\ndef one(cfg):\n    cfg.mixed_precision = P\n", "`mine.P`, whose source is not at hand,"),
        ("def one(cfg):\n    cfg.mixed_precision = 'mine'\n", "the recipe 'mine', which is not registered here,"),
        ("def one(cfg):\n    cfg.mixed_precision = 16\n", "the value 16, which is no precision,"),
        ("def one(cfg):\n    cfg.mixed_precision = None\n", "the model's own settings, as mixed_precision is not set,"),
    ],
)
def test_what_the_file_does_not_hold_is_named(body: str, decided_by: str) -> None:
    ((found_decider, fields),) = found(body)
    assert str(found_decider).startswith(decided_by)
    assert not {"bf16", "fp16", "fp32"} & fields.keys()


def test_a_function_of_another_file_that_gets_the_container_afterwards_is_named() -> None:
    body = (
        "def one():\n    cfg = base_config()\n    cfg.mixed_precision = bf16_mixed()\n    tuned(cfg)\n    return cfg\n"
    )
    (run,) = import_runs(Document.from_text(f"{IMPORTS}{body}", "a.py"))
    (record,) = [one for one in run.imported.unmapped if one.field == "mixed_precision"]
    assert record.detail == "the function tuned of another file gets the run afterwards, and may change its precision"
    assert run.imported.recipe is None


def test_a_field_that_only_the_run_decides_is_reported() -> None:
    body = "def one(cfg, reduce):\n    cfg.mixed_precision = bf16_mixed()\n"
    (run,) = import_runs(
        Document.from_text(f"{IMPORTS}{body}    cfg.mixed_precision.grad_reduce_in_fp32 = reduce\n", "a.py")
    )
    (record,) = [one for one in run.imported.unmapped if one.field == "mixed_precision.grad_reduce_in_fp32"]
    assert (record.value, record.detail) == ("the argument reduce of one", "only the run decides it")


def test_a_default_of_an_argument_is_said_to_be_one() -> None:
    assert labels("def one(cfg, p='bf16_mixed'):\n    cfg.mixed_precision = p\n") == [
        "line 5, one; as the default of p"
    ]


def test_a_program_that_states_no_precision_is_refused_in_one_sentence() -> None:
    with pytest.raises(
        PayloadError, match=r"^a\.py: must set the mixed_precision of a run, and no function of it does"
    ):
        import_runs(Document.from_text(f"{IMPORTS}def one():\n    return base_config()\n", "a.py"))


def test_a_folder_named_nemotron_makes_no_program_of_nemo() -> None:
    text = "from megatron.bridge.recipes.nemotronh.x import y\ndef one(cfg):\n    cfg.mixed_precision = bf16_mixed()\n"
    (run,) = import_runs(Document.from_text(text, "a.py"))
    assert run.system.name == "megatron-bridge"


def test_a_program_is_no_file_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.py").write_text("from megatron.bridge.recipes.common import a\ncfg = a()\n")
    (tmp_path / "train.py").write_text("x = {1: 2}\n")
    for command in ("check", "plan", "memory"):
        assert main([command, "--config", "recipe.py"]) == 2
        assert capsys.readouterr().err == (
            "recipe.py: imports Megatron Bridge, and no public function of it returns a new ConfigContainer or calls "
            "pretrain() or finetune(). It names recipes of other files: give one of those.\n"
        )
        assert main([command, "--config", "train.py"]) == 2
        assert capsys.readouterr().err == (
            "train.py: must be a run's file, got a Python program. "
            "Give the launch script or the configuration of the run.\n"
        )


@pytest.mark.parametrize(
    ("arguments", "mode", "decided_by"),
    [
        ("mixed_precision=bf16_with_mxfp8_mixed", "bf16", None),
        ("train.train_iters=10", None, "the recipe llama3_8b_pretrain_config"),
        ("model.tensor_model_parallel_size=2", None, "the recipe llama3_8b_pretrain_config"),
        ("mixed_precision.fp8_recipe=mxfp8", None, "the recipe llama3_8b_pretrain_config"),
    ],
)
def test_the_recipe_of_a_launcher_decides_the_rest(arguments: str, mode: str | None, decided_by: str | None) -> None:
    text = f"#!/bin/bash\ntorchrun scripts/training/run_recipe.py --recipe llama3_8b_pretrain_config {arguments}\n"
    (run,) = import_runs(Document.from_text(text, "run.sh"))
    assert run.system.name == "megatron-bridge"
    assert run.imported.decided_by == decided_by
    assert mode is None or get_mode(run.imported.config) == mode
    assert mode is None or run.evidence.endswith("and the recipe llama3_8b_pretrain_config decides the rest")
