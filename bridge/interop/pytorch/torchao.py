"""torchao's FP8 and MXFP8 training configs.

    {"float8": {"recipe_name": "tensorwise", "enable_fsdp_float8_all_gather": true}}      Float8LinearConfig
    {"mxfp8": {"recipe": "mxfp8_rceil"}}                                                  MXFP8TrainingOpConfig

torchao converts modules of a finished model, so it decides about linear layers and nothing else: mode, masters and
reduction are the trainer's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.interop.builders import ExportBuilder
from bridge.interop.contract import ExportReport, System, as_json
from bridge.interop.module_lists import NUM_LAYERS, name_lists, schemes_for
from bridge.interop.table import table
from bridge.precision.foreign_names import HEADS, LLAMA
from bridge.precision.mode import scheme_of
from bridge.pytorch.float8 import float8_settings, with_one_scheme

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

    from bridge.precision.matchers import Chosen
    from bridge.precision.module_schemes import ModuleSchemes
    from bridge.registry.config import MixedPrecisionConfig

TABLE = table("torchao")
FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
FILTER = "filter_fqns"
"""Names of modules that are left out, as torchao's own filter functions take them."""


def export(config: MixedPrecisionConfig, *, num_layers: int | None = None) -> ExportReport:
    """Return the config as data, empty where torchao has nothing for it; `convert_linears` applies it."""
    builder = ExportBuilder(config, TABLE.title)
    payload = float8_settings(config)
    mapped: dict[str, str] = {}
    if "mxfp8" in payload:
        mapped = dict.fromkeys(("fp8", "fp8_recipe", "fp8_wgrad"), "mxfp8.recipe")
    elif "float8" in payload:
        mapped = {"fp8": "float8", "fp8_recipe": "float8.recipe_name"}
        mapped |= {} if config.fp8_wgrad else {"fp8_wgrad": "float8.cast_config_input_for_grad_weight"}
        export_gather(builder)
    for field, setting in mapped.items():
        builder.map(field, setting)
    if payload or (scheme_of(config) is None and builder.values["modules"]):
        schemes = schemes_for(builder, num_layers, available=("tensorwise", "mxfp8"), setting=FILTER)
        written: dict[str, Chosen] = {}
        for chosen, block in _blocks(config, schemes).items():
            ((kind, settings),) = block.items()
            if written.setdefault(kind, chosen) == chosen:
                payload[kind] = {**settings, FILTER: left_out(schemes, chosen)}
            else:
                facts = {"scheme": chosen.scheme, "format": chosen.format, "written": written[kind].format}
                builder.record("torchao.one-format", "modules", **facts)
    return builder.finish(payload, TABLE.unwritten)


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


def export_gather(builder: ExportBuilder) -> None:
    """Report FP8 weights, which torchao has between ranks only."""
    if builder.config.fp8_param_gather:
        builder.record_if_stated("torchao.gathered-under-fsdp", "fp8_param_gather", "fp8_param")


def export_layers(builder: ExportBuilder, remedy: str) -> None:
    """Report a choice of modules, for which torchao's own stands."""
    for field, row in (("first_last_layers_bf16", "kept-layers"), ("modules", "kept-modules")):
        if builder.values[field]:
            builder.record(f"torchao.{row}", field, remedy=remedy)


SYSTEM = System("torchao", TABLE.title, TABLE.version, export, write=as_json, context=(NUM_LAYERS,))
