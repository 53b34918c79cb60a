"""`export`: a recipe as Megatron-LM's list of arguments.

    export(config).payload     # ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise", ...]

A setting that acts is written out, even where Megatron-LM's default is the same.
"""

from collections.abc import Iterator, Mapping

from bridge.precision.mode import get_mode
from bridge.precision.precision_config import FIELD_DEFAULTS, MEGATRON_FIELDS
from bridge.precision.stated_field import LAYER_COUNTS
from bridge.precision.statements import is_stated
from bridge.read.foreign.amp import report_dropped_autocast
from bridge.read.foreign.effective_fields import compute_effective_fields
from bridge.read.foreign.export_builder import ExportBuilder
from bridge.read.foreign.import_builder import DELAYED_SCALING_DEFAULTS
from bridge.read.foreign.payload_text import as_yaml
from bridge.read.foreign.reports import ExportReport
from bridge.read.megatron_lm.flags import FLAGS
from bridge.read.megatron_lm.module_recipe.stage_files import SHARED_FILE_NAME, build_shared_file
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.rules.inert_fields import LOSS_SCALER_FIELDS
from bridge.target.fields import FUSED_ADAM_RECIPES

TITLE = "Megatron-LM 0.20"
VALUE_OF_KIND = {"on": True, "off": False, "value": None}
"""Kind of a flag -> the value that the flag sets by itself; None for a flag that takes a value."""
SCHEME_FIELDS = ("fp8_recipe", "fp4_recipe", *DELAYED_SCALING_DEFAULTS)
"""Fields that are written whenever they act. Megatron-LM's defaults (delayed, 1, most_recent) are
not those of a recipe."""
SWITCH_FIELDS = (
    "fp8_param_gather",
    "fp4_param_gather",
    "first_last_layers_bf16",
    "reuse_grad_buf_for_mxfp8_param_ag",
)
MODULES_OPTION = "--te-precision-config-file"
OPTION_SPELLINGS = {"uint8": "fp8", None: "auto"}
"""Value of a field -> the word that its option takes for it."""
MAX_WHOLE_FLOAT = 1e15
"""Floats without a fraction below it are written as whole numbers, larger ones as Python writes them."""


def _index_options() -> dict[tuple[str, bool | None], str]:
    """Return `OPTION_OF_FIELD`. Of several options with the same effect, the first one counts."""
    options: dict[tuple[str, bool | None], str] = {}
    for flag in FLAGS:
        key = (flag.field, VALUE_OF_KIND[flag.kind])
        if flag.option.startswith("--") and flag.sets is None:
            options.setdefault(key, flag.option)
    return options


OPTION_OF_FIELD = _index_options()
"""Field, and the value that an option sets by itself -> the option. The value is None for an option
that takes a value."""


def export(config: MixedPrecisionConfig, **layout: int) -> ExportReport:
    """Return the recipe as a list of arguments.

    Args:
        config: The recipe.
        layout: Keys of `stage_files.LAYOUT_KEYS`, for rows of `modules` that name layers.
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
    arguments.extend(_export_modules(builder, layout))
    if acting.get("fp8_wgrad") is False:
        arguments.append(OPTION_OF_FIELD["fp8_wgrad", False])
        builder.record("megatron_lm.te2-ignores-fp8-wgrad", "fp8_wgrad")
    return builder.finish(arguments)


def _export_modules(builder: ExportBuilder, layout: Mapping[str, int]) -> list[str]:
    """Return the arguments that name the file for rows of `modules`, and add the file to the report."""
    content = build_shared_file(builder, layout)
    if content is None:
        return []
    builder.files[SHARED_FILE_NAME] = as_yaml(content)
    builder.map("modules", MODULES_OPTION)
    return [MODULES_OPTION, SHARED_FILE_NAME]


def _iterate_written_fields(
    builder: ExportBuilder, acting: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    """Yield the fields that are written as arguments, with their values.

    Fields that need no option are mapped in the report.
    """
    yield from _iterate_mode_fields(builder)
    yield from _iterate_scheme_fields(builder, acting)
    yield from _iterate_megatron_fields(builder, acting)


def _iterate_mode_fields(builder: ExportBuilder) -> Iterator[tuple[str, object]]:
    """Yield the mode, and whether gradients are reduced in FP32.

    Under `--fp16` the parser does not reduce in FP32, so that False needs no option.
    """
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
    builder: ExportBuilder, acting: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    """Yield the formats, their scaling scheme, the loss scale, and switches that are on."""
    config, values = builder.config, builder.values
    for field in ("fp8", "fp4"):
        if values[field]:
            yield field, values[field]
    for field in (*SCHEME_FIELDS, *LAYER_COUNTS, "loss_scale", *LOSS_SCALER_FIELDS):
        is_written = field in SCHEME_FIELDS or is_stated(config, field)
        if acting.get(field) is not None and is_written:
            yield field, values[field]
    if not config.fp8 and _needs_fp8_recipe_for_fp4(builder, acting):
        yield "fp8_recipe", values["fp8_recipe"]
    for field in SWITCH_FIELDS:
        if acting.get(field):
            yield field, True


def _needs_fp8_recipe_for_fp4(builder: ExportBuilder, acting: Mapping[str, object]) -> bool:
    """Return whether FP4 weights need an FP8 recipe other than Megatron-LM's default, delayed (PB356).

    The precision-aware optimizer reads the FP8 recipe even if no GEMM runs in FP8. It cannot update
    FP4 weights under delayed.
    """
    gathers_fp4 = bool(
        acting.get("use_precision_aware_optimizer") and acting.get("fp4_param_gather")
    )
    return gathers_fp4 and builder.values["fp8_recipe"] not in FUSED_ADAM_RECIPES


def _iterate_megatron_fields(
    builder: ExportBuilder, acting: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    """Yield the stated fields of Megatron's configs that Megatron Bridge's class lacks.

    `fp8_param` and `fp4_param`, the model's names of a gather, are mapped to the gather's option.
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
    """Map the dtypes that the mode's option sets, and report other dtypes, which no option sets."""
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
    """Return a value as a word of the command line. A float without a fraction becomes a whole number."""
    if isinstance(value, float) and value.is_integer() and 1 < value < MAX_WHOLE_FLOAT:
        return str(int(value))
    return str(value)
