"""torchao's configs as data; the real classes are in test_real_libraries."""

import importlib.util
from pathlib import Path

import pytest
import torch

from bridge.errors import BackendUnavailableError
from bridge.interop import accelerate
from bridge.interop.pytorch import torchao
from bridge.pytorch import float8_linear_config_for, linear_schemes
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from bridge.trainers.arguments import accelerator_arguments
from tests import warm
from tests.interop.properties import reasons


@pytest.mark.parametrize("scheme", ["delayed", "blockwise"])
def test_schemes_it_does_not_have_make_no_object(scheme: str) -> None:
    config = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe=scheme)
    assert torchao.export(config).payload == {}
    with pytest.raises(BackendUnavailableError, match=f"torchao has no {scheme} scaling"):
        float8_linear_config_for(config)
    assert float8_linear_config_for(REGISTRY.get("bf16_mixed")) is None


ROOT = Path(__file__).parents[2]
ROWS = [
    {"select": "*.linear_qkv", "precision": "bf16"},
    {"select": {"layers": [0, -1], "module": "linear_fc2"}, "precision": "bf16"},
]


def test_rows_become_a_list_of_names() -> None:
    config = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="tensorwise", modules=ROWS)
    exported = torchao.export(config, num_layers=4)
    listed = exported.payload["float8"]["filter_fqns"]
    assert [one for one in listed if "mlp" in one] == ["layers.0.mlp.down_proj", "layers.3.mlp.down_proj"]


def test_two_formats_of_one_scheme_are_reported() -> None:
    row = {"select": "*.linear_fc1", "fp8_recipe": "tensorwise", "fp8": "e4m3"}
    config = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="tensorwise", modules=[row])
    exported = torchao.export(config)
    assert exported.payload["float8"]["filter_fqns"] == ["mlp.gate_proj", "mlp.up_proj", "lm_head"]
    assert reasons(exported, "modules") == ["semantics"]


def test_a_list_leaves_out_in_torchaos_own_filter_what_the_plan_leaves_in_bf16() -> None:
    for library in ("transformers", "torchao"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"needs {library}: pip install precision-bridge[interop]")
    # In a fork: for each operator that torchao registers, torch asks every module that was imported for its file.
    code = f"from {__name__} import compare_filters; compare_filters()"
    done = warm.run(["python", "-W", "ignore", "-c", code], cwd=ROOT)
    assert done.returncode == 0, done.stderr


def compare_filters() -> None:
    """Assert that torchao's filter, Accelerate's and the plan agree on every linear layer of a Llama."""
    import transformers
    from torchao import float8 as ours

    sizes = {"hidden_size": 8192, "intermediate_size": 8192, "num_hidden_layers": 4, "vocab_size": 8192}
    with torch.device("meta"):
        llama = transformers.AutoConfig.for_model("llama", **sizes, num_attention_heads=8)
        model = transformers.AutoModelForCausalLM.from_config(llama)
    config = REGISTRY.get("bf16_with_fp8_current_scaling_mixed").override(modules=ROWS)
    exported = torchao.export(config, num_layers=4)
    takes = ours._auto_filter_for_recipe("tensorwise", filter_fqns=exported.payload["float8"]["filter_fqns"])
    made = accelerate.export(config, form="arguments", num_layers=4)
    own = accelerator_arguments(made.payload)["kwargs_handlers"][0].module_filter_func
    for name, scheme in linear_schemes(model, config).items():
        module = model.get_submodule(name)
        assert takes(module, name) == own(module, name) == (scheme is not None), name
