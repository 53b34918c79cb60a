"""`export`: a recipe as Megatron-LM's list of arguments.

    export(config).payload     # ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", ...]

A setting that acts is written out, even where Megatron-LM's default is the same.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.precision.config import FIELD_DEFAULTS, MEGATRON_FIELDS
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.mode import get_mode
from bridge.precision.statements import is_stated
from bridge.read.foreign.amp import report_dropped_autocast
from bridge.read.foreign.effective_fields import compute_effective_fields
from bridge.read.foreign.export_builder import ExportBuilder
from bridge.read.foreign.import_builder import DELAYED_SCALING_DEFAULTS
from bridge.read.foreign.payload_text import as_yaml
from bridge.read.foreign.reports import ExportReport
from bridge.read.megatron_lm.flags import FLAGS
from bridge.read.megatron_lm.stage_files import SHARED_FILE_NAME, build_shared_file
from bridge.registry.config import MixedPrecisionConfig
from bridge.rules.inert import LOSS_SCALER_FIELDS
from bridge.target.fields import FUSED_ADAM_RECIPES

TITLE = "Megatron-LM 0.20"
VALUE_OF_KIND = {"on": True, "off": False, "value": None}
"""Kind of a flag -> the value that it sets by itself; None: the flag takes a value."""


def _index_options() -> dict[tuple[str, bool | None], str]:
    options: dict[tuple[str, bool | None], str] = {}
    for flag in FLAGS:
        key = (flag.field, VALUE_OF_KIND[flag.kind])
        if flag.option.startswith("--") and flag.sets is None:
            options.setdefault(key, flag.option)
    return options


OPTION_OF_FIELD = _index_options()
"""Field, and the value that the option sets by itself, None where it takes a value -> the option."""
SCHEME_FIELDS = ("fp8_recipe", "fp4_recipe", *DELAYED_SCALING_DEFAULTS)
"""Fields that are written whenever they act: Megatron-LM's defaults (delayed, 1, most_recent) are
not a recipe's."""
SWITCH_FIELDS = (
    "fp8_param_gather",
    "fp4_param_gather",
    "first_last_layers_bf16",
    "reuse_grad_buf_for_mxfp8_param_ag",
)
MODULES_OPTION = "--te-precision-config-file"
OPTION_SPELLINGS = {"uint8": "fp8", None: "auto"}
"""Value of a field -> the word that its option takes for it."""


def export(config: MixedPrecisionConfig, **layout: int) -> ExportReport:
    """Return the recipe as a list of arguments.

    Args:
        config: The recipe.
        layout: Keys of `stage_files.LAYOUT`, for rows of `modules` that name layers.
    """
    builder = ExportBuilder(config, TITLE)
    acting = compute_effective_fields(config)
    _map_dtypes(builder, get_mode(config))
    arguments: list[str] = []
    for field, value in _iterate_written_fields(builder, acting):
        if isinstance(value, bool):
            option = OPTION_OF_FIELD[field, value]
            arguments.append(option)
        else:
            option = OPTION_OF_FIELD[field, None]
            arguments.extend([option, _format_value(value)])
        builder.map(field, option)
    content = build_shared_file(builder, layout)
    if content is not None:
        builder.files[SHARED_FILE_NAME] = as_yaml(content)
        arguments.extend([MODULES_OPTION, SHARED_FILE_NAME])
        builder.map("modules", MODULES_OPTION)
    if acting.get("fp8_wgrad") is False:
        arguments.append(OPTION_OF_FIELD["fp8_wgrad", False])
        builder.record("megatron_lm.te2-ignores-fp8-wgrad", "fp8_wgrad")
    return builder.finish(arguments)


