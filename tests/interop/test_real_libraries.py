"""Round trips against the libraries themselves: export, let the real parser or class read it, import what it holds.

The libraries are optional (`pip install precision-bridge[interop]`); the version that answered is in each test's name.
"""

import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from bridge.errors import BridgeError
from bridge.interop import accelerate, huggingface
from bridge.interop.launch.word import Word
from bridge.interop.reading.command_words import CommandWords
from bridge.interop.reading.trainer_words import arguments_of
from bridge.interop.table import table
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from bridge.trainers.arguments import accelerator_arguments
from tests.interop.properties import TORCHAO, check_export, check_return, configs, without_torchao

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


# -- transformers ------------------------------------------------------------------------------------------------------


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

        rows = table("huggingface").parts[""].named
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

        row = table("huggingface").parts[""].named["accelerator_config"]
        assert row.is_harmless(AcceleratorConfig().to_dict())

    @pytest.mark.parametrize(
        "words", [["--bf16"], ["--bf16", "True"], ["--fp16=true"], ["--no_tf32"], ["--bf16", "no"]]
    )
    def test_words_are_read_as_the_real_parser_reads_them(self, version: str, words: list[str]) -> None:
        from transformers import HfArgumentParser, TrainingArguments

        ours = arguments_of(CommandWords(map(Word, words)))
        if words != ["--no_tf32"]:  # which the real parser does not know, tf32 having no default of True
            (made,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
                ["--output_dir", UNUSED, "--use_cpu", *words]
            )
            assert {name: getattr(made, name) for name in ours} == ours


# -- accelerate --------------------------------------------------------------------------------------------------------


def launched(folder: Path, payload: dict[str, Any]) -> dict[str, str]:
    """The environment that the real `accelerate launch` gives a program."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    path = folder / "accelerate.yaml"
    written = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1, "use_cpu": True}
    path.write_text(yaml.safe_dump(written | payload))
    arguments = launch_command_parser().parse_args(
        ["--config_file", str(path), "--num_cpu_threads_per_process=1", "x.py"]
    )
    checked, _, _ = _validate_launch_command(arguments)
    environment = prepare_simple_launcher_cmd_env(checked)[1]
    return {name: value for name, value in environment.items() if name.startswith("ACCELERATE_")}


@library("accelerate")
class TestAccelerate:
    @FEW
    @given(config=configs())
    def test_a_file_returns_from_the_environment_of_a_launch(
        self, version: str, tmp_path_factory: pytest.TempPathFactory, config: MixedPrecisionConfig
    ) -> None:
        pytest.importorskip("torchao", reason="accelerate asks for an FP8 back end")
        exported = accelerate.export(config)
        check_export(config, exported)
        environment = launched(tmp_path_factory.mktemp("launch"), exported.payload)
        check_return(config, without_torchao(exported), accelerate.import_(environment))

    @FEW
    @given(config=configs())
    def test_arguments_return_from_the_real_handlers(self, version: str, config: MixedPrecisionConfig) -> None:
        pytest.importorskip("torchao", reason="AORecipeKwargs needs it")
        exported = accelerate.export(config, form="arguments")
        check_export(config, exported)
        # Only whether Transformer Engine is installed is pretended; it is not needed to make the handler.
        with patch("accelerate.utils.dataclasses.is_transformer_engine_available", lambda: True):
            made = accelerator_arguments(exported.payload)
        read = {"mixed_precision": made["mixed_precision"]}
        for handler in made["kwargs_handlers"]:
            kept = vars(handler)
            if type(handler).__name__ == "GradScalerKwargs":
                asked = (config.initial_loss_scale or 65536, config.loss_scale_window)
                assert (kept["init_scale"], kept["growth_interval"]) == asked
                for field in ("initial_loss_scale", "loss_scale_window"):
                    exported.mapped.pop(field, None)  # held by the handler, as the line above says
            elif type(handler).__name__ == "TERecipeKwargs":
                read["fp8_config"] = {"backend": "TE", **kept}
            else:
                for field in TORCHAO:
                    exported.mapped.pop(field, None)  # AORecipeKwargs is written and not read
        check_return(config, exported, accelerate.import_(read))

    def test_most_recent_is_never_handed_on(self, version: str) -> None:
        from accelerate.utils import TERecipeKwargs

        with patch("accelerate.utils.dataclasses.is_transformer_engine_available", lambda: True):
            handler = TERecipeKwargs(amax_compute_algo="most_recent")
            assert "amax_compute_algo" not in handler.to_kwargs()
        block = {"backend": "TE", **vars(handler)}
        assert accelerate.import_({"mixed_precision": "fp8", "fp8_config": block}).config.fp8_amax_compute_algo == "max"

    def test_the_names_of_the_questionnaire_are_not_read(self, version: str, tmp_path: Path) -> None:
        pytest.importorskip("torchao", reason="accelerate asks for an FP8 back end")
        payload = {"mixed_precision": "fp8", "fp8_config": {"backend": "TE", "amax_history_length": 7}}
        assert launched(tmp_path, payload)["ACCELERATE_FP8_AMAX_HISTORY_LEN"] == "1024"
        assert accelerate.import_(payload).config.fp8_amax_history_len == 1024

    def test_torchao_is_the_default_back_end_with_float8_all_gather(self, version: str) -> None:
        pytest.importorskip("torchao", reason="AORecipeKwargs needs it")
        from accelerate.utils import AORecipeKwargs

        assert AORecipeKwargs().config.enable_fsdp_float8_all_gather is True
        block = accelerate.export(REGISTRY.get("fp8_current").override(fp8_param_gather=False)).payload["fp8_config"]
        assert block["enable_fsdp_float8_all_gather"] is False  # written out, since the default is on

    def test_case_matters_to_the_accelerator(self, version: str) -> None:
        from accelerate import Accelerator

        with pytest.raises(ValueError, match="mixed_precision"):
            Accelerator(mixed_precision="FP16", cpu=True)
        with pytest.raises(BridgeError, match="mixed_precision"):
            accelerate.import_({"mixed_precision": "FP16"})

    def test_the_fsdp_plugin_reduces_in_the_compute_dtype(self, version: str) -> None:
        from accelerate import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16")
        assert str(plugin.mixed_precision_policy.reduce_dtype) == "torch.bfloat16"
        imported = accelerate.import_({"mixed_precision": "bf16", "distributed_type": "FSDP"})
        assert imported.semantics == "fsdp_policy"
        assert imported.config.to_dict()["grad_reduce_in_fp32"] is False


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


# -- Lightning ---------------------------------------------------------------------------------------------------------
