"""Transformer Engine's recipes as mappings, against its own classes where they are installed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.interop import te_recipe
from bridge.precision.module_schemes import ModuleSchemes
from bridge.precision.schemes import SCHEMES
from bridge.registry.config import MixedPrecisionConfig
from tests.interop.properties import reasons

SAMPLES = Path(__file__).parent / "samples"


@pytest.fixture(scope="module")
def classes():
    """The recipe module by its path: importing the package needs CUDA."""
    beside = Path(sys.prefix) / "te"
    path = Path(os.environ.get("BRIDGE_TE_RECIPE", beside / "transformer_engine/common/recipe/__init__.py"))
    if not path.is_file():
        pytest.skip(f"needs Transformer Engine's recipe module at {path}: run make setup, or set BRIDGE_TE_RECIPE")
    pytest.importorskip("pydantic")
    spec = importlib.util.spec_from_file_location("te_recipe_classes", path)
    module = sys.modules["te_recipe_classes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("row", [row for row in SCHEMES if row.te_class != "CustomRecipe"], ids=lambda row: row.name)
def test_rows_are_transformer_engines_classes(classes, row) -> None:
    made = getattr(classes, row.te_class)()
    assert getattr(made, f"{row.family}_format").name == te_recipe.DEFAULT_FORMATS[row.name].upper()
    for argument in (*row.te_keywords, *te_recipe.ATTENTION):
        assert hasattr(made, argument)


def test_a_run_without_low_precision_has_no_recipe() -> None:
    exported = te_recipe.export(MixedPrecisionConfig(bf16=True))
    assert exported.payload is None
    assert reasons(exported, "bf16") == ["unsupported"]


def test_fp8_attention_does_not_go_with_blocks() -> None:
    exported = te_recipe.export(
        MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="blockwise", fp8_dot_product_attention=True)
    )
    assert "fp8_dpa" not in exported.payload
    assert reasons(exported, "fp8_dot_product_attention") == ["unsupported"]


ROWS = [
    {"select": "*.linear_fc1", "precision": "bf16"},
    {"select": {"layers": [0], "module": "linear_qkv"}, "precision": "nvfp4"},
]
IN_TRANSFORMER_ENGINE = """
import json, sys
from bridge.preflight.te_cpu import declare
declare("b200")
from bridge.megatron.gpt import GPTConfig
from bridge.megatron.process import training_process
import hydra, torch, transformer_engine.pytorch as te
recipe = hydra.utils.instantiate(json.loads(sys.argv[1]))
x, found = torch.randn(32, 2, 64, dtype=torch.bfloat16), {}
with training_process(GPTConfig(num_layers=2, hidden_size=64, num_attention_heads=4, bf16=True), seed=1):
    for layer in range(3):
        sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "layer_number": layer + 1}
        made = te.TransformerLayer(**sizes, params_dtype=torch.bfloat16, device="cpu", name=f"layers.{layer}")
        with te.autocast(enabled=True, recipe=recipe):
            made(x).sum().backward()
        for name, module in made.named_modules():
            if getattr(module, "quantizers", None):
                found[f"{layer}.{name}"] = [type(one).__name__ for one in module.quantizers["scaling_fwd"]]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_factory_gives_transformer_engines_own_layer_the_quantizers_of_the_rows() -> None:
    if not (Path(sys.prefix) / "te" / "transformer_engine").is_dir():
        pytest.skip("needs Transformer Engine's Python: make setup")
    config = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8", modules=ROWS, first_last_layers_bf16=True)
    exported = te_recipe.export(config, num_layers=3)
    assert exported.mapped["modules"] == exported.mapped["first_last_layers_bf16"] == ("qfactory",)
    code = [sys.executable, "-W", "ignore", "-c", IN_TRANSFORMER_ENGINE, json.dumps(exported.payload)]
    done = subprocess.run(code, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    slots = {"layernorm_qkv": ("self_attention.linear_qkv", 0), "proj": ("self_attention.linear_proj", 0)}
    slots |= {"layernorm_mlp": ("mlp.linear_fc1", 0), "fc2": ("mlp.linear_fc2", 3)}
    kinds = {"MXFP8Quantizer": "mxfp8", "NVFP4Quantizer": "nvfp4", "IdentityQuantizer": None}
    schemes = ModuleSchemes.of(config, 3)
    for layer in range(3):
        for part, (name, slot) in slots.items():
            path = {"layernorm_mlp": "layernorm_mlp", "fc2": "layernorm_mlp"}.get(part, f"self_attention.{part}")
            kept = found[f"{layer}.{path}"][slot : slot + 2]  # of input and weight
            chosen = schemes.chosen(layer, name)
            assert [kinds[one] for one in kept] == [chosen.scheme if chosen is not None else None] * 2, (layer, name)


def test_a_choice_that_the_factory_has_not_is_reported() -> None:
    row = {"select": "*.linear_fc1", "fp8_recipe": "tensorwise", "fp8": "e4m3"}
    exported = te_recipe.export(MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="tensorwise", modules=[row]))
    (loss,) = (loss for loss in exported.unmapped if loss.field == "modules")
    assert (loss.reason, loss.remedy) == ("semantics", "hybrid there; write a factory for e4m3.")
