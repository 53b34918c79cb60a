"""A recipe as Megatron Bridge's `mixed_precision`.

What its class lacks stands in the sections of Megatron's own.
"""

from typing import Any

from bridge.errors import PayloadError, RunConfigError
from bridge.precision.coercion import TORCH_NAMES
from bridge.precision.config import FIELDS, MEGATRON_FIELDS, PEER_FIELDS
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.mode import get_mode
from bridge.precision.statements import is_stated
from bridge.read.foreign.amp import report_dropped_autocast
from bridge.read.foreign.effective_fields import find_equivalent_recipe
from bridge.read.foreign.export_builder import ExportBuilder
from bridge.read.foreign.reports import ExportReport
from bridge.read.foreign.table import load_table
from bridge.read.megatron_lm.stage_files import build_shared_file
from bridge.registry.config import MixedPrecisionConfig
from bridge.sync.routes import ROUTES
from bridge.target.versions import parse_version

TABLE = load_table("megatron_bridge")
PRECISION_TARGET = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"
RECIPE_TARGET = "megatron.core.quantization.quant_config.RecipeConfig.from_config_dict"
DTYPE_FIELDS = ("params_dtype", "pipeline_dtype", "autocast_dtype")
OWNER_OF_MEGATRON_FIELD = {
    route.field: route.owner for route in ROUTES if route.field in MEGATRON_FIELDS
}
"""Field that the peer's class does not have -> the section of a run that holds it, under the same
name."""
FP4_FIELDS = ("fp4_param", "fp4_param_gather")
FP4_SINCE = parse_version("0.4")
"""The release whose class has `FP4_FIELDS` first."""
PARAM_FIELD_ALIASES = {"fp8_param": "fp8_param_gather", "fp4_param": "fp4_param_gather"}


def export(
    config: MixedPrecisionConfig,
    *,
    shape: str = "fields",
    bridge_version: str = "0.7",
    **layout: int,
) -> ExportReport:
    """Return `{"mixed_precision": ...}` in a shape; `layout`: see `LAYOUT`.

    That is "fields" (every field, as saved runs have them), "strings" (the same with dtypes as
    strings, for overrides) or "name" (the recipe's name, where there is one).
    """
    builder = ExportBuilder(config, TABLE.title)
    report_dropped_autocast(builder)
    if shape not in ("fields", "strings", "name"):
        raise PayloadError(
            f"shape: must be fields, strings or name, got {shape!r}. Use one of them."
        )
    name = find_equivalent_recipe(config) if shape == "name" else None
    if name is not None:
        for field in config.stated.intersection(PEER_FIELDS):
            builder.map(field, "mixed_precision")
        return builder.finish({"mixed_precision": name, **_build_megatron_sections(builder, shape)})
    sections = _build_megatron_sections(builder, shape)
    content = None
    if shape != "fields" and builder.values["modules"]:
        builder.record("megatron_bridge.its-recipe-is-a-python-object", "modules")
    else:
        content = build_shared_file(builder, layout)
    if content is not None:
        builder.map("modules", "model.quant_recipe")
        sections.setdefault("model", {})["quant_recipe"] = {
            "_target_": RECIPE_TARGET,
            "config": content,
        }
    return builder.finish(
        {"mixed_precision": _build_peer_fields(builder, shape, bridge_version), **sections}
    )


def _build_peer_fields(builder: ExportBuilder, shape: str, bridge_version: str) -> dict[str, Any]:
    """Return every field of the peer's class, in a shape, as a release has them."""
    config = builder.config
    payload: dict[str, Any] = {"_target_": PRECISION_TARGET} if shape == "fields" else {}
    has_fp4_fields = _has_fp4_fields(bridge_version)
    for field in PEER_FIELDS:
        if field in FP4_FIELDS and not has_fp4_fields:
            continue
        builder.map(field, f"mixed_precision.{PARAM_FIELD_ALIASES.get(field, field)}")
        # One of the two names: written together, the order of the keys would decide.
        if field not in PARAM_FIELD_ALIASES:
            payload[field] = _format_value(builder.values[field], field, shape)
    for field in DTYPE_FIELDS[:2]:
        # None would be written over the model's own dtype.
        if builder.values[field] is None:
            payload[field] = _format_value(get_mode(config), field, shape)
    if config.first_last_layers_bf16:
        for field in LAYER_COUNTS:
            if not is_stated(config, field):
                payload[field] = 1
    return payload


def _has_fp4_fields(bridge_version: object) -> bool:
    """Return whether a release's class has the fields of FP4; PayloadError for a text that is no version."""
    try:
        return parse_version(str(bridge_version)) >= FP4_SINCE
    except RunConfigError:
        raise PayloadError(
            f"bridge_version: must begin with a number, got {bridge_version!r:.60}. Write 0.7, for example."
        ) from None


def _build_megatron_sections(builder: ExportBuilder, shape: str) -> dict[str, Any]:
    """Return the sections of Megatron's own with the stated fields that the peer's class does not have."""
    sections: dict[str, Any] = {}
    for field, owner in OWNER_OF_MEGATRON_FIELD.items():
        if field in builder.config.stated:
            value = _format_value(builder.values[field], field, shape)
            if isinstance(value, tuple):
                value = list(value)
            sections.setdefault(owner, {})[field] = value
            builder.map(field, f"{owner}.{field}")
    return sections


def _format_value(value: Any, field: str, shape: str) -> Any:
    if value not in TORCH_NAMES or FIELDS[field].kind != "dtype":
        return value
    name = f"torch.{TORCH_NAMES[value]}"
    if shape == "fields":
        return {"_target_": name, "_call_": False}
    return name
