"""Megatron-LM's own parser and validation with ``--mixed-precision-recipe``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import pytest

from bridge import synchronize
from bridge.trainers import add_recipe_argument
from tests import releases

arguments = pytest.importorskip("megatron.training.arguments", reason=releases.NO_TRAINING)
from megatron.training.argument_utils import core_transformer_config_from_args  # noqa: E402

RUN = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--train-iters", "2", "--lr", "1e-3"),
    *("--micro-batch-size", "1", "--seq-length", "32", "--max-position-embeddings", "32"),
    "--use-distributed-optimizer",
)
RECIPES = ("bf16_mixed", "fp16_mixed", "bf16_with_fp8_delayed_scaling_mixed", "bf16_with_fp8_current_scaling_mixed")
FIELDS = (
    *("bf16", "fp16", "params_dtype", "fp8", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo"),
    *("fp8_param", "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp4"),
)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Parse and validate a command line as Megatron-LM does, with our provider."""

    def parse(*words: str, validate: bool = True) -> Any:
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *RUN, *words])
        args = arguments.parse_args(extra_args_provider=add_recipe_argument)
        if validate:
            arguments.validate_args(args)
        return args

    return parse


@pytest.mark.parametrize("recipe", RECIPES)
def test_megatron_lm_builds_the_model_config_that_a_sync_writes(parsed: Any, recipe: str) -> None:
    from megatron.core.transformer import TransformerConfig

    built = core_transformer_config_from_args(parsed("--mixed-precision-recipe", recipe))
    synced = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4)
    synchronize(recipe, model=synced)
    assert {name: getattr(built, name) for name in FIELDS} == {name: getattr(synced, name) for name in FIELDS}


def test_the_report_has_each_argument_with_its_default(parsed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parsed("--mixed-precision-recipe", "bf16_mixed", validate=False)
    assert capsys.readouterr().out.splitlines()[:3] == [
        "bf16_mixed: 2 fields written (args 2).",
        "  args.bf16: False -> True (set, recipe bf16_mixed: instead of the parser's default)",
        "  args.accumulate_allreduce_grads_in_fp32: False -> True "
        "(set, recipe bf16_mixed: instead of the parser's default)",
    ]


def test_only_the_first_process_reports(
    parsed: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert parsed("--mixed-precision-recipe", "bf16_mixed", validate=False).bf16
    assert "bf16_mixed" not in capsys.readouterr().out


def test_an_argument_of_the_command_line_is_stated_over_the_recipe(parsed: Any) -> None:
    args = parsed("--mixed-precision-recipe", "bf16_mixed", "--grad-reduce-in-bf16")
    assert (args.bf16, args.grad_reduce_in_bf16, args.accumulate_allreduce_grads_in_fp32) == (True, True, False)
    words = ("--fp8-margin", "3", "--mixed-precision-recipe", "bf16_with_fp8_delayed_scaling_mixed")
    assert parsed(*words).fp8_margin == 3


def test_a_required_argument_of_an_own_provider_is_no_obstacle(parsed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def own(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--team", required=True)
        parser.add_argument("--tag", action="append")
        return add_recipe_argument(parser)

    words = ("--team", "acme", "--tag", "a", "--mixed-precision-recipe", "bf16_mixed", "--tag", "b")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *RUN, *words])
    args = arguments.parse_args(extra_args_provider=own)
    assert (args.bf16, args.team, args.tag) == (True, "acme", ["a", "b"])


def test_without_the_option_nothing_changes(parsed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: str(value) for name, value in vars(parsed("--bf16")).items()}
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *RUN, "--bf16"])
    plain = arguments.parse_args()
    arguments.validate_args(plain)
    assert given.pop("mixed_precision_recipe") == "None"
    assert given == {name: str(value) for name, value in vars(plain).items()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nope",), "Unknown mixed-precision recipe 'nope'. `precision-bridge recipes` lists all"),
        (
            ("bf16_mixed", "--fp16"),
            "--mixed-precision-recipe: its mode is bf16, and --fp16 asks for another, got 'bf16_",
        ),
        (
            ("bf16_autocast_mixed",),
            "autocast_enabled=True (semantics): no flag turns autocast on; it trains in FP32. FP32 there; ",
        ),
        (("bf16_mixed", "--yaml-cfg", "run.yaml"), "cannot be used together with --yaml-cfg"),
    ],
)
def test_what_cannot_be_used_ends_the_program_with_one_answer(
    parsed: Any, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed("--mixed-precision-recipe", *words)
    assert caught.value.code == 2
    answer = capsys.readouterr().err
    assert message in answer
    assert "usage:" not in answer


def test_a_word_that_the_parser_does_not_know_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bf16", action="store_true")
    monkeypatch.setattr(sys, "argv", ["old.py", "--mixed-precision-recipe", "bf16_mixed"])
    with pytest.raises(SystemExit):
        add_recipe_argument(parser)
    expected = "needs --accumulate-allreduce-grads-in-fp32, which Megatron-LM with megatron-core "
    assert expected in capsys.readouterr().err
