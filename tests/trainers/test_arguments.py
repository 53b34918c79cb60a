"""Arguments of other trainers by a recipe's name: their real classes take them, and no format is dropped."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bridge import MixedPrecisionConfig
from bridge.errors import PayloadError, PrecisionConfigError, UnknownRecipeError
from bridge.trainers import accelerate_arguments, add_recipe_argument, lightning_arguments, transformers_arguments

ALL = [lightning_arguments, accelerate_arguments, transformers_arguments]


@pytest.mark.parametrize("arguments", ALL)
def test_a_format_that_the_trainer_cannot_run_is_refused(arguments: Callable[[str], Any]) -> None:
    with pytest.raises(PayloadError) as caught:
        arguments("bf16_with_nvfp4_mixed")
    first, *rest = str(caught.value).splitlines()
    assert first.endswith(" cannot run bf16_with_nvfp4_mixed:")
    assert [line.split(":")[0] for line in rest] == ["  fp4='e2m1' (unsupported)"]


@pytest.mark.parametrize("arguments", ALL)
def test_a_recipe_that_does_not_exist_or_cannot_be_right_is_refused(arguments: Callable[[Any], Any]) -> None:
    with pytest.raises(UnknownRecipeError):
        arguments("bf17_mixed")
    with pytest.raises(PrecisionConfigError):
        arguments(MixedPrecisionConfig(bf16=True, fp16=True))


def test_what_is_computed_otherwise_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert transformers_arguments("bf16_mixed") == {"bf16": True, "fp16": False}
    assert "Hugging Face TrainingArguments: bf16=True (semantics): TrainingArguments keeps FP32 weights" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert transformers_arguments("bf16_autocast_mixed") == {"bf16": True, "fp16": False}
    assert caplog.text == ""


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
def test_lightning_gets_a_plugin_with_a_loss_scaler() -> None:
    plugins = pytest.importorskip("lightning.pytorch.plugins", reason="needs lightning: the extra [interop]")
    (plugin,) = lightning_arguments("fp16_mixed")["plugins"]
    assert isinstance(plugin, plugins.MixedPrecision)
    assert plugin.precision == "16-mixed"
    assert isinstance(plugin.scaler, torch.amp.GradScaler)  # without CUDA it is switched off, and has no values
    assert lightning_arguments("bf16_mixed") == {"precision": "bf16-mixed"}


def test_the_accelerator_has_the_loss_scale_of_the_recipe() -> None:
    utils = pytest.importorskip("accelerate.utils", reason="needs accelerate: the extra [interop]")
    given = accelerate_arguments("fp16_mixed")
    assert given["mixed_precision"] == "fp16"
    assert given["kwargs_handlers"] == [utils.GradScalerKwargs(init_scale=2.0**32, growth_interval=1000)]


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
