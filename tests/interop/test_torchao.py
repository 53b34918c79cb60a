"""torchao's configs as data; the real classes are in test_real_libraries."""

from typing import Any

import pytest
import torch

from bridge.errors import BackendUnavailableError, BridgeError
from bridge.interop import accelerate
from bridge.interop.pytorch import torchao
from bridge.pytorch import float8_linear_config_for, linear_schemes
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from tests.interop.properties import reasons


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_rowwise_is_not_blockwise(recipe: str) -> None:
    imported = torchao.import_({"float8": {"recipe_name": recipe}})
    assert imported.config.fp8 is None
    assert reasons(imported, "float8.recipe_name") == ["unsupported"]


def test_e4m3_gradients_are_the_format_e4m3() -> None:
    casts = {f"cast_config_{name}": {"target_dtype": "e4m3"} for name in ("input", "weight", "grad_output")}
    assert torchao.import_({"float8": casts}).config.fp8 == "e4m3"
    assert torchao.import_({"float8": {"recipe_name": "tensorwise"}}).config.fp8 == "hybrid"


def test_float8_all_gather_is_near_stored_fp8_and_no_more() -> None:
    imported = torchao.import_({"float8": {"recipe_name": "tensorwise", "enable_fsdp_float8_all_gather": True}})
    assert imported.config.fp8_param_gather is True
    assert reasons(imported, "float8.enable_fsdp_float8_all_gather") == ["approximated"]


def test_all_gather_needs_tensorwise_weights() -> None:
    with pytest.raises(BridgeError, match="needs tensorwise scaling of weights"):
        torchao.import_({"float8": {"recipe_name": "rowwise", "enable_fsdp_float8_all_gather": True}})


def test_high_precision_weight_gradients_are_dead_in_transformer_engine() -> None:
    imported = torchao.import_({"mxfp8": {"recipe": "mxfp8_rceil_wgrad_with_hp"}})
    assert (imported.config.fp8_recipe, imported.config.fp8_wgrad) == ("mxfp8", False)
    assert "dead knob" in reasons(imported, "mxfp8.recipe")


@pytest.mark.parametrize(
    ("settings", "field", "reason"),
    [
        ({"emulate": True}, "float8.emulate", "unsupported"),
        ({"pad_inner_dim": True}, "float8.pad_inner_dim", "unsupported"),
        ({"gemm_config_output": {"use_fast_accum": False}}, "float8.gemm_config_output", "unsupported"),
        ({"module_filter_fn": len}, "float8.module_filter_fn", "unsupported"),
    ],
    ids=str,
)
def test_what_has_no_field_is_reported(settings: dict[str, Any], field: str, reason: str) -> None:
    assert reasons(torchao.import_({"float8": {"recipe_name": "tensorwise", **settings}}), field) == [reason]


def test_the_mode_is_the_trainers() -> None:
    assert reasons(torchao.import_("tensorwise"), "mode") == ["implied default"]
    assert torchao.import_("tensorwise", mode="fp16").config.mode == "fp16"
    assert reasons(torchao.export(REGISTRY.get("bf16_mixed")), "bf16") == ["unsupported"]


@pytest.mark.parametrize(
    "payload",
    [
        "delayed",
        {"float8": {"recipe_name": "delayed"}},
        {"float8": {"cast_config_input": {"scaling_type": "off"}}},
        {"float8": {"cast_config_weight": {"target_dtype": "e5m2"}}},
        3,
    ],
)
def test_nonsense_is_one_sentence(payload: Any) -> None:
    with pytest.raises(BridgeError) as caught:
        torchao.import_(payload)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["delayed", "blockwise"])
def test_schemes_it_does_not_have_make_no_object(scheme: str) -> None:
    config = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe=scheme)
    assert torchao.export(config).payload == {}
    with pytest.raises(BackendUnavailableError, match=f"torchao has no {scheme} scaling"):
        float8_linear_config_for(config)
    assert float8_linear_config_for(REGISTRY.get("bf16_mixed")) is None


def test_what_is_not_read_is_recorded_and_no_recipe_is_named_beside_it() -> None:
    imported = torchao.import_({"float8": {"recipe_name": "tensorwise", "foo_dtype": "bf16"}, "mxfp8": {"recipe": "x"}})
    assert imported.recipe is None
    assert [reasons(imported, name) for name in ("float8.foo_dtype", "mxfp8")] == [["unsupported"]] * 2
    assert torchao.import_({"float8": {"recipe_name": "rowwise"}}).recipe is None


def test_a_format_may_have_torchs_own_name() -> None:
    casts = {"cast_config_grad_output": {"target_dtype": "float8_e4m3fn"}}
    assert torchao.import_({"float8": casts}).config.fp8 == "e4m3"


ROWS = [
    {"select": "*.linear_qkv", "precision": "bf16"},
    {"select": {"layers": [0, -1], "module": "linear_fc2"}, "precision": "bf16"},
]


def test_rows_become_a_list_of_names_and_come_back() -> None:
    config = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="tensorwise", modules=ROWS)
    exported = torchao.export(config, num_layers=4)
    listed = exported.payload["float8"]["filter_fqns"]
    assert [one for one in listed if "mlp" in one] == ["layers.0.mlp.down_proj", "layers.3.mlp.down_proj"]
    back = torchao.import_(exported.payload, mode="bf16").config
    assert back.modules == [ROWS[0], {"select": {"layers": [0, 3], "module": "linear_fc2"}, "precision": "bf16"}]
    assert reasons(torchao.import_({"float8": {"filter_fqns": ["q_proj"]}}), "float8.filter_fqns") == ["semantics"] * 2


def test_two_formats_of_one_scheme_are_reported() -> None:
    row = {"select": "*.linear_fc1", "fp8_recipe": "tensorwise", "fp8": "e4m3"}
    config = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="tensorwise", modules=[row])
    exported = torchao.export(config)
    assert exported.payload["float8"]["filter_fqns"] == ["mlp.gate_proj", "mlp.up_proj", "lm_head"]
    assert reasons(exported, "modules") == ["semantics"]


def test_a_list_leaves_out_in_torchaos_own_filter_what_the_plan_leaves_in_bf16() -> None:
    transformers = pytest.importorskip("transformers", reason="pip install precision-bridge[interop]")
    ours = pytest.importorskip("torchao.float8", reason="pip install precision-bridge[interop]")
    sizes = {"hidden_size": 8192, "intermediate_size": 8192, "num_hidden_layers": 4, "vocab_size": 8192}
    with torch.device("meta"):
        llama = transformers.AutoConfig.for_model("llama", **sizes, num_attention_heads=8)
        model = transformers.AutoModelForCausalLM.from_config(llama)
    config = REGISTRY.get("bf16_with_fp8_current_scaling_mixed").state(modules=ROWS)
    exported = torchao.export(config, num_layers=4)
    takes = ours._auto_filter_for_recipe("tensorwise", filter_fqns=exported.payload["float8"]["filter_fqns"])
    made = accelerate.export(config, form="arguments", num_layers=4)
    own = accelerate.accelerator_arguments(made.payload)["kwargs_handlers"][0].module_filter_func
    for name, scheme in linear_schemes(model, config).items():
        module = model.get_submodule(name)
        assert takes(module, name) == own(module, name) == (scheme is not None), name
