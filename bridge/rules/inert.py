"""Fields without effect: which fields of a precision change nothing in a run, and why."""

from bridge.precision.config import PrecisionConfig
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES

BUFFER = "reuse_grad_buf_for_mxfp8_param_ag"
PADDING = "moe_router_padding_for_quantization"
SCALER_SCHEDULE = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""Read by the dynamic loss scale of an FP16 run alone."""
_ALL = (*FP8_SCHEMES.values(), *FP4_SCHEMES.values())
SCHEME_SETTINGS = tuple(sorted({name for row in _ALL for name in row.settings}))
"""Fields that some scaling schemes read and others do not."""
_READERS = {name: ", ".join(sorted({row.name for row in _ALL if name in row.settings})) for name in SCHEME_SETTINGS}
_FAMILY = {
    "fp8": ("fp8_recipe", "fp8_wgrad", "fp8_param", "fp8_param_gather", "fp8_quantizer_factory", BUFFER),
    "fp4": ("fp4_recipe", "fp4_param", "fp4_param_gather", "fp4_quantizer_factory"),
}
"""Format -> fields that act under it alone, whatever the scheme."""


def inert_fields(
    config: PrecisionConfig,
    *,
    scheme: str | None = None,
    is_autocast: bool | None = None,
    keeps_layers: bool | None = None,
) -> dict[str, str]:
    """Return each field that changes nothing in a run of `config`, stated or not, with the reason as a clause.

    None for `scheme`, `is_autocast` (the run is under autocast) or `keeps_layers` (in BF16) stands for what the
    config says.
    """
    scheme = (scheme or config.scheme) if config.scheme else None
    run = (scheme or config.mode).upper()
    found: dict[str, str] = {}
    for family, names in _FAMILY.items():
        if getattr(config, family) is None:
            found.update(dict.fromkeys(names, f"no {family.upper()} in this {run} run"))
    row = (FP8_SCHEMES if config.fp8 else FP4_SCHEMES).get(scheme or "")
    if scheme is None:
        found = dict.fromkeys((*SCHEME_SETTINGS, PADDING), f"no FP8 or FP4 in this {run} run") | found
        found.update(dict.fromkeys((*LAYER_COUNTS, "first_last_layers_bf16"), f"every layer of this run is in {run}"))
    elif row is not None:
        for name in SCHEME_SETTINGS:
            if name not in row.settings and name not in found:
                found[name] = f"{scheme} scaling does not read it (only {_READERS[name]})"
    if scheme is not None and not (config.first_last_layers_bf16 if keeps_layers is None else keeps_layers):
        found.update(dict.fromkeys((*LAYER_COUNTS, "first_last_layers_bf16"), "first_last_layers_bf16 is off"))
    if not (config.autocast_enabled if is_autocast is None else is_autocast):
        found["autocast_dtype"] = "autocast is off"
    if not config.fp16:
        found.update(dict.fromkeys(SCALER_SCHEDULE, f"a {config.mode.upper()} run has no dynamic loss scale"))
    elif config.loss_scale:
        found.update(dict.fromkeys(SCALER_SCHEDULE, "the loss scale is constant"))
    if config.mode == "fp32":
        found["grad_reduce_in_fp32"] = "gradients are FP32 in an FP32 run"
    return found
