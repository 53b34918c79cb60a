"""Rows of `modules` in real models of transformers: what torchao converts is what the plan says."""

import random
from typing import Any

import pytest
import torch

from bridge.errors import PrecisionTypeError
from bridge.plan.precision_plan import precision_plan
from bridge.precision.foreign_names import map_to_megatron_names
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from bridge.runtime.pytorch import check_precision, convert_linears, emulate_linears, linear_schemes
from bridge.runtime.pytorch.emulated_linear import EmulatedLinear

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 64}
MODEL = {"num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2, "gated_linear_unit": True}
TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
SELECTS: tuple[Any, ...] = (
    "*.linear_qkv",
    "*",
    "decoder.layers.1.mlp.*",
    "*layers.3.*",
    {"layers": [0, -1], "module": "linear_fc2"},
    {"module": "linear_fc1"},
    {"layers": [2], "module": "linear_proj"},
)
BASES = (
    {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 2},
    {"fp8": "e4m3", "fp8_recipe": "mxfp8", "first_last_layers_bf16": True},
    {},
)


def model_of(kind: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="pip install precision-bridge[interop]")
    config = transformers.AutoConfig.for_model(kind, **SIZES, **TOKENS)
    return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def planned(config: MixedPrecisionConfig) -> dict[tuple[str, str], str | None]:
    """Layer, counted from 1, and module -> its scheme in the plan."""
    plan = precision_plan(config, MODEL)
    return {(layer.label, module.name): module.scheme for layer in plan.layers for module in layer.modules}


def test_what_torchao_converts_is_what_the_plan_says() -> None:
    pytest.importorskip("torchao", reason="pip install precision-bridge[interop]")
    chance, seen = random.Random(0), set()  # noqa: S311
    for _ in range(24):
        rows = [
            {"select": one, "precision": chance.choice(("bf16", "mxfp8", "tensorwise"))}
            for one in chance.sample(SELECTS, chance.randint(0, 3))
        ]
        config = MixedPrecisionConfig.from_dict({"bf16": True, **chance.choice(BASES), "modules": rows})
        model, wanted = model_of("llama"), planned(config)
        convert_linears(model, config, emulate=True)
        linears = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
        places = map_to_megatron_names(linears)
        for name, module in linears.items():
            is_mx = type(module.weight.data).__name__.startswith("MXFP8") or "MXFP8" in type(module.weight).__name__
            found = "tensorwise" if type(module).__name__ == "Float8Linear" else "mxfp8" if is_mx else None
            place = places.get(name)
            scheme = None if place is None else wanted[str(place[0] + 1), place[1].rpartition(".")[2]]
            assert found == scheme, (name, config)
            seen.add(found)
    assert seen == {"tensorwise", "mxfp8", None}


@pytest.mark.parametrize(
    "kind", ["llama", "qwen3", "phi", "phi3", "gpt_neox", "falcon", "opt", "gpt_bigcode", "starcoder2", "deepseek_v3"]
)
def test_the_linear_layers_of_a_model_are_known_by_name(kind: str) -> None:
    with torch.device("meta"):
        model = model_of(kind)
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert set(linears) - set(map_to_megatron_names(linears)) == {"lm_head"}
    schemes = linear_schemes(model, REGISTRY.get("bf16_with_mxfp8_mixed"))
    assert schemes.pop("lm_head") is None
    assert {one.scheme for one in schemes.values() if one is not None} == {"mxfp8"}


def test_emulated_layers_follow_rows_too() -> None:
    config = REGISTRY.get("bf16_with_fp8_current_scaling_mixed")
    config.modules = [{"select": "*.linear_qkv", "precision": "bf16"}, {"select": "*.linear_fc2", "precision": "mxfp8"}]
    model = model_of("llama")
    replaced = emulate_linears(model, config)
    schemes = {
        name: module.precision.scheme for name, module in model.named_modules() if isinstance(module, EmulatedLinear)
    }
    assert replaced == list(schemes)
    assert {name.rpartition(".")[2]: scheme for name, scheme in schemes.items()} == {
        "o_proj": "tensorwise",
        "gate_proj": "tensorwise",
        "up_proj": "tensorwise",
        "down_proj": "mxfp8",
    }
    model = model.to(torch.bfloat16)
    report = check_precision(model, None, lambda: model(torch.arange(32)[None]).logits.float().sum().backward())
    assert [one for one in report.disagreements(config) if "planned" in one] == []
    config.modules = [{"select": {"layers": [1], "module": "linear_fc2"}, "precision": "bf16"}]
    found = [one for one in report.disagreements(config) if "planned" in one]
    assert "planned bf16, ran e4m3 x e4m3 (mxfp8): model.layers.1.mlp.down_proj." in found
    assert "planned e4m3 x e4m3 (tensorwise), ran e4m3 x e4m3 (mxfp8): model.layers.2.mlp.down_proj, fprop." in found
    qkv = "planned e4m3 x e4m3 (tensorwise), ran bf16: model.layers.1.self_attn.k_proj, "
    assert any(one.startswith(qkv) for one in found)
    config.modules = [{"select": "*.linear_qvk", "precision": "bf16"}]
    with pytest.raises(PrecisionTypeError, match="a row must take a linear layer of the model"):
        report.disagreements(config)


@pytest.mark.parametrize(
    ("select", "message"),
    [
        (
            "*.linear_qvk",
            "modules: a row must take a linear layer of the model, got *.linear_qvk. "
            "Did you mean 'linear_qkv', 'linear_fc2' or 'linear_fc1'?",
        ),
        (
            {"layers": [7], "module": "linear_fc1"},
            "modules: rows name layer 7, and the model has 4 layers. Correct the rows or the number.",
        ),
    ],
)
def test_a_row_that_takes_nothing_is_refused(select: Any, message: str) -> None:
    config = REGISTRY.get("bf16_with_mxfp8_mixed").override(modules=[{"select": select, "precision": "bf16"}])
    model = model_of("llama")
    with pytest.raises(PrecisionTypeError) as raised:
        convert_linears(model, config, emulate=True)
    assert str(raised.value) == message
    with pytest.raises(PrecisionTypeError, match="must have linear layers with names such as those of a Llama"):
        convert_linears(torch.nn.Sequential(torch.nn.Linear(32, 32)), config)