def _iterate_written_fields(
    builder: ExportBuilder, acting: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the fields that are written out, with their values; map fields that need no option."""
    yield from _iterate_mode_fields(builder)
    yield from _iterate_scheme_fields(builder, acting)
    yield from _iterate_megatron_fields(builder, acting)


def _iterate_mode_fields(builder: ExportBuilder) -> Iterator[tuple[str, Any]]:
    """Yield the mode, and the dtype in which gradients are reduced; `--fp16` does not reduce in FP32."""
    mode = get_mode(builder.config)
    in_fp32 = builder.config.grad_reduce_in_fp32
    if mode == "fp32":
        builder.map("fp32")
        return
    yield mode, True
    if mode == "bf16" or in_fp32:
        yield "grad_reduce_in_fp32", in_fp32
    else:
        builder.map("grad_reduce_in_fp32")


def _iterate_scheme_fields(
    builder: ExportBuilder, acting: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the formats, their scaling scheme, the loss scale, and switches that are on."""
    config, values = builder.config, builder.values
    for field in ("fp8", "fp4"):
        if values[field]:
            yield field, values[field]
    for field in (*SCHEME_FIELDS, *LAYER_COUNTS, "loss_scale", *LOSS_SCALER_FIELDS):
        is_asked = field in SCHEME_FIELDS or is_stated(config, field)
        if acting.get(field) is not None and is_asked:
            yield field, values[field]
    if not config.fp8 and _needs_megatron_masters(builder, acting):
        yield "fp8_recipe", values["fp8_recipe"]
    for field in SWITCH_FIELDS:
        if acting.get(field):
            yield field, True


def _needs_megatron_masters(builder: ExportBuilder, acting: Mapping[str, Any]) -> bool:
    """Return whether FP4 weights need an FP8 recipe other than Megatron-LM's default, delayed (PB356).

    Its precision-aware optimizer reads the recipe without FP8 too, and cannot update FP4 weights
    under delayed.
    """
    is_aware = bool(acting.get("use_precision_aware_optimizer") and acting.get("fp4_param_gather"))
    return is_aware and builder.values["fp8_recipe"] not in FUSED_ADAM_RECIPES


def _iterate_megatron_fields(
    builder: ExportBuilder, acting: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the stated fields of Megatron's configs that Megatron Bridge's class lacks.

    The second names of a gather are mapped to its option.
    """
    for twin in ("fp8_param", "fp4_param"):
        if acting.get(f"{twin}_gather"):
            builder.map(twin, OPTION_OF_FIELD[f"{twin}_gather", True])
    for field in MEGATRON_FIELDS:
        value = builder.values[field]
        has_option = (field, True) in OPTION_OF_FIELD or (field, None) in OPTION_OF_FIELD
        is_inert = field not in acting and bool(value)
        if field not in builder.config.stated or not has_option or is_inert:
            continue
        if value == FIELD_DEFAULTS[field] and value is not True:
            builder.map(field)
        elif value is False:
            builder.record("megatron_lm.off-by-itself", field, option=OPTION_OF_FIELD[field, True])
        else:
            yield field, OPTION_SPELLINGS.get(value, value)


def _map_dtypes(builder: ExportBuilder, mode: str) -> None:
    """Map the dtypes that the mode's option sets, and report others: dtypes have no options."""
    options: tuple[str, ...] = ()
    if mode != "fp32":
        options = (f"--{mode}",)
    for field in ("params_dtype", "pipeline_dtype"):
        follows = builder.map_dtype(field, *options)
        is_of_autocast = field == "params_dtype" and builder.config.autocast_enabled
        if not follows and not is_of_autocast:
            builder.record("megatron_lm.no-flag-and-it-follows-the-mode", field, mode=mode)
    report_dropped_autocast(builder, "no flag turns autocast on")
    if builder.config.autocast_enabled:
        builder.record_if_stated("megatron_lm.no-flag-reaches-it", "autocast_dtype")


def _format_value(value: object) -> str:
    """Return a value as a word of the command line; a float without a fraction as a whole number."""
    if isinstance(value, float) and value.is_integer() and 1 < value < 1e15:
        return str(int(value))
    return str(value)
