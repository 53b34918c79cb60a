"""Round trips against the libraries themselves: export, let the real parser or class read it, import what it holds.

The libraries are optional (`pip install precision-bridge[interop]`); the version that answered is in each test's name.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import importlib.util
import inspect
import itertools
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge.errors import BridgeError
from bridge.interop import accelerate, axolotl, deepspeed, huggingface, lightning, torchtitan
from bridge.interop.contract import ExportReport
from bridge.interop.pytorch import torchao
from bridge.interop.reading.settings import Settings
from bridge.interop.unsupported import rows
from bridge.precision.foreign_names import megatron_names
from bridge.precision.module_schemes import ModuleSchemes
from bridge.pytorch import float8_linear_config_for
from bridge.registry.config import MixedPrecisionConfig
from tests.interop.properties import check_export, check_return, configs

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
        assert huggingface.import_({"bf16": value}).config.to_dict()["autocast_dtype"] == "bf16"

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

        for name in rows("huggingface_removed"):
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

        assert rows("huggingface")["accelerator_config"].harmless == [AcceleratorConfig().to_dict()]

    @pytest.mark.parametrize(
        "words", [["--bf16"], ["--bf16", "True"], ["--fp16=true"], ["--no_tf32"], ["--bf16", "no"]]
    )
    def test_words_are_read_as_the_real_parser_reads_them(self, version: str, words: list[str]) -> None:
        from transformers import HfArgumentParser, TrainingArguments

        ours = huggingface.arguments(words)
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
        check_return(config, exported, accelerate.import_(environment))

    @FEW
    @given(config=configs())
    def test_arguments_return_from_the_real_handlers(self, version: str, config: MixedPrecisionConfig) -> None:
        pytest.importorskip("torchao", reason="AORecipeKwargs needs it")
        exported = accelerate.export(config, form="arguments")
        check_export(config, exported)
        # Only whether Transformer Engine is installed is pretended; it is not needed to make the handler.
        with patch("accelerate.utils.dataclasses.is_transformer_engine_available", lambda: True):
            made = accelerate.accelerator_arguments(exported.payload)
        read = {"mixed_precision": made["mixed_precision"]}
        for handler in made["kwargs_handlers"]:
            kept = vars(handler)
            if type(handler).__name__ == "GradScalerKwargs":
                asked = (config.initial_loss_scale or 65536, config.loss_scale_window)
                assert (kept["init_scale"], kept["growth_interval"]) == asked
                for field in ("initial_loss_scale", "loss_scale_window"):
                    exported.mapped.pop(field, None)  # held by the handler, as the line above says
            else:
                backend = "TE" if type(handler).__name__ == "TERecipeKwargs" else "AO"
                read["fp8_config"] = {"backend": backend, **kept}
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
        assert accelerate.import_({"mixed_precision": "fp8"}).config.fp8_param_gather is True

    def test_case_matters_to_the_accelerator(self, version: str) -> None:
        from accelerate import Accelerator

        with pytest.raises(ValueError, match="mixed_precision"):
            Accelerator(mixed_precision="FP16", cpu=True)
        imported = accelerate.import_({"mixed_precision": "FP16"})
        assert [loss.reason for loss in imported.unmapped if loss.field == "mixed_precision"] == ["approximated"]

    def test_the_fsdp_plugin_reduces_in_the_compute_dtype(self, version: str) -> None:
        from accelerate import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16")
        assert str(plugin.mixed_precision_policy.reduce_dtype) == "torch.bfloat16"
        imported = accelerate.import_({"mixed_precision": "bf16", "distributed_type": "FSDP"})
        assert imported.semantics == "fsdp_policy"
        assert imported.config.to_dict()["grad_reduce_in_fp32"] is False


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def held(payload: dict[str, Any]) -> dict[str, Any]:
    """What the real DeepSpeedConfig holds of a configuration, in the words of the JSON."""
    from deepspeed.runtime.config import DeepSpeedConfig

    made = DeepSpeedConfig({"train_batch_size": 1, **payload})
    short = {None: None, "torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
    return {
        "fp16": made.float16_config.model_dump(),
        "bf16": made.bfloat16_config.model_dump(),
        "torch_autocast": {"enabled": made.torch_autocast_enabled, "dtype": _short(made.torch_autocast_dtype)},
        "data_types": {"grad_accum_dtype": made.grad_accum_dtype, "param_dtype": made.param_dtype},
        "communication_data_type": short[made.communication_data_type and str(made.communication_data_type)],
    }


def _short(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


@library("deepspeed")
class TestDeepSpeed:
    @MANY
    @given(config=configs())
    def test_blocks_return_from_the_real_config(self, version: str, config: MixedPrecisionConfig) -> None:
        exported = deepspeed.export(config)
        check_export(config, exported)
        check_return(config, exported, deepspeed.import_(held(exported.payload)))

    def test_auto_is_off_without_a_layer_above(self, version: str) -> None:
        assert held({"bf16": {"enabled": "auto"}})["bf16"]["enabled"] is False
        assert deepspeed.import_({"bf16": {"enabled": "auto"}}).config.mode == "fp32"
        assert deepspeed.import_({"bf16": {"enabled": "auto"}}, auto="bf16").config.mode == "bf16"

    def test_unknown_blocks_are_ignored_without_a_word(self, version: str) -> None:
        assert held({"fp8": {"enabled": True}})["bf16"]["enabled"] is False
        imported = deepspeed.import_({"fp8": {"enabled": True}})
        assert imported.config.fp8 is None
        assert [loss.reason for loss in imported.unmapped if loss.field == "fp8"] == ["dead knob"]

    @pytest.mark.parametrize(
        "payload",
        [
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            {"communication_data_type": "float32"},
            {"fp16": {"enabled": True, "min_loss_scale": 0}},
            {"fp16": {"enabled": True, "loss_scale": -1}},
            {"torch_autocast": {"enabled": True, "dtype": "fp8"}},
            {"amp": {"enabled": True}},
        ],
        ids=str,
    )
    def test_what_it_refuses_is_refused_here(self, version: str, payload: dict[str, Any]) -> None:
        with pytest.raises(Exception):  # noqa: B017, PT011  assertion, pydantic and own errors alike
            held(payload)
        with pytest.raises(BridgeError):
            deepspeed.import_(payload)

    def test_apart_from_the_legacy_name_of_the_block(self, version: str) -> None:
        assert held({"bfloat16": {"enabled": True}})["bf16"]["enabled"] is True
        assert deepspeed.import_({"bfloat16": {"enabled": True}}).config.mode == "bf16"


# -- Lightning ---------------------------------------------------------------------------------------------------------

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


@library("lightning")
class TestLightning:
    @pytest.mark.parametrize("word", ["32-true", "16-mixed", "bf16-mixed", "bf16-true", "16-true", 16, "bf16", 32])
    def test_strings_mean_what_the_trainer_makes_of_them(self, version: str, word: Any) -> None:
        from lightning.pytorch import Trainer

        plugin = Trainer(accelerator="cpu", precision=word, **QUIET).precision_plugin
        imported, again = lightning.import_(word, accelerator="cpu"), lightning.import_(plugin.precision)
        assert imported.semantics == again.semantics
        assert imported.config == again.config

    @pytest.mark.parametrize("word", ["fp8", "fp16-mixed", "BF16-mixed", "tf32", "bf16_mixed"])
    def test_other_strings_are_refused_by_both(self, version: str, word: str) -> None:
        from lightning.pytorch import Trainer

        with pytest.raises(ValueError, match="Precision"):
            Trainer(accelerator="cpu", precision=word, **QUIET)
        with pytest.raises(BridgeError, match="letter by letter"):
            lightning.import_(word)

    @FEW
    @given(config=configs().filter(lambda config: not (config.fp8 and config.fp8_recipe == "delayed")))
    def test_arguments_return_from_the_real_plugins(self, version: str, config: MixedPrecisionConfig) -> None:
        from lightning.pytorch.plugins import MixedPrecision, Precision
        from torch.amp import GradScaler

        exported = lightning.export(config)
        check_export(config, exported)
        if "plugins" in exported.payload:
            arguments = dict(exported.payload["plugins"][0]["init_args"])
            scaler: Any = GradScaler(**{**arguments.pop("scaler")["init_args"], "device": "cpu"})
            plugin: Any = MixedPrecision(**{**arguments, "device": "cpu"}, scaler=scaler)
            kept = {"init_scale": plugin.scaler._init_scale, "growth_interval": plugin.scaler._growth_interval}
            init_args = {"precision": plugin.precision, "scaler": {"init_args": kept}}
            read: dict[str, Any] = {"plugins": [{"class_path": "x.MixedPrecision", "init_args": init_args}]}
        elif exported.payload["precision"] == "32-true":
            read = {"precision": Precision().precision}
        else:
            read = {"precision": MixedPrecision(exported.payload["precision"], device="cpu").precision}
        check_return(config, exported, lightning.import_(read))

    def test_bf16_with_a_scaler_is_refused_by_both(self, version: str) -> None:
        from lightning.fabric.utilities.exceptions import MisconfigurationException
        from lightning.pytorch.plugins import MixedPrecision
        from torch.amp import GradScaler

        with pytest.raises(MisconfigurationException):
            MixedPrecision("bf16-mixed", device="cpu", scaler=GradScaler("cpu"))
        scaler = {"class_path": "torch.amp.GradScaler", "init_args": {"init_scale": 8.0}}
        plugin = {"class_path": "x.MixedPrecision", "init_args": {"precision": "bf16-mixed", "scaler": scaler}}
        with pytest.raises(BridgeError, match="must not be given in BF16"):
            lightning.import_({"plugins": [plugin]})


# -- torchao -----------------------------------------------------------------------------------------------------------


@library("torchao")
class TestTorchao:
    @MANY
    @given(config=configs())
    def test_configs_return_from_the_real_classes(self, version: str, config: MixedPrecisionConfig) -> None:
        exported = torchao.export(config)
        check_export(config, exported)
        if config.fp8 is not None and exported.payload:
            made = float8_linear_config_for(config)
            check_return(config, exported, torchao.import_(made))

    @pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
    def test_rowwise_has_no_recipe_here(self, version: str, recipe: str) -> None:
        from torchao.float8 import Float8LinearConfig

        imported = torchao.import_(Float8LinearConfig.from_recipe_name(recipe))
        assert imported.config.fp8 is None
        assert "unsupported" in {loss.reason for loss in imported.unmapped}

    def test_tensorwise_is_the_recipe_of_that_name(self, version: str) -> None:
        from torchao.float8 import Float8LinearConfig

        made = Float8LinearConfig.from_recipe_name("tensorwise")
        config = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="tensorwise")
        assert torchao.import_(made).config == config
        assert float8_linear_config_for(config) == made

    def test_e4m3_with_a_weight_gradient_in_high_precision_is_a_config_that_torchao_takes(self, version: str) -> None:
        config = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="tensorwise", fp8_wgrad=False)
        assert torchao.import_(float8_linear_config_for(config)).config == config

    def test_delayed_scaling_and_the_old_mx_config_are_gone(self, version: str) -> None:
        from torchao.float8 import Float8LinearConfig

        with pytest.raises(AssertionError):
            Float8LinearConfig.from_recipe_name("delayed")
        with pytest.raises(ImportError):
            from torchao.prototype.mx_formats import MXLinearConfig  # noqa: F401
        with pytest.raises(BridgeError, match="recipe_name"):
            torchao.import_({"float8": {"recipe_name": "delayed"}})

    @pytest.mark.parametrize("recipe", torchao.MX_RECIPES)
    def test_mx_recipes_return(self, version: str, recipe: str) -> None:
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe

        made = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe(recipe))
        config = torchao.import_(made).config
        assert (config.fp8, config.fp8_recipe) == ("e4m3", "mxfp8")
        assert config.fp8_wgrad is not made.wgrad_with_hp

    def test_a_converted_layer_trains_on_a_cpu(self, version: str) -> None:
        import torch
        from torchao.float8 import convert_to_float8_training

        config = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="tensorwise")
        model = torch.nn.Sequential(torch.nn.Linear(32, 16)).bfloat16()
        convert_to_float8_training(model, config=float8_linear_config_for(config, emulate=True))
        model(torch.randn(16, 32, dtype=torch.bfloat16)).sum().backward()
        assert type(model[0]).__name__ == "Float8Linear"
        assert model[0].weight.grad is not None


# -- torchtitan --------------------------------------------------------------------------------------------------------


@library("torchtitan")
class TestTorchtitan:
    @MANY
    @given(config=configs())
    def test_training_returns_from_the_real_class(self, version: str, config: MixedPrecisionConfig) -> None:
        from torchtitan.config.configs import TrainingConfig

        exported = torchtitan.export(config)
        check_export(config, exported)
        training = dataclasses.asdict(TrainingConfig(**exported.payload["training"]))
        keep = ("dtype", "mixed_precision_param", "mixed_precision_reduce")
        read: dict[str, Any] = {"training": {key: training[key] for key in keep}}
        for converter in exported.payload.get("converters", []):
            ((name, values),) = converter.items()
            assert set(values) <= set(converter_fields(name))
            read.setdefault("converters", []).append(converter)
        check_return(config, exported, torchtitan.import_(read))

    def test_its_defaults_are_what_is_implied_here(self, version: str) -> None:
        from torchtitan.config.configs import TrainingConfig

        made = TrainingConfig()
        assert (made.dtype, made.mixed_precision_param, made.mixed_precision_reduce) == (
            "float32",
            "bfloat16",
            "float32",
        )
        assert torchtitan.import_({"training": {}}).recipe == "bf16_mixed"
        assert converter_fields("Float8LinearConverter")["recipe_name"] == "'rowwise'"
        assert torchtitan.import_({"converters": [{"Float8LinearConverter": {}}]}).config.fp8 is None

    @pytest.mark.parametrize("family", ["llama3", "qwen3", "deepseek_v3"])
    def test_its_converters_take_the_modules_of_the_plan(self, version: str, family: str) -> None:
        pytest.importorskip("triton", reason="torchtitan's models import Triton")
        selects: tuple[Any, ...] = ("*.linear_qkv", "*mlp.*", {"layers": [0, -1], "module": "linear_fc2"})
        for kept in (False, True):
            for pair in itertools.permutations(selects, 2):
                rows = [{"select": pair[0], "precision": "bf16"}, {"select": pair[1], "precision": "nvfp4"}]
                config = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8", modules=rows)
                config.first_last_layers_bf16 = kept
                model = titan_model(family)
                wanted = ModuleSchemes.of(config, len(model.layers))
                schemes = titan_schemes(model, torchtitan.export(config, num_layers=len(model.layers)))
                places = megatron_names(schemes)
                for name, found in schemes.items():
                    chosen = wanted.chosen(*places[name]) if name in places else None
                    assert found == (chosen.scheme if chosen is not None else None), (name, rows, kept)
        model = titan_model(family)
        plain = titan_schemes(model, torchtitan.export(MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8")))
        left = [name for name, found in plain.items() if found is None]
        assert {name.partition("moe.")[2] or name for name in left} <= {"lm_head", "router.gate"}


def titan_model(family: str) -> Any:
    """The config of torchtitan's smallest model of a family, whose names are those of the modules it builds."""
    module = importlib.import_module(f"torchtitan.models.{family}")
    small = next(getattr(module, name) for name in dir(module) if name.endswith("configs"))["debugmodel"]
    known = {"attn_backend": "flex", "moe_comm_backend": "standard"}
    return small(**{name: known[name] for name in inspect.signature(small).parameters if name in known})


