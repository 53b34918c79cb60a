"""torchao's FP8 and MXFP8 training configs.

    {"float8": {"recipe_name": "tensorwise", "enable_fsdp_float8_all_gather": true}}      Float8LinearConfig
    {"mxfp8": {"recipe": "mxfp8_rceil"}}                                                  MXFP8TrainingOpConfig

The objects themselves are read too. torchao converts modules of a finished model, so it decides about linear layers and
nothing else: mode, masters and reduction are the trainer's. Of the casts per operand three facts are read: whether rows
are scaled by themselves, the format of output gradients, and whether the weight gradient is in high precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.interop.builders import ExportBuilder, ImportBuilder
from bridge.interop.contract import ExportReport, System, as_json
from bridge.interop.module_lists import NUM_LAYERS, name_lists, schemes_for
from bridge.precision.foreign_names import HEADS, LLAMA
from bridge.pytorch.float8 import float8_settings, with_one_scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

    from bridge.precision.matchers import Chosen
    from bridge.precision.module_schemes import ModuleSchemes
    from bridge.registry.config import MixedPrecisionConfig

TITLE = "torchao"
VERSION = "torchao 0.18.0"
FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
FILTER = "filter_fqns"
"""Names of modules that are left out, as torchao's own filter functions take them."""


def export(config: MixedPrecisionConfig, *, num_layers: int | None = None) -> ExportReport:
    """Return the config as data, empty where torchao has nothing for it; `convert_linears` applies it."""
    builder = ExportBuilder(config, TITLE)
    payload = float8_settings(config)
    others = ("fp32", "fp16", "bf16", "params_dtype", "grad_reduce_in_fp32", "autocast_enabled", "autocast_dtype")
    builder.record_if_stated("pytorch.is-the-trainer-business-torchao", others)
    if "mxfp8" in payload:
        for field in ("fp8", "fp8_recipe", "fp8_wgrad"):
            builder.map(field, "mxfp8.recipe")
    elif "float8" in payload:
        builder.map("fp8", "float8")
        builder.map("fp8_recipe", "float8.recipe_name")
        export_gather(builder)
        if not config.fp8_wgrad:
            builder.map("fp8_wgrad", "float8.cast_config_input_for_grad_weight")
    elif config.fp8 is not None:
        fields = ("fp8", "fp8_recipe", "fp8_param_gather", "fp8_wgrad")
        builder.record_if_on("pytorch.no-such-scaling", fields, scheme=config.fp8_recipe)
    if payload or (config.scheme is None and builder.values["modules"]):
        schemes = schemes_for(builder, num_layers, available=("tensorwise", "mxfp8"), setting=FILTER)
        written: dict[str, Chosen] = {}
        for chosen, block in _blocks(config, schemes).items():
            ((kind, settings),) = block.items()
            if written.setdefault(kind, chosen) == chosen:
                payload[kind] = {**settings, FILTER: left_out(schemes, chosen)}
                continue
            facts = {"scheme": chosen.scheme, "format": chosen.format, "written": written[kind].format}
            builder.record("pytorch.one-format", "modules", **facts)
    return builder.finish(payload)


def _blocks(config: MixedPrecisionConfig, schemes: ModuleSchemes | None) -> dict[Chosen, dict[str, Any]]:
    """Return torchao's settings of each scheme that some linear layer runs in."""
    if schemes is None:
        return {}
    lists = name_lists(schemes, LLAMA)
    found = [one for one in dict.fromkeys((schemes.run, *lists)) if one is not None and one in lists]
    return {one: settings for one in found if (settings := float8_settings(with_one_scheme(config, one)))}


def left_out(schemes: ModuleSchemes | None, chosen: Chosen | None) -> list[str]:
    """Return the names of a dense Llama model's modules that do not run in a scheme; the output layer always."""
    lists = name_lists(schemes, LLAMA) if schemes is not None else {}
    return [*(name for other, names in lists.items() if other != chosen for name in names), HEADS[0]]


def module_filter(left_out: Collection[str]) -> Callable[[torch.nn.Module, str], bool]:
    """Return the `module_filter_fn` that leaves modules out whose names contain one of some names."""

    def takes(module: torch.nn.Module, name: str) -> bool:
        sizes = (getattr(module, "in_features", 1), getattr(module, "out_features", 1))
        return not any(size % 16 for size in sizes) and not any(one in name for one in left_out)

    return takes


def import_gather(builder: ImportBuilder, setting: str, gather: bool) -> None:
    """Map the gather of weights in FP8, and report what Megatron does more."""
    builder.map(setting, fp8_param_gather=gather)
    if gather:
        report_gather(builder, setting)


def report_gather(builder: ImportBuilder, setting: str) -> None:
    """Report what Megatron does more than gather weights in FP8."""
    builder.record("pytorch.weights-are-gathered-as-fp8", setting, True)


def export_gather(builder: ExportBuilder) -> None:
    """Report FP8 weights, which torchao has between ranks only."""
    if builder.config.fp8_param_gather:
        builder.record_if_stated("pytorch.weights-are-gathered-as-fp8-under", ("fp8_param_gather", "fp8_param"))


def export_layers(builder: ExportBuilder, remedy: str) -> None:
    """Report a choice of modules, for which torchao's own stands."""
    detail = "torchao leaves the first and the last nn.Linear out, not whole layers"
    if builder.config.first_last_layers_bf16:
        builder.report("first_last_layers_bf16", "approximated", detail, remedy)
    if builder.values["modules"]:
        builder.report("modules", "semantics", f"{detail}, and no others", remedy)


SYSTEM = System("torchao", TITLE, VERSION, export=export, write=as_json, context=(NUM_LAYERS,))
