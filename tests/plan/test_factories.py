"""The plan of a run whose quantizers a factory makes, and of a run whose environment changes Transformer Engine's."""

import pytest

from bridge.plan.memory_report import build_memory_report
from bridge.plan.precision_plan import precision_plan
from bridge.plan.workload import Workload
from bridge.precision.quantizer_factories import SHIPPED_FACTORIES
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.runtime.audit.plan_comparison import compare_with_plan
from bridge.runtime.audit.record import GemmRow, Record
from tests.model.test_shape import DENSE

ZOO = "transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo"
SHIPPED = "transformer_engine.pytorch.custom_recipes.quantizer_factories"
GROUPED = {**DENSE, "num_moe_experts": 4, "moe_grouped_gemm": True}
GEMMS = ("fprop", "dgrad", "wgrad")
FORMATS = {
    f"{SHIPPED}.high_precision_factory": ("bf16", "bf16", "bf16"),
    f"{SHIPPED}.delayed_scaling_factory": ("e4m3", "e5m2 x e4m3", "e5m2 x e4m3"),
    f"{SHIPPED}.current_scaling_factory": ("e4m3", "e5m2 x e4m3", "e5m2 x e4m3"),
    f"{SHIPPED}.float8_block_scaling_factory": ("e4m3", "e4m3", "e4m3"),
    f"{SHIPPED}.mxfp8_factory": ("e4m3", "e4m3", "e4m3"),
    f"{SHIPPED}.nvfp4_factory": ("e2m1", "e2m1", "e2m1"),
    f"{ZOO}.high_precision_fwd_mxfp8_bwd_factory": ("bf16", "e4m3", "e4m3"),
    f"{ZOO}.mxfp8_fwd_nvfp4_bwd_factory": ("e4m3", "e2m1", "e2m1"),
    f"{ZOO}.nvfp4_1d_weight_factory": ("e2m1", "e2m1", "e2m1"),
    f"{ZOO}.mxfp8_fwd_high_precision_bwd_factory": ("e4m3", "bf16", "bf16"),
    f"{ZOO}.nvfp4_row_scaled_fwd_mxfp8_bwd_factory": ("e4m3", "e4m3", "e4m3"),
    f"{ZOO}.nvfp4_row_scaled_fwd_high_precision_bwd_factory": ("e2m1", "bf16", "bf16"),
    f"{ZOO}.nvfp4_linear_fp8_dpa_factory": ("e2m1", "e2m1", "e2m1"),
}


def custom(factory, **fields):
    return MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="custom", fp8_quantizer_factory=factory, **fields)


def formats_of(plan, module="linear_fc1"):
    return tuple(plan.format_of(1, module, gemm) for gemm in GEMMS)


def test_each_gemm_of_a_factory_that_transformer_engine_ships_has_its_own_formats():
    assert {path: formats_of(precision_plan(custom(path), DENSE)) for path in FORMATS} == FORMATS
    assert [path for path in SHIPPED_FACTORIES if path not in FORMATS and ".reference_" not in path] == []


