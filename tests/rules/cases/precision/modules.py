"""Runs that break and that keep the rules of `bridge.rules.topics.precision.modules`."""

from tests.rules.cases.runs import (
    BF16,
    CURRENT,
    CURRENT_PLAIN,
    DENSE,
    H100,
    INTERLEAVED,
    MODULE_MXFP8,
    full,
    module_recipe,
    run,
)

OLD_H100 = "h100x8,te2.9,cuda12.9,cudnn9.14,mcore0.16.1"
PIPELINE = {"pipeline_model_parallel_size": 4, "pipeline_dtype": "bf16"}


def module_file(pattern, scheme="mxfp8", **more):
    """Megatron's per-module recipe with one matcher, which is on."""
    matcher = {"type": "glob", "pattern": pattern, "config": "head", "enabled": True}
    recipe = module_recipe(scheme)
    recipe["configs"]["head"]["training_recipe"].update(more)
    return {**recipe, "matchers": {"one": matcher}}


def with_row(base, **row):
    """A precision with one row of `modules`."""
    return dict(base, modules=[row])


def custom(factory):
    """A row's own quantizer factory."""
    return {"fp8_recipe": "custom", "fp8_quantizer_factory": factory}


ZOO = "transformer_engine.pytorch.custom_recipes.quantizer_factory_zoo.mxfp8_fwd_nvfp4_bwd_factory"
MODULE_OFF = {**MODULE_MXFP8, "matchers": {"one": {"type": "glob", "pattern": "*.linear_qkv", "config": "head"}}}
LATER = {"select": "*.linear_qkv", "precision": "bf16"}

CASES = {
    "PB281": (
        full(with_row(CURRENT, select="*.liner_qkv", precision="bf16"), H100),
        full(with_row(CURRENT, select="*.linear_qkv", precision="bf16"), H100),
    ),
    "PB282": (
        full(dict(CURRENT, modules=[{"select": "*.linear_*", "precision": "bf16"}, LATER]), H100),
        full(dict(CURRENT, modules=[LATER, {"select": "*.linear_*", "precision": "bf16"}]), H100),
    ),
    "PB283": (
        full(with_row(CURRENT_PLAIN, select="*", precision="blockwise"), H100),
        full(with_row(CURRENT_PLAIN, select="*.linear_*", precision="blockwise"), H100),
    ),
    "PB284": (
        full(CURRENT_PLAIN, H100, dict(DENSE, quant_recipe=module_file("*layers.0.*", None), **PIPELINE)),
        full(CURRENT_PLAIN, H100, dict(DENSE, quant_recipe=module_file("*.linear_qkv", None), **PIPELINE)),
    ),
    "PB285": (
        full(with_row(CURRENT, select="decoder.layers.5.mlp.*", precision="bf16"), H100, dict(DENSE, **INTERLEAVED)),
        full(with_row(CURRENT, select="decoder.layers.*.mlp.*", precision="bf16"), H100, dict(DENSE, **INTERLEAVED)),
    ),
    "PB286": (
        full(BF16, H100, dict(DENSE, quant_recipe=module_file("*.linear_qkv", "tensorwise"))),
        full(BF16, H100, dict(DENSE, quant_recipe=module_file("*.linear_qkv", None))),
    ),
    "PB287": (
        full(with_row(BF16, select="*.linear_qkv", precision="tensorwise"), OLD_H100),
        full(with_row(BF16, select="*.linear_qkv", precision="tensorwise"), H100),
    ),
    "PB288": (
        full(with_row(CURRENT_PLAIN, select="*.linear_qkv", fp8_recipe="tensorwise", fp8_param=True), OLD_H100),
        full(with_row(CURRENT_PLAIN, select="*.linear_qkv", fp8_recipe="tensorwise", fp8_param=False), OLD_H100),
    ),
    "PB289": (
        full(with_row(CURRENT_PLAIN, select="*.linear_qkv", fp8_recipe="tensorwise", fp8_param=True), H100),
        full(with_row(CURRENT_PLAIN, select="*.linear_qkv", fp8_recipe="tensorwise", fp8_param=False), H100),
    ),
    "PB290": (
        full(CURRENT_PLAIN, H100, dict(DENSE, quant_recipe=MODULE_OFF)),
        full(CURRENT_PLAIN, H100, dict(DENSE, quant_recipe=MODULE_MXFP8)),
    ),
    "PB291": (
        full(with_row(CURRENT_PLAIN, select="*.linear_qkv", precision="mxfp8"), H100),
        full(with_row(CURRENT_PLAIN, select="*.linear_qkv", precision="blockwise"), H100),
    ),
    "PB292": (
        full(with_row(CURRENT, select={"layers": [0, 99], "module": "linear_fc2"}, precision="bf16"), H100),
        full(with_row(CURRENT, select={"layers": [0, -1], "module": "linear_fc2"}, precision="bf16"), H100),
    ),
    "PB293": (
        run(with_row(BF16, select="*.linear_qkv", precision="bf16"), H100, model=DENSE),
        run(with_row(CURRENT_PLAIN, select="*.linear_qkv", precision="bf16"), H100, model=DENSE),
    ),
    "PB294": (
        run("bf16_mixed", H100, model=dict(DENSE, quant_recipe="te_quant.yaml")),
        run("bf16_mixed", H100, model=DENSE),
    ),
    "PB295": (
        full(with_row(CURRENT_PLAIN, select="*.linear_qkv", **custom("bridge.rules.rule.remedy")), H100),
        full(with_row(CURRENT_PLAIN, select="*.linear_qkv", **custom("bridge.rules.rule.format_remedies")), H100),
    ),
    "PB298": (
        full(dict(CURRENT_PLAIN, **custom(ZOO)), "h100x8,te2.18,cuda12.9,mcore0.19.2"),
        full(dict(CURRENT_PLAIN, **custom(ZOO)), "h100x8,te2.20,cuda12.9,mcore0.19.2"),
    ),
    "PB297": (
        full(with_row(CURRENT, select="*", precision="bf16"), H100),
        full(with_row(CURRENT, select="*.linear_qkv", precision="bf16"), H100),
    ),
    "PB296": (
        full(with_row(CURRENT, select="*.linear_qkv", precision="blockwise"), H100),
        full(with_row(CURRENT, select="*.linear_qkv", precision="bf16", evaluation="tensorwise"), H100),
    ),
}
