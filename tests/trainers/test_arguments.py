"""Arguments of other trainers by a recipe's name: their real classes take them, and no format is dropped."""

from __future__ import annotations

import argparse
import logging
import sys

import pytest

from bridge import MixedPrecisionConfig
from bridge.errors import PayloadError, PrecisionConfigError, UnknownRecipeError
from bridge.trainers import add_recipe_argument, transformers_arguments


def test_a_format_that_the_trainer_cannot_run_is_refused() -> None:
    with pytest.raises(PayloadError) as caught:
        transformers_arguments("bf16_with_nvfp4_mixed")
    first, *rest = str(caught.value).splitlines()
    assert first.endswith(" cannot run bf16_with_nvfp4_mixed:")
    assert [line.split(":")[0] for line in rest] == ["  fp4='e2m1' (unsupported)"]


def test_a_recipe_that_does_not_exist_or_cannot_be_right_is_refused() -> None:
    with pytest.raises(UnknownRecipeError):
        transformers_arguments("bf17_mixed")
    with pytest.raises(PrecisionConfigError):
        transformers_arguments(MixedPrecisionConfig(bf16=True, fp16=True))


def test_what_is_computed_otherwise_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert transformers_arguments("bf16_mixed") == {"bf16": True, "fp16": False}
    assert "Hugging Face TrainingArguments: bf16=True (semantics): TrainingArguments keeps FP32 weights" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert transformers_arguments("bf16_autocast_mixed") == {"bf16": True, "fp16": False}
    assert caplog.text == ""


STORED = ("fp8-param-gather", "fp4-param-gather", "first-last-layers-bf16")
SCHEMES = (
    "fp8-format",
    "fp8-recipe",
    "fp4-format",
    "fp4-recipe",
    "num-layers-at-start-in-bf16",
    "num-layers-at-end-in-bf16",
)


@pytest.mark.parametrize(("recipe", "family"), [("bf16_with_fp8_current_scaling_mixed", "FP8"), ("nvfp4", "FP4")])
def test_stored_weights_without_a_sharded_optimizer_are_refused_in_one_sentence(
    recipe: str, family: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def parser() -> argparse.ArgumentParser:
        made = argparse.ArgumentParser()
        for name in ("bf16", "accumulate-allreduce-grads-in-fp32", "use-distributed-optimizer", *STORED):
            made.add_argument(f"--{name}", action="store_true")
        for name in SCHEMES:
            made.add_argument(f"--{name}")
        return made

    line = ["pretrain_gpt.py", "--mixed-precision-recipe", recipe]
    monkeypatch.setattr(sys, "argv", line)
    with pytest.raises(SystemExit) as caught:
        add_recipe_argument(parser())
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        f"--mixed-precision-recipe: weights can be stored in {family} only under the distributed optimizer or FSDP, "
        f"got '{recipe}'. Add --use-distributed-optimizer.\n"
    )
    monkeypatch.setattr(sys, "argv", [*line, "--use-distributed-optimizer"])
    add_recipe_argument(parser())