def titan_schemes(model: Any, exported: ExportReport) -> dict[str, str | None]:
    """The scheme of each linear layer after the real converters; only the GPU that they ask for is pretended."""
    from torchtitan.components import quantization
    from torchtitan.models.common.linear import Linear

    for ((name, values),) in (converter.items() for converter in exported.payload["converters"]):
        converter = getattr(quantization, name)
        with patch(f"{converter.__module__}.has_cuda_capability", lambda *_: True):
            model = converter(converter.Config(**values)).convert(model)
    kinds = {"MXFP8Linear.Config": "mxfp8", "NVFP4Linear.Config": "nvfp4"}
    return {name: kinds.get(type(one).__qualname__) for name, one, *_ in model.traverse(Linear.Config)}


def converters_folder() -> Path:
    spec = importlib.util.find_spec("torchtitan")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "components" / "quantization"


def converter_fields(name: str) -> dict[str, str]:
    """Fields and defaults of a converter's Config, from its source: importing it needs Triton, and that a GPU."""
    for path in converters_folder().glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and node.name == name:
                config = next(part for part in node.body if isinstance(part, ast.ClassDef) and part.name == "Config")
                lines = [line for line in config.body if isinstance(line, ast.AnnAssign) and line.value is not None]
                return {ast.unparse(line.target): ast.unparse(line.value) for line in lines if line.value}
    raise LookupError(name)


