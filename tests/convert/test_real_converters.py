"""Round trips against torchao and Axolotl themselves, as those of `test_real_libraries`."""

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.convert import axolotl
from bridge.errors import BridgeError
from bridge.precision.mode import get_mode
from bridge.read.text.settings import Settings
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.runtime.pytorch import float8_linear_config_for
from tests.read.properties import check_export, check_return, configs
from tests.read.test_real_libraries import MANY, library

pytestmark = pytest.mark.filterwarnings("ignore")


@library("torchao")
class TestTorchao:
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
        assert get_mode(imported.config) == replay.load_dtype
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