def test_a_module_of_a_per_module_file_has_the_formats_of_its_factory():
    payload = {"fp8_quantization_recipe": "custom", "custom_recipe_factory": f"{ZOO}.mxfp8_fwd_nvfp4_bwd_factory"}
    recipe = {
        "configs": {"mixed": {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": payload}},
        "matchers": {"fc1": {"type": "glob", "pattern": "*.linear_fc1", "config": "mixed", "enabled": True}},
    }
    mxfp8 = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8")
    plan = precision_plan(mxfp8, {**DENSE, "quant_recipe": recipe})
    assert formats_of(plan) == ("e4m3", "e2m1", "e2m1")
    assert formats_of(plan, "linear_fc2") == ("e4m3", "e4m3", "e4m3")


def test_rows_of_modules_name_factories_too():
    row = {"fp8_recipe": "custom", "fp8_quantizer_factory": f"{ZOO}.mxfp8_fwd_high_precision_bwd_factory"}
    precision = MixedPrecisionConfig(
        bf16=True, fp8="e4m3", fp8_recipe="mxfp8", modules=[{"select": "*.linear_fc1", **row}]
    )
    plan = precision_plan(precision, DENSE)
    assert formats_of(plan) == ("e4m3", "bf16", "bf16")
    assert plan.row(1, "linear_fc1", "input").scale == "1x32 / none, column-wise of the row-wise copy"


def test_only_grouped_experts_take_row_scaled_nvfp4_forward():
    factory = custom(f"{ZOO}.nvfp4_row_scaled_fwd_mxfp8_bwd_factory")
    grouped, each = precision_plan(factory, GROUPED), precision_plan(factory, {**GROUPED, "moe_grouped_gemm": False})
    assert formats_of(grouped, "experts.linear_fc1") == ("e2m1", "e4m3", "e4m3")
    assert grouped.row(1, "experts.linear_fc1", "input").scale == (
        "1x16 / 32x1, a second scale per row, column-wise of the row-wise copy"
    )
    assert formats_of(grouped, "linear_qkv") == formats_of(each, "experts.linear_fc1") == ("e4m3", "e4m3", "e4m3")


def test_layers_of_a_factory_in_high_precision_count_as_none_in_fp8():
    plan = precision_plan(custom(f"{SHIPPED}.high_precision_factory"), DENSE)
    assert plan.linears()[0] == 0


def test_the_factory_of_a_team_stays_custom_with_the_reason():
    plan = precision_plan(custom("team.quantizers.make"), DENSE)
    assert formats_of(plan) == ("custom", "custom", "custom")
    assert plan.settings.notes == (
        "team.quantizers.make is code that is not read: which quantizers it makes cannot be known, so its GEMMs are "
        "custom.",
    )
    assert precision_plan(custom(f"{SHIPPED}.mxfp8_factory"), DENSE).settings.notes == ()


def test_attention_of_a_factory_stays_in_high_precision_under_megatron():
    plan = precision_plan(custom(f"{ZOO}.nvfp4_linear_fp8_dpa_factory", fp8_dot_product_attention=True), DENSE)
    assert plan.format_of(1, "core_attention", "qk") == "bf16"
    assert plan.settings.notes == (
        "nvfp4_linear_fp8_dpa_factory quantises no attention: Megatron makes its CustomRecipe without fp8_dpa, so "
        "attention stays in bf16.",
    )


@pytest.mark.parametrize("scheme", ["tensorwise", "blockwise", "mxfp8", "custom"])
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_backward_override_leaves_fp8_to_the_forward_gemm(scheme, override):
    precision = MixedPrecisionConfig(
        bf16=True, fp8="e4m3", fp8_recipe=scheme, fp8_quantizer_factory="team.quantizers.make"
    )
    plan = precision_plan(precision, DENSE, environment={"NVTE_BACKWARD_OVERRIDE": override})
    forward = "custom" if scheme == "custom" else "e4m3"
    assert formats_of(plan) == (forward, "bf16", "bf16")
    assert plan.row(1, "linear_fc1", "grad_output").format == "bf16"
    assert ("of the row-wise copy" in plan.row(1, "linear_fc1", "weight").scale) is (override == "dequantized")
    assert f"NVTE_BACKWARD_OVERRIDE={override}: it runs both GEMMs of the backward pass in high precision." in (
        plan.settings.notes
    )


def test_delayed_scaling_refuses_the_override_and_has_the_formats_of_its_own():
    precision = MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="delayed")
    overridden = precision_plan(precision, DENSE, environment={"NVTE_BACKWARD_OVERRIDE": "dequantized"})
    assert overridden.diff(precision_plan(precision, DENSE)) == []


def memory_of(override):
    """Return the bytes of activations and of quantised weights of a rank."""
    precision = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8")
    environment = {"NVTE_BACKWARD_OVERRIDE": override} if override else {}
    plan = precision_plan(precision, DENSE, environment=environment)
    bytes_of = build_memory_report(plan, workload=Workload(seq_length=512)).ranks[0].bytes_of
    return bytes_of["activations"], bytes_of["low-precision copies"]


def test_the_override_decides_which_copies_are_kept():
    plain, high, dequantised = (memory_of(override) for override in ("", "high_precision", "dequantized"))
    assert plain[0] == dequantised[0] < high[0]
    assert high[1] == dequantised[1] < plain[1]  # the weight has no column-wise copy


def test_options_of_nvfp4_show_in_the_tiles():
    precision = MixedPrecisionConfig(bf16=True, fp4="e2m1")
    options = {
        "NVTE_NVFP4_DISABLE_RHT": "1",
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1",
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1",
        "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1",
        "NVTE_NVFP4_4OVER6": "weights",
    }
    plan = precision_plan(precision, DENSE, environment=options)
    scales = {name: plan.row(1, "linear_fc1", name).scale for name in ("input", "weight", "grad_output")}
    assert scales == {
        "input": "1x16 / 16x1, a second scale per row",
        "weight": "1x16 / 16x1, 4over6",
        "grad_output": "1x16 / 16x1",
    }
    mxfp8 = MixedPrecisionConfig(bf16=True, fp8="e4m3", fp8_recipe="mxfp8")
    assert precision_plan(mxfp8, DENSE, environment=options).diff(precision_plan(mxfp8, DENSE)) == []


def test_the_audit_compares_the_formats_of_a_factory_that_is_known():
    plan = precision_plan(custom(f"{ZOO}.mxfp8_fwd_high_precision_bwd_factory"), {**DENSE, "num_layers": 1})
    rows = []
    for module in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"):
        rows.append(GemmRow(layer="1", module=module, gemm="fprop", left="e4m3", right="e4m3", scheme="mxfp8"))
        rows += [GemmRow(layer="1", module=module, gemm=gemm, left="bf16", right="bf16") for gemm in GEMMS[1:]]
    rows += [GemmRow(layer="output", module="output_layer", gemm=gemm, left="bf16", right="bf16") for gemm in GEMMS]
    assert compare_with_plan(plan, Record(gemms=tuple(rows))) == ()
    rows[1] = GemmRow(layer="1", module="linear_qkv", gemm="dgrad", left="e4m3", right="e4m3", scheme="mxfp8")
    found = compare_with_plan(plan, Record(gemms=tuple(rows)))
    assert [str(one) for one in found] == ["planned bf16, ran e4m3 x e4m3 (mxfp8): layer 1, linear_qkv, dgrad."]
