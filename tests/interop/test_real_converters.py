"""Round trips against torchao, torchtitan and Axolotl themselves, as those of `test_real_libraries`."""

import ast
import dataclasses
import importlib.metadata
import importlib.util
import inspect
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.errors import BridgeError
from bridge.interop import axolotl, torchtitan
from bridge.interop.contract import ExportReport
from bridge.interop.pytorch import torchao
from bridge.interop.reading.settings import Settings
from bridge.precision.foreign_names import megatron_names
from bridge.precision.mode import mode_of
from bridge.precision.module_schemes import ModuleSchemes
from bridge.pytorch import float8_linear_config_for
from bridge.registry.config import MixedPrecisionConfig
from tests.interop.properties import check_export, check_return, configs
from tests.interop.test_real_libraries import MANY, library

pytestmark = pytest.mark.filterwarnings("ignore")


@library("torchao")
class TestTorchao:
    @MANY
    @given(config=configs())
    def test_configs_return_from_the_real_classes(self, version: str, config: MixedPrecisionConfig) -> None:
        exported = torchao.export(config)
        check_export(config, exported)

    def test_tensorwise_is_the_recipe_of_that_name(self, version: str) -> None:
        from torchao.float8 import Float8LinearConfig

        made = Float8LinearConfig.from_recipe_name("tensorwise")
        config = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="tensorwise")
        assert float8_linear_config_for(config) == made

    def test_delayed_scaling_and_the_old_mx_config_are_gone(self, version: str) -> None:
        from torchao.float8 import Float8LinearConfig

        with pytest.raises(AssertionError):
            Float8LinearConfig.from_recipe_name("delayed")
        with pytest.raises(ImportError):
            from torchao.prototype.mx_formats import MXLinearConfig  # noqa: F401

    def test_a_converted_layer_trains_on_a_cpu(self, version: str) -> None:
        import torch
        from torchao.float8 import convert_to_float8_training

        config = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="tensorwise")
        model = torch.nn.Sequential(torch.nn.Linear(32, 16)).bfloat16()
        convert_to_float8_training(model, config=float8_linear_config_for(config, emulate=True))
        model(torch.randn(16, 32, dtype=torch.bfloat16)).sum().backward()
        assert type(model[0]).__name__ == "Float8Linear"
        assert model[0].weight.grad is not None


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
        for converter in exported.payload.get("converters", []):
            ((name, values),) = converter.items()
            assert set(values) <= set(converter_fields(name))
        if "converters" not in exported.payload:
            read = {"training": {key: training[key] for key in keep}}
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
        assert mode_of(imported.config) == replay.load_dtype
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
