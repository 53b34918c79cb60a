"""Runs that break and that keep the rules of `bridge.rules.topics.precision.scheme`."""

from tests.rules.cases.runs import (
    B200,
    BF16,
    CURRENT,
    CURRENT_PLAIN,
    CUSTOM,
    DELAYED,
    DELAYED_RECIPE,
    DENSE,
    H100,
    HYBRID,
    MODULE_DELAYED,
    MODULE_MXFP8,
    MXFP8,
    full,
    recipe,
    run,
)

BLOCKWISE_STORED = recipe("nanov2_bf16_with_fp8_subchannel_scaling_mixed")

CASES = {
    "PB201": (full(dict(CURRENT, fp8="e5m2"), H100), full(dict(CURRENT, fp8="e4m3"), H100)),
    "PB202": (full(dict(CURRENT, fp8_recipe="tensorwize"), H100), full(CURRENT, H100)),
    "PB203": (full(dict(DELAYED, fp8_amax_compute_algo="maximum"), H100), full(DELAYED, H100)),
    "PB204": (run({"bf16": True, "fp8": "hybrid", "fp4": "e2m1"}, B200), run({"bf16": True, "fp4": "e2m1"}, B200)),
    "PB205": (run({"bf16": True, "fp8_recipe": "mxfp8"}), run({"bf16": True, "fp8": None, "fp8_recipe": "tensorwise"})),
    "PB206": (full(dict(MXFP8, fp8="hybrid"), B200), full(MXFP8, B200)),
    "PB207": (full(BLOCKWISE_STORED, H100), full(CURRENT, H100)),
    "PB208": (full(CUSTOM, H100), full(CUSTOM, H100, dict(DENSE, fp8_quantizer_factory="house.quantizers.make"))),
    "PB209": (
        run(dict(CUSTOM, fp8="e4m3"), H100, model=dict(DENSE, fp8_quantizer_factory="house.quantizers.make")),
        run(CUSTOM, H100, model=dict(DENSE, fp8_quantizer_factory="house.quantizers.make")),
    ),
    "PB210": (full(dict(CURRENT, fp8_margin=2), H100), full(dict(DELAYED, fp8_margin=2), H100)),
    "PB211": (full(dict(CURRENT, fp8_wgrad=False), H100), full(dict(CURRENT, fp8_wgrad=True), H100)),
    "PB212": (
        full(CURRENT, H100, dict(DENSE, transformer_impl="local")),
        full(BF16, H100, dict(DENSE, transformer_impl="local")),
    ),
    "PB213": (
        run("bf16_mixed", H100, model=dict(DENSE, quant_recipe=MODULE_DELAYED)),
        run("bf16_mixed", H100, model=dict(DENSE, quant_recipe=MODULE_MXFP8)),
    ),
    "PB214": (
        full(CURRENT, H100, dict(HYBRID, quant_recipe=MODULE_MXFP8)),
        full(CURRENT_PLAIN, H100, dict(HYBRID, quant_recipe=MODULE_MXFP8)),
    ),
    "PB215": (
        full(CURRENT, H100, dict(DENSE, fp8_output_proj=True)),
        full(MXFP8, B200, dict(DENSE, fp8_output_proj=True)),
    ),
    "PB216": (
        full(MXFP8, B200, dict(HYBRID, fp8_output_proj=True)),
        full(MXFP8, B200, dict(DENSE, fp8_output_proj=True)),
    ),
    "PB217": (
        run("bf16_mixed", model=dict(DENSE, activation_func_fp8_input_store=True)),
        run("bf16_mixed", model=dict(DENSE, activation_func_fp8_input_store=True, gated_linear_unit=True)),
    ),
    "PB218": (run(dict(BF16, muon_fp32_matmul_prec="tf32")), run(dict(BF16, muon_fp32_matmul_prec="high"))),
    "PB219": (
        run(dict(BF16, activation_func_fp8_input_store=True), model=dict(DENSE, gated_linear_unit=True)),
        run(
            dict(BF16, activation_func_fp8_input_store=True),
            model=dict(DENSE, gated_linear_unit=True, bias_activation_fusion=True),
        ),
    ),
    "PB222": (full(dict(DELAYED, fp8_amax_history_len=1), H100), full(DELAYED, H100)),
    "PB223": (full(DELAYED_RECIPE, H100), full(DELAYED, H100)),
}
