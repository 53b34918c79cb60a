"""Round trips against the libraries themselves: export, let the real parser or class read it, import what it holds.

The libraries are optional (`pip install precision-bridge[interop]`); the version that answered is in each test's name.
"""

import importlib.metadata
import os
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings

from bridge.convert import huggingface
from bridge.errors import BridgeError
from bridge.read.foreign.table import load_table
from bridge.read.launch.shell_word import ShellWord
from bridge.read.text.command_arguments import CommandArguments
from bridge.read.text.trainer_arguments import parse_trainer_arguments
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from tests.read.properties import check_export, check_return, configs

UNUSED = "unused"
pytestmark = pytest.mark.filterwarnings("ignore")
FEW = settings(max_examples=20, suppress_health_check=list(HealthCheck))
MANY = settings(suppress_health_check=list(HealthCheck))


def library(name: str) -> Any:
    """A parameter that names the library and the version that is installed, and skips where there is none."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        skip = pytest.mark.skip(reason=f"needs {name}: pip install precision-bridge[interop]")
        return pytest.mark.parametrize("version", [pytest.param("absent", marks=skip, id=f"{name}-absent")])
    return pytest.mark.parametrize("version", [pytest.param(version, id=f"{name}-{version}")])


@library("transformers")
class TestTransformers:
    @FEW
    @given(config=configs())
    def test_arguments_return_from_training_arguments(self, version: str, config: MixedPrecisionConfig) -> None:
        from transformers import TrainingArguments

        exported = huggingface.export(config)
        check_export(config, exported)
        payload = {name: value for name, value in exported.payload.items() if (name, value) != ("tf32", True)}
        made = TrainingArguments(output_dir=UNUSED, use_cpu=True, **payload)
        read = {name: getattr(made, name) for name in ("bf16", "fp16", "tf32")}
        read |= {"tf32": exported.payload.get("tf32", read["tf32"])}  # True raises without an Ampere GPU
        check_return(config, exported, huggingface.import_(read))

    @pytest.mark.parametrize("value", ["full", "auto", "false", 1])
    def test_any_true_value_turns_bf16_on(self, version: str, value: Any) -> None:
        from transformers import TrainingArguments

        made = TrainingArguments(output_dir=UNUSED, use_cpu=True, bf16=value)
        assert made.mixed_precision == "bf16"
        with pytest.raises(BridgeError, match="bf16: must be true or false"):  # what it means is not guessed
            huggingface.import_({"bf16": value})

    @pytest.mark.parametrize("pair", [("bf16", "fp16"), ("bf16_full_eval", "fp16_full_eval")])
    def test_both_halves_are_refused_by_both(self, version: str, pair: tuple[str, str]) -> None:
        from transformers import TrainingArguments

        both = dict.fromkeys(pair, True)
        with pytest.raises(ValueError, match="At most one"):
            TrainingArguments(output_dir=UNUSED, use_cpu=True, **both)
        with pytest.raises(BridgeError, match="must be off where"):
            huggingface.import_(both)

    def test_the_removed_arguments_are_gone(self, version: str) -> None:
        from transformers import TrainingArguments

        rows = load_table("huggingface").parts[""].named
        removed = [name for name, row in rows.items() if row.detail.endswith("5 has no such argument and refuses it")]
        assert len(removed) == 3
        for name in removed:
            with pytest.raises(TypeError, match=name):
                TrainingArguments(output_dir=UNUSED, **{name: "auto"})

    def test_a_switch_overrides_the_environment(self, version: str) -> None:
        from transformers import TrainingArguments

        with patch.dict(os.environ, {"ACCELERATE_MIXED_PRECISION": "fp8"}):
            made = TrainingArguments(output_dir=UNUSED, use_cpu=True, bf16=True)
        assert made.mixed_precision == "bf16"
        imported = huggingface.import_({"bf16": True}, accelerate_mixed_precision="fp8")
        assert imported.config.fp8 is None
        assert [loss.reason for loss in imported.unmapped if loss.field == "ACCELERATE_MIXED_PRECISION"] == [
            "dead knob"
        ]

    @pytest.mark.parametrize(("environment", "runs"), [(None, "no"), ("bf16", "bf16")])
    def test_the_environment_decides_where_both_switches_are_off(
        self, version: str, environment: str | None, runs: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from transformers import TrainingArguments

        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
        if environment is not None:
            monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", environment)
        made = TrainingArguments(output_dir=UNUSED, use_cpu=True, bf16=False, fp16=False)
        assert made.mixed_precision == runs
        assert not huggingface.import_({"bf16": False, "fp16": False}).mode_is_stated

    def test_defaults_of_the_accelerator_are_harmless(self, version: str) -> None:
        from transformers.trainer_pt_utils import AcceleratorConfig

        row = load_table("huggingface").parts[""].named["accelerator_config"]
        assert row.is_harmless(AcceleratorConfig().to_dict())

    @pytest.mark.parametrize(
        "words", [["--bf16"], ["--bf16", "True"], ["--fp16=true"], ["--no_tf32"], ["--bf16", "no"]]
    )
    def test_words_are_read_as_the_real_parser_reads_them(self, version: str, words: list[str]) -> None:
        from transformers import HfArgumentParser, TrainingArguments

        ours = parse_trainer_arguments(CommandArguments(map(ShellWord, words)).options)
        if words != ["--no_tf32"]:  # which the real parser does not know, tf32 having no default of True
            (made,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
                ["--output_dir", UNUSED, "--use_cpu", *words]
            )
            assert {name: getattr(made, name) for name in ours} == ours
