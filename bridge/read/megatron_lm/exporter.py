"""A recipe as Megatron-LM's argument list: what acts is written out, even where Megatron-LM's default says the same."""

from collections.abc import Iterator, Mapping
from typing import Any

from bridge.precision.config import FIELD_DEFAULTS, MEGATRON_FIELDS
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.mode import mode_of
from bridge.precision.statements import is_stated
from bridge.read.foreign.amp import report_dropped_autocast
from bridge.read.foreign.export_builder import ExportBuilder
from bridge.read.foreign.import_builder import DELAYED
from bridge.read.foreign.meaning import meaning
from bridge.read.foreign.reports import ExportReport
from bridge.read.foreign.system import as_yaml
from bridge.read.megatron_lm.flags import FLAGS
from bridge.read.megatron_lm.stage_files import FILE, shared_file
from bridge.registry.config import MixedPrecisionConfig
from bridge.rules.inert import SCALER_SCHEDULE
from bridge.target.fields import FUSED_RECIPES

TITLE = "Megatron-LM 0.20"

TAKES = {"on": True, "off": False, "value": None}
OPTIONS = {
    (flag.field, TAKES[flag.kind]): flag.option
    for flag in reversed(FLAGS)
    if flag.option.startswith("--") and flag.sets is None
}
"""Field, and the value that the option sets by itself, None where it takes one -> the option."""
SCHEME = ("fp8_recipe", "fp4_recipe", *DELAYED)
"""Written whenever they act: Megatron-LM's defaults (delayed, 1, most_recent) are not a
recipe's."""
SWITCHES = (
    "fp8_param_gather",
    "fp4_param_gather",
    "first_last_layers_bf16",
    "reuse_grad_buf_for_mxfp8_param_ag",
)
MODULES_OPTION = "--te-precision-config-file"


def export(config: MixedPrecisionConfig, **layout: int) -> ExportReport:
    """Return the recipe as a list of arguments.

    Every default that differs is written out. `layout`: see `LAYOUT`.
    """
    builder = ExportBuilder(config, TITLE)
    acting = meaning(config)
    _dtypes(builder, mode_of(config))
    words: list[str] = []
    for field, value in (*_mode_and_scheme(builder, acting), *_own_fields(builder, acting)):
        option = OPTIONS[field, value if isinstance(value, bool) else None]
        words.extend([option] if isinstance(value, bool) else [option, _text(value)])
        builder.map(field, option)
    content = shared_file(builder, layout)
    if content is not None:
        builder.files[FILE] = as_yaml(content)
        words.extend([MODULES_OPTION, FILE])
        builder.map("modules", MODULES_OPTION)
    if acting.get("fp8_wgrad") is False:
        words.append(OPTIONS["fp8_wgrad", False])
        builder.record("megatron_lm.transformer-engine-and-later", "fp8_wgrad")
    return builder.finish(words)


def _mode_and_scheme(
    builder: ExportBuilder, acting: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield the fields of Megatron Bridge's class that are written out, with their values."""
    config, mode = builder.config, mode_of(builder.config)
    if mode == "fp32":
        builder.map("fp32")
    else:
        yield mode, True
    if mode == "bf16" or (
        mode == "fp16" and config.grad_reduce_in_fp32
    ):  # --fp16 alone does not reduce in FP32
        yield "grad_reduce_in_fp32", config.grad_reduce_in_fp32
    elif mode == "fp16":
        builder.map("grad_reduce_in_fp32")
    yield from ((field, builder.values[field]) for field in ("fp8", "fp4") if builder.values[field])
    for field in (*SCHEME, *LAYER_COUNTS, "loss_scale", *SCALER_SCHEDULE):
        if acting.get(field) is not None and (field in SCHEME or is_stated(config, field)):
            yield field, builder.values[field]
    if not config.fp8 and _needs_masters_of_megatron(builder, acting):
        yield "fp8_recipe", builder.values["fp8_recipe"]
    yield from ((field, True) for field in SWITCHES if acting.get(field))


def _needs_masters_of_megatron(builder: ExportBuilder, acting: Mapping[str, Any]) -> bool:
    """Return whether FP4 weights need an FP8 recipe that Megatron-LM's default, delayed, is not (PB356).

    Its precision-aware optimizer reads the recipe without FP8 too, and cannot update FP4 weights
    under delayed.
    """
    is_aware = bool(acting.get("use_precision_aware_optimizer") and acting.get("fp4_param_gather"))
    return is_aware and builder.values["fp8_recipe"] not in FUSED_RECIPES


def _own_fields(builder: ExportBuilder, acting: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the stated fields of Megatron's own configs that Megatron Bridge's class lacks.

    Map second names.
    """
    for twin in ("fp8_param", "fp4_param"):
        if acting.get(f"{twin}_gather"):
            builder.map(twin, OPTIONS[f"{twin}_gather", True])
    for field in MEGATRON_FIELDS:
        value = builder.values[field]
        has_option = (field, True) in OPTIONS or (field, None) in OPTIONS
        if field not in builder.config.stated or not has_option or (field not in acting and value):
            continue
        if value == FIELD_DEFAULTS[field] and value is not True:
            builder.map(field)
        elif value is False:
            builder.record("megatron_lm.off-by-itself", field, option=OPTIONS[field, True])
        else:
            yield field, {"uint8": "fp8", None: "auto"}.get(value, value)


def _dtypes(builder: ExportBuilder, mode: str) -> None:
    """Dtypes have no flags: those of the mode come by themselves."""
    for field in ("params_dtype", "pipeline_dtype"):
        follows = builder.map_dtype(field, *((f"--{mode}",) if mode != "fp32" else ()))
        if not follows and (field != "params_dtype" or not builder.config.autocast_enabled):
            builder.record("megatron_lm.no-flag-sets-it-it-follows", field, mode=mode)
    report_dropped_autocast(builder, "no flag turns autocast on")
    if builder.config.autocast_enabled:
        builder.record_if_stated("megatron_lm.no-flag-reaches-it", "autocast_dtype")


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer() and 1 < value < 1e15:
        return str(int(value))
    return str(value)
