"""Mistakes on the command line: one message, exit code 2, no traceback, and never the advice to add a plus sign."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import bridge.front.main as front_main
from bridge.errors import RunConfigError
from bridge.front.errors import translate_errors
from bridge.front.folders import find_shipped_folder
from bridge.front.job import make_run_dir

CFG = ("--cfg", "job")
TINY = ("model=gpt_tiny", "train=smoke")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["mixed_precision=bf16_mixd"],
            "mixed_precision: no such recipe, got 'bf16_mixd' (command line). "
            "Did you mean 'bf16_mixed', 'fp16_mixed' or 'bf16_with_fp8_mixed'? "
            "`precision-bridge recipes` lists all 18; BRIDGE_RECIPES=FILE.py adds yours.",
        ),
        (
            ["model=gpt_tny"],
            "model: no such option, got 'gpt_tny' (command line). Did you mean 'gpt_tiny' or 'gpt_5m'?",
        ),
        (
            ["mixed_precison=bf16_mixed", "modle.hidden_size=3"],
            "2 settings of this run cannot be used:\n"
            "  mixed_precison: no such section or group, got 'bf16_mixed' (command line). "
            "Did you mean 'mixed_precision'?\n"
            "  modle.hidden_size: no such section or group, got 3 (command line). Did you mean 'model'?",
        ),
        (
            ["mixed_precision.fp8_marign=2", "train.train_itres=5", "train.seed=abc", "data.split=5"],
            "4 settings of this run cannot be used:\n"
            "  mixed_precision.fp8_marign: no such field, got 2 (command line). "
            "Did you mean 'fp8_margin', 'fp8_param' or 'fp8_recipe'?\n"
            "  data.split: must be text, got 5 (command line). Quote it.\n"
            "  train.seed: must be a whole number, got 'abc' (command line). Give one.\n"
            "  train.train_itres: no such field of TrainConfig, got 5 (command line). Did you mean 'train_iters'?",
        ),
        (
            ["mixed_precision.fp8=hibrid"],
            "The mixed-precision config 'bf16_mixed' can never be right:\n"
            "  mixed_precision.fp8: must be 'e4m3' or 'hybrid', got 'hibrid' (command line). Did you mean 'hybrid'?",
        ),
        (
            ["train.seed=[1"],
            "'train.seed=[1' is no override (command line). "
            "Write KEY=VALUE, and quote a value with special characters: 'KEY=\"a=b\"'.",
        ),
        (["mixed_precision"], "'mixed_precision' is no override (command line). Write mixed_precision=VALUE."),
        (["fp8_current"], "'fp8_current' is no override (command line). Write mixed_precision=fp8_current."),
        (
            ["train.seed=" + "9" * 6000],
            f"train.seed: must have at most {sys.get_int_max_str_digits()} digits, got '{'9' * 79} (command line). "
            "Write a shorter number.",
        ),
        (
            ["mixed_precision=bf16_mixed,fp16_mixed"],
            "mixed_precision: takes one value, got 'bf16_mixed,fp16_mixed' (command line). "
            "Add --multirun to run each, or write [a,b] for a list.",
        ),
        (
            ["mixed_precision=3"],
            "mixed_precision: must be the name of an option, got 3 (command line). Give one.",
        ),
        (
            ["~mixed_precision.fp8_margin"],
            "mixed_precision.fp8_margin: has no value that could be taken back (command line). "
            "Remove ~mixed_precision.fp8_margin.",
        ),
        (
            ["+mixed_precision.bf16=false"],
            "mixed_precision.bf16: has a value already (command line). "
            "Write mixed_precision.bf16=VALUE, without a sign before it.",
        ),
        (
            ["hydra.run.dri=there"],
            "hydra.run.dri: no such key (command line). Did you mean 'dir'?",
        ),
        (
            ["model.init_method._target_=os.system", "+data.path={_target_:os.system}"],
            "2 settings of this run cannot be used:\n"
            "  model.init_method._target_: configurations are data, and nothing in them is instantiated, "
            "got 'os.system' (command line). Register a recipe with recipes_from, or set the field's value.\n"
            "  data.path._target_: configurations are data, and nothing in them is instantiated, "
            "got 'os.system' (command line). Register a recipe with recipes_from, or set the field's value.",
        ),
        (
            ["+hydra.callbacks.mine._target_=os.system"],
            "hydra.callbacks.mine._target_: configurations are data, and nothing in them is instantiated, "
            "got 'os.system' (configuration). Register a recipe with recipes_from, or set the field's value.",
        ),
        (
            ["data.seed=${train.sede}"],
            "data.seed: cannot be resolved: Interpolation key 'train.sede' not found (command line). "
            "Correct the reference.",
        ),
        (
            ["recipes_from=3"],
            "recipes_from: must be a module or file, or a list of them, got 3. "
            "Write recipes_from=acme.recipes or recipes_from=[acme.recipes,lab/recipes.py].",
        ),
        (
            ["--config-name", "confg"],
            "--config-name: no such config in the folders searched, got 'confg'. "
            "Give the name of a YAML file there, without .yaml.",
        ),
        (
            ["--config-dir", "nowhere"],
            "--config-dir: there is no such folder, got 'nowhere'. Give an existing one.",
        ),
    ],
    ids=lambda value: value[0][:40] if isinstance(value, list) else "",
)
def test_a_mistake_is_answered_with_what_to_do(refused, words: list[str], message: str) -> None:
    flags, overrides = [words, []] if words[0].startswith("--") else [[], words]
    assert refused(*CFG, *flags, *overrides) == message


@pytest.mark.parametrize(
    ("defaults", "sentence"),
    [
        (
            "[bf16_mixd, _self_]",
            "mixed_precision: no such recipe, got 'bf16_mixd' (mixed_precision/mine.yaml). "
            "Did you mean 'bf16_mixed', 'fp16_mixed' or 'bf16_with_fp8_mixed'? "
            "`precision-bridge recipes` lists all 18; BRIDGE_RECIPES=FILE.py adds yours.",
        ),
        ("[/model: gpt_tny]", "model: no such option, got 'gpt_tny' (mixed_precision/mine.yaml). Did you mean"),
        ("[/modl: gpt_tiny]", "modl: no such group, got 'gpt_tiny' (mixed_precision/mine.yaml). Did you mean 'model'?"),
    ],
)
def test_a_typo_in_a_defaults_list_is_answered_with_the_nearest(
    refused, tmp_path: Path, defaults: str, sentence: str
) -> None:
    (tmp_path / "mixed_precision").mkdir()
    (tmp_path / "mixed_precision" / "mine.yaml").write_text(f"defaults: {defaults}\n")
    assert refused(*CFG, "--config-dir", str(tmp_path), "mixed_precision=mine").startswith(sentence)


def test_a_value_error_of_our_own_code_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object, **_named: object) -> int:
        return int("three")

    def prepare(_config: object) -> Callable[[Path], None]:
        return lambda _run_dir: None

    monkeypatch.setattr(front_main, "compose", broken)
    with pytest.raises(ValueError, match=r"invalid literal for int\(\) with base 10: 'three'") as caught:
        front_main.main(prepare, config_path=find_shipped_folder(), words=["mixed_precision=bf16_mixed"])
    assert type(caught.value) is ValueError


def test_a_value_error_of_omegaconf_is_a_mistake_in_the_config() -> None:
    with pytest.raises(RunConfigError) as caught, translate_errors(()):
        OmegaConf.create({"a": 1}).merge_with(object())
    assert str(caught.value).startswith("The configuration cannot be composed. ")


def test_a_list_of_numbers_is_no_option(refused) -> None:
    assert refused(*CFG, "optimizer=[1,2]") == (
        "optimizer: must be the name of an option, got [1, 2] (command line). Give one."
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.train_iters=0", "train.train_iters: must be at least 1, got 0 (command line). Use 1 or more."),
        (
            "train.micro_batch_size=3",
            "train.global_batch_size: must be a multiple of micro_batch_size 3 (command line), got 8 "
            "(train/smoke.yaml). Use 3, for example.",
        ),
        (
            "data.path=/nonexist",
            "data.path: no such file, and no .bin/.idx pair of that prefix, got '/nonexist' (command line). "
            "Give a text file or the prefix of a Megatron data set.",
        ),
        (
            "checkpoint.load=/nonexist",
            "checkpoint.load: no checkpoint there, got '/nonexist' (command line). "
            "Give the folder that an earlier run saved to, or leave it at None to start fresh.",
        ),
        (
            "precision_backend=emulate",
            "precision_backend: must be one of auto, te, emulated, te_cpu, got 'emulate' (command line). Did you mean "
            "'emulated'?",
        ),
        (
            "optimizer.lr=null",
            "optimizer.lr: a learning rate is required, got null (command line). Set it, for example 1e-3.",
        ),
        ("optimizer.lr=inf", "optimizer.lr: must be finite, got inf (command line). Use a number."),
        ("optimizer.clip_grad=nan", "optimizer.clip_grad: must be at least 0, got nan (command line). Use 0 or more."),
        (
            "model.context_parallel_size=2",
            "PB703 model.context_parallel_size: needs model.cp_comm_type=all_gather with precision_backend=emulated, "
            "got 2 (command line). Set model.cp_comm_type=all_gather.",
        ),
        (
            "model.num_attention_heads=3",
            "model.hidden_size: must be a multiple of the 3 attention heads while model.kv_channels is not set, got 64 "
            "(model/gpt_tiny.yaml). Use 2 heads, or state model.kv_channels.",
        ),
        (
            "model.position_embedding_type=bogus",
            "PB702 model.position_embedding_type: must be one of rope, learned_absolute, none, got 'bogus' (command "
            "line). Choose one of them.",
        ),
        (
            "optimizer.optimizer=adma",
            "PB702 optimizer.optimizer: must be one of adam, sgd, got 'adma' (command line). Did you mean 'adam'?",
        ),
    ],
)
def test_a_value_that_no_run_can_begin_with_leaves_no_run_folder(refused, word: str, message: str) -> None:
    assert refused(*TINY, word) == message


def test_a_run_that_the_check_stops_leaves_no_run_folder(refused) -> None:
    message = refused(*TINY, "mixed_precision=fp8_current", "target=a100x8")
    assert message.startswith("The check stops this run (")
    assert "\n  PB602 " in message


def test_a_wrong_target_leaves_no_run_folder(refused) -> None:
    assert refused(*TINY, "target=h20x8").startswith("target: must be a GPU such as h100x8 or a version such as te2.8")


def test_a_run_folder_that_cannot_be_made_leaves_no_other(refused) -> None:
    assert refused(*TINY, "logging.run_dir=/dev/null/run") == (
        "logging.run_dir: cannot be made (not a directory), got '/dev/null/run'. Give another folder."
    )


def test_a_run_folder_that_cannot_be_written_is_refused(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    with pytest.raises(RunConfigError, match=r"^logging.run_dir: cannot be written, got '.*'. Give another folder."):
        make_run_dir(str(tmp_path))


def test_an_unknown_rule_in_silence_leaves_no_run_folder(refused) -> None:
    assert refused(*TINY, "silence.PB999=why").startswith(
        "silence.PB999: must name a rule or an early warning, got 'PB999'."
    )


def test_a_wrong_line_of_yaml_is_named(refused, tmp_path: Path) -> None:
    (tmp_path / "mixed_precision").mkdir()
    path = tmp_path / "mixed_precision" / "mine.yaml"
    path.write_text("bf16: true\nfp8: e4m3: hybrid\n")
    assert refused(*CFG, "--config-dir", str(tmp_path), "mixed_precision=mine") == (
        f"{path}:2: is not YAML: mapping values are not allowed here. Correct the line."
    )


def test_a_wrong_key_in_a_yaml_file_is_told_with_the_file(refused, tmp_path: Path) -> None:
    (tmp_path / "mixed_precision").mkdir()
    (tmp_path / "mixed_precision" / "mine.yaml").write_text("bf16: true\nfp8_recipy: delayed\n")
    assert refused(*CFG, "--config-dir", str(tmp_path), "mixed_precision=mine") == (
        "mixed_precision.fp8_recipy: no such field, got 'delayed' (mixed_precision/mine.yaml). "
        "Did you mean 'fp8_recipe', 'fp4_recipe' or 'fp8_margin'?"
    )


def test_every_wrong_key_and_value_of_every_section_is_told_before_a_run_folder_is_made(refused) -> None:
    words = (
        "model.hiden_size=3",
        "model.params_dtype=bf61",
        "model.normalization=RMSNrom",
        "model.activation_func=gleu",
        "model.attention_backend=flsh",
        "model.moe_layer_freq=[1,x]",
        "optimizer.timers=mine",
        "ddp.overlap_grad_reduce=perhaps",
        "train.train_itres=5",
        "mixed_precision.fp8_marign=2",
    )
    assert refused(*TINY, *words) == (
        "10 settings of this run cannot be used:\n"
        "  mixed_precision.fp8_marign: no such field, got 2 (command line). "
        "Did you mean 'fp8_margin', 'fp8_param' or 'fp8_recipe'?\n"
        "  train.train_itres: no such field of TrainConfig, got 5 (command line). Did you mean 'train_iters'?\n"
        "  model.normalization: must be one of LayerNorm, RMSNorm, got 'RMSNrom' (command line). "
        "Did you mean 'RMSNorm'?\n"
        "  model.activation_func: must be one of gelu, relu, silu, squared_relu, quick_gelu, got 'gleu' "
        "(command line). Did you mean 'gelu'?\n"
        "  model.hiden_size: no such field of GPTConfig, got 3 (command line). "
        "Did you mean 'hidden_size', 'ffn_hidden_size' or 'moe_ffn_hidden_size'?\n"
        "  model.params_dtype: must be the name of a dtype, got 'bf61' (command line). Did you mean 'bf16'?\n"
        "  model.attention_backend: must be one of flash, fused, unfused, local, auto, got 'flsh' (command line). "
        "Did you mean 'flash'?\n"
        "  model.moe_layer_freq: each item must be a whole number, got [1, 'x'] (command line). Give one.\n"
        "  optimizer.timers: holds a function, which a configuration cannot describe, got 'mine' (command line). "
        "Set it in Python.\n"
        "  ddp.overlap_grad_reduce: must be true or false, got 'perhaps' (command line). Give one."
    )


def test_missing_values_are_listed_all_at_once_when_the_run_needs_them(refused, tmp_path: Path) -> None:
    missing = "model: {kv_channels: ???}\noptimizer: {sgd_momentum: ???, adam_beta2: '${optimizer.sgd_momentum}'}\n"
    missing = missing.replace("???", "'???'")
    (tmp_path / "lab.yaml").write_text(f"defaults: [config, _self_]\n{missing}")
    assert refused(*TINY, "--config-dir", str(tmp_path), "--config-name", "lab") == (
        "model.kv_channels, optimizer.sgd_momentum: need values, got ??? (lab.yaml). "
        "Give model.kv_channels=VALUE optimizer.sgd_momentum=VALUE."
    )


def test_the_full_error_switch_shows_the_traceback(train) -> None:
    done = train(*CFG, "mixed_precision=bf16_mixd", HYDRA_FULL_ERROR="1")
    assert done.returncode == 1
    assert "Traceback (most recent call last)" in done.stderr
    assert "MissingConfigException" in done.stderr


def test_a_batch_that_the_ranks_of_the_launch_cannot_share_is_refused_before_a_folder_is_made(refused) -> None:
    message = refused("model=gpt_tiny", "train=smoke", "train.global_batch_size=8", WORLD_SIZE="3", RANK="0")
    assert message.startswith("train.global_batch_size: must be a multiple of micro_batch_size 4")
    assert " x 3 data-parallel ranks, got 8 (command line). Use 12, for example." in message
