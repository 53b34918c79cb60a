"""`export`: a recipe as Megatron Bridge's `mixed_precision`.

    export(config, shape="strings").payload    # {"mixed_precision": {"bf16": True, ...}, "ddp": {...}}

A stated field that Megatron Bridge's class does not have is written into the section of Megatron's
config that has it.
"""

from collections.abc import Mapping

from bridge.errors import PayloadError, RunConfigError
from bridge.precision.coercion import TORCH_NAMES
from bridge.precision.mode import FILLED_DTYPE_FIELDS, get_mode
from bridge.precision.precision_config import FIELDS, MEGATRON_BRIDGE_FIELDS, MEGATRON_FIELDS
from bridge.precision.stated_field import LAYER_COUNTS
from bridge.precision.statements import is_stated
from bridge.read.foreign.amp import report_dropped_autocast
from bridge.read.foreign.effective_fields import find_equivalent_recipe
from bridge.read.foreign.export_builder import ExportBuilder
from bridge.read.foreign.reports import ExportReport
from bridge.read.foreign.table import load_table
from bridge.read.megatron_lm.module_recipe.stage_files import build_shared_file
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.saved_entry import PEER_TARGET
from bridge.sync.field_routes import ROUTES
from bridge.target.versions import parse_version

TABLE = load_table("megatron_bridge")
RECIPE_TARGET = "megatron.core.quantization.quant_config.RecipeConfig.from_config_dict"
OWNER_OF_MEGATRON_FIELD = {
    route.field: route.owner for route in ROUTES if route.field in MEGATRON_FIELDS
}
"""Field that Megatron Bridge's class lacks -> the section of a run that has it, under the same name."""
FP4_FIELDS = ("fp4_param", "fp4_param_gather")
FP4_SINCE = parse_version("0.4")
"""The first release whose class has `FP4_FIELDS`."""
PARAM_FIELD_ALIASES = {"fp8_param": "fp8_param_gather", "fp4_param": "fp4_param_gather"}
"""The model's name of stored weights -> the name in DDP's config. Both are fields of the class."""
SHAPES = ("fields", "strings", "name")


def export(
    config: MixedPrecisionConfig,
    *,
    shape: str = "fields",
    bridge_version: str = "0.7",
    **layout: int,
) -> ExportReport:
    """Return the recipe as `{"mixed_precision": ...}` and sections of Megatron's configs.

    Args:
        config: The recipe.
        shape: "fields" has every field, in the form of saved runs. "strings" is the same with dtypes as
            strings, for overrides. "name" is the recipe's name if a recipe has all values.
        bridge_version: The release of Megatron Bridge that reads the result.
        layout: Keys of `stage_files.LAYOUT_KEYS`, for rows of `modules` that name layers.

    Raises:
        PayloadError: The shape or the release is unknown.
    """
    builder = ExportBuilder(config, TABLE.title)
    report_dropped_autocast(builder)
    if shape not in SHAPES:
        raise PayloadError(
            f"shape: must be fields, strings or name, got {shape!r}. Use one of them."
        )
    recipe_name = None
    if shape == "name":
        recipe_name = find_equivalent_recipe(config)
    if recipe_name is not None:
        for field in config.stated.intersection(MEGATRON_BRIDGE_FIELDS):
            builder.map(field, "mixed_precision")
        sections = _build_megatron_sections(builder, shape)
        return builder.finish({"mixed_precision": recipe_name, **sections})
    sections = _build_megatron_sections(builder, shape)
    _add_module_rows(builder, sections, shape, layout)
    fields = _build_peer_fields(builder, shape, bridge_version)
    return builder.finish({"mixed_precision": fields, **sections})


def _add_module_rows(
    builder: ExportBuilder,
    sections: dict[str, dict[str, object]],
    shape: str,
    layout: Mapping[str, int],
) -> None:
    """Add rows of `modules` to the model's section, or report that strings cannot state them."""
    if shape != "fields" and builder.values["modules"]:
        builder.record("megatron_bridge.its-recipe-is-a-python-object", "modules")
        return
    content = build_shared_file(builder, layout)
    if content is None:
        return
    builder.map("modules", "model.quant_recipe")
    model = sections.setdefault("model", {})
    model["quant_recipe"] = {"_target_": RECIPE_TARGET, "config": content}


def _build_peer_fields(
    builder: ExportBuilder, shape: str, bridge_version: str
) -> dict[str, object]:
    """Return every field that the class of a release has, in a shape."""
    config = builder.config
    payload: dict[str, object] = {}
    if shape == "fields":
        payload["_target_"] = PEER_TARGET
    has_fp4_fields = _has_fp4_fields(bridge_version)
    for field in MEGATRON_BRIDGE_FIELDS:
        if field in FP4_FIELDS and not has_fp4_fields:
            continue
        builder.map(field, f"mixed_precision.{PARAM_FIELD_ALIASES.get(field, field)}")
        # Only one of the two names is written. With both, the order of the keys would decide.
        if field not in PARAM_FIELD_ALIASES:
            payload[field] = _format_value(builder.values[field], field, shape)
    for field in FILLED_DTYPE_FIELDS:
        if builder.values[field] is None:
            payload[field] = _format_value(get_mode(config), field, shape)
    if config.first_last_layers_bf16:
        for field in LAYER_COUNTS:
            if not is_stated(config, field):
                payload[field] = 1  # the class would write 0 over Megatron's own 1
    return payload


def _has_fp4_fields(bridge_version: object) -> bool:
    """Return whether the class of a release has the fields of FP4.

    Raises:
        PayloadError: The text is no version.
    """
    try:
        return parse_version(str(bridge_version)) >= FP4_SINCE
    except RunConfigError:
        raise PayloadError(
            f"bridge_version: must begin with a number, got {bridge_version!r:.60}. Write 0.7, for example."
        ) from None


def _build_megatron_sections(builder: ExportBuilder, shape: str) -> dict[str, dict[str, object]]:
    """Return the sections of Megatron's configs with the stated fields that Megatron Bridge's class lacks."""
    sections: dict[str, dict[str, object]] = {}
    for field, owner_name in OWNER_OF_MEGATRON_FIELD.items():
        if field in builder.config.stated:
            value = _format_value(builder.values[field], field, shape)
            if isinstance(value, tuple):
                value = list(value)
            sections.setdefault(owner_name, {})[field] = value
            builder.map(field, f"{owner_name}.{field}")
    return sections


def _format_value(value: object, field: str, shape: str) -> object:
    """Return the value of a field in a shape. A dtype is an object in a saved run, and else a string."""
    if value not in TORCH_NAMES or FIELDS[field].kind != "dtype":
        return value
    name = f"torch.{TORCH_NAMES[value]}"
    if shape == "fields":
        return {"_target_": name, "_call_": False}
    return name
