"""Transformer Engine's recipe objects, as mappings: `{"_target_": "...DelayedScaling", "margin": 0, ...}`.

A recipe says how the matrix multiplications are quantised and nothing else: dtype, masters, loss scale and gradient
reduction live elsewhere. Its classes are pydantic dataclasses that swallow arguments they do not know without a word.
"""

from typing import Any

from bridge.interop.builders import DELAYED, ExportBuilder
from bridge.interop.contract import ExportReport, System, as_json
from bridge.interop.module_lists import NUM_LAYERS, schemes_for
from bridge.interop.table import table
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.mode import scheme_of
from bridge.precision.module_schemes import ModuleSchemes
from bridge.precision.schemes import scheme_row
from bridge.registry.config import MixedPrecisionConfig

TABLE = table("te_recipe")
MODULE = "transformer_engine.common.recipe"

ATTENTION = {"fp8_dpa": "fp8_dot_product_attention", "fp8_mha": "fp8_multi_head_attention"}
DEFAULT_FORMATS = {"delayed": "hybrid", "tensorwise": "hybrid", "blockwise": "e4m3", "mxfp8": "e4m3", "nvfp4": "e2m1"}
"""Scheme -> the format that its class takes by itself."""
FACTORY = "bridge.megatron.te.layers.module_factory"
IN_FACTORY = ("fp8", "fp8_recipe", "fp4", "fp4_recipe", "modules", "first_last_layers_bf16", *LAYER_COUNTS, *DELAYED)


def export(config: MixedPrecisionConfig, *, num_layers: int | None = None) -> ExportReport:
    """Return the recipe's class and arguments; None where nothing runs below half precision.

    A precision that chooses modules is a `CustomRecipe` with a factory of ours, for `hydra.utils.instantiate`.
    """
    builder = ExportBuilder(config, TABLE.title)
    row = scheme_row(scheme_of(config))
    if builder.values["modules"] or (config.first_last_layers_bf16 and num_layers is not None):
        schemes = schemes_for(builder, num_layers, available=DEFAULT_FORMATS, setting="qfactory")
        if schemes is not None and schemes.chooses:
            return builder.finish(_custom(builder, schemes), TABLE.unwritten)
    if row is None or row.te_class == "CustomRecipe":
        return builder.finish(None, TABLE.unwritten)
    chosen = str(builder.values[row.family]).upper()
    payload: dict[str, Any] = {"_target_": f"{MODULE}.{row.te_class}", f"{row.family}_format": chosen}
    builder.map(row.family, f"{row.family}_format")
    builder.map(f"{row.family}_recipe", "_target_")
    for argument, name in {**row.te_keywords, **ATTENTION}.items():
        if row.name == "blockwise" and builder.values[name]:
            builder.record("te_recipe.transformer-engine-refuses", name)
        elif name != "fp8_multi_head_attention" or row.name == "delayed":
            payload[argument] = builder.values[name]
            builder.map(name, argument)
    return builder.finish(payload, TABLE.unwritten)


def _custom(builder: ExportBuilder, schemes: ModuleSchemes) -> dict[str, Any]:
    """Return a recipe whose factory gives each module, by its name, the quantizers of its scheme."""
    config, run = builder.config, schemes.run
    wanted = (run, *(row.training.chosen for row in schemes.matchers.matchers if row.training))
    for chosen in dict.fromkeys(one for one in wanted if one is not None and one.scheme in DEFAULT_FORMATS):
        default = DEFAULT_FORMATS[chosen.scheme]
        if chosen.format != default:
            facts = {"scheme": chosen.scheme, "default": default, "format": chosen.format}
            builder.record("te_recipe.transformer-engine-factory", "fp8" if chosen == run else "modules", **facts)
    off = () if scheme_of(config) == "delayed" else tuple(DELAYED)
    off += () if config.fp8 else ("fp8_recipe",)
    off += () if config.fp4 else ("fp4_recipe",)
    fields = [name for name in IN_FACTORY if builder.values[name] and name not in off]
    for name in fields:
        builder.map(name, "qfactory")
    factory = {"_target_": FACTORY, **{name: builder.values[name] for name in fields}}
    if schemes.num_layers is not None:
        factory["num_layers"] = schemes.num_layers
    return {"_target_": f"{MODULE}.CustomRecipe", "qfactory": factory}


SYSTEM = System("te-recipe", "Transformer Engine recipe", "2.20.2", export, write=as_json, context=(NUM_LAYERS,))