# -- Axolotl -----------------------------------------------------------------------------------------------------------

MINIMAL = {
    "base_model": "x",
    "datasets": [{"path": "x", "type": "alpaca"}],
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-4,
    "num_epochs": 1,
}
CARDS = {"v100": (7, 0), "a100": (8, 0), "rtx4090": (8, 9), "h100": (9, 0)}
AXOLOTL = st.fixed_dictionaries(
    {},
    optional={
        "bf16": st.sampled_from(["auto", True, False, None, "true", "full", "no", "x", 1]),
        "fp16": st.sampled_from([True, False, None, "auto", "true"]),
        "fp8": st.sampled_from([True, False, None, "yes", "x"]),
        "fp8_config": st.sampled_from([None, {}, {"recipe": "rowwise"}, {"recipe": "tensorwise"}, {"recipe": "x"}]),
        "fp8_enable_fsdp_float8_all_gather": st.sampled_from([True, False, None]),
        "bfloat16": st.sampled_from([True, False, None]),
        "float16": st.sampled_from([True, False, None]),
        "tf32": st.sampled_from(["auto", True, False, None]),
        "fsdp_version": st.sampled_from([1, 2, None, "2"]),
        "fsdp_config": st.sampled_from([None, {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}]),
        "fp32_norms": st.sampled_from([True, False, None]),
        "load_in_8bit": st.sampled_from([False, None]),
        "float8": st.booleans(),
    },
)


def validated(payload: dict[str, Any], capability: tuple[int, int]) -> Any:
    """The real schema's reading of a configuration on a GPU of that capability."""
    from axolotl.utils.schemas.config import AxolotlConfigWCapabilities

    major, minor = capability
    can = axolotl.capabilities(capability)
    return AxolotlConfigWCapabilities(
        **MINIMAL,
        **payload,
        capabilities={**can, "n_gpu": 1, "compute_capability": f"sm_{major}{minor}"},
        env_capabilities={"torch_version": "2.13.0"},
    )


@library("axolotl")
class TestAxolotl:
    @MANY
    @given(payload=AXOLOTL, card=st.sampled_from(sorted(CARDS)))
    def test_its_schema_and_its_detection_agree_with_the_replay(
        self, version: str, payload: dict[str, Any], card: str
    ) -> None:
        from axolotl.utils.config import resolve_dtype
        from axolotl.utils.dict import DictDefault
        from pydantic import ValidationError

        try:
            made = validated(payload, CARDS[card])
        except ValidationError:
            return  # what its schema refuses does not start; of that only `full` and FP8 before Hopper are refused here
        imported = axolotl.import_({**MINIMAL, **payload}, gpu=card)
        real = DictDefault(made.model_dump(exclude_none=True) | {"device": "cuda:0"})
        if payload.get("tf32", "auto") not in ("auto", None):
            real.tf32 = False  # what it does for tf32 is a change of this process
        with patch("axolotl.utils.config.is_torch_bf16_gpu_available", lambda: True):
            resolve_dtype(real)
        replay = axolotl.detect(Settings(payload, "Axolotl", lenient=True), {"bf16": True, "fp8": True, "tf32": True})
        assert replay.load_dtype == {"torch.bfloat16": "bf16", "torch.float16": "fp16"}.get(
            str(real.torch_dtype), "fp32"
        )
        assert replay.bf16 == bool(real.bf16 or real.bfloat16)
        assert imported.config.mode == replay.load_dtype
        assert made.tf32 in (imported.config.tf32, None)

    @MANY
    @given(config=configs(), card=st.sampled_from(["a100", "h100"]))
    def test_settings_return_from_the_real_schema(self, version: str, config: MixedPrecisionConfig, card: str) -> None:
        exported = axolotl.export(config)
        check_export(config, exported)
        if card == "a100" and exported.payload.get("fp8"):
            card = "h100"
        made = validated(exported.payload, CARDS[card])
        names = [*axolotl.MAPPED, "fsdp_version"]
        read = {name: getattr(made, name) for name in names if getattr(made, name) is not None}
        check_return(config, exported, axolotl.import_({**MINIMAL, **read}, gpu=card))
        if exported.payload.get("fp8"):
            assert made.fp8 is True

    def test_full_is_documented_and_refused(self, version: str) -> None:
        from pydantic import ValidationError

        with pytest.raises(ValidationError, match="literal_error"):
            validated({"bf16": "full"}, (9, 0))
        with pytest.raises(BridgeError, match="documentation, and its schema refuses it"):
            axolotl.import_({"bf16": "full"})

    def test_ada_is_refused_for_fp8(self, version: str) -> None:
        with pytest.raises(ValueError, match="fp8 is not supported on this GPU"):
            validated({"fp8": True}, (8, 9))
        with pytest.raises(BridgeError, match=r"compute capability 9\.0"):
            axolotl.import_({"fp8": True}, gpu="rtx4090")
