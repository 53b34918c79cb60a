"""`find_inert_fields`: the fields of a precision that have no effect in a run, with the reasons."""

from bridge.precision.mode import get_mode, get_scheme
from bridge.precision.precision_config import FIELDS, PrecisionConfig
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES
from bridge.precision.stated_field import LAYER_COUNTS
from bridge.precision.subjects import SCALER

GRAD_BUFFER_REUSE = "reuse_grad_buf_for_mxfp8_param_ag"
ROUTER_PADDING = "moe_router_padding_for_quantization"
LOSS_SCALER_FIELDS = tuple(
    name for name, field in FIELDS.items() if field.subject is SCALER and name != "loss_scale"
)
"""Fields that only an FP16 run with a dynamic loss scale reads."""
SCHEME_SPECIFIC_FIELDS = tuple(sorted(name for name, field in FIELDS.items() if field.schemes))
"""Fields that only some scaling schemes read."""
KEPT_LAYER_FIELDS = (*LAYER_COUNTS, "first_last_layers_bf16")
"""Fields about layers that stay in BF16."""


def find_inert_fields(
    config: PrecisionConfig,
    *,
    scheme: str | None = None,
    is_autocast: bool | None = None,
    keeps_layers: bool | None = None,
) -> dict[str, str]:
    """Return each field, stated or not, that has no effect in a run of `config` -> the reason.

    Args:
        scheme: The scaling scheme of the run. None: the scheme of the config.
        is_autocast: Whether the run is under autocast. None: as the config states it.
        keeps_layers: Whether first and last layers stay in BF16. None: as the config states it.

    Returns:
        Field -> a clause with the reason.
    """
    if get_scheme(config) is None:
        scheme = None
    elif not scheme:
        scheme = get_scheme(config)
    if is_autocast is None:
        is_autocast = config.autocast_enabled
    if keeps_layers is None:
        keeps_layers = config.first_last_layers_bf16
    mode = get_mode(config)
    run_name = (scheme or mode).upper()
    reasons = _find_fields_out_of_family(config, scheme, run_name)
    if scheme is None:
        reasons.update(
            dict.fromkeys(KEPT_LAYER_FIELDS, f"every layer of this run is in {run_name}")
        )
    elif not keeps_layers:
        reasons.update(dict.fromkeys(KEPT_LAYER_FIELDS, "first_last_layers_bf16 is off"))
    if not is_autocast:
        reasons["autocast_dtype"] = "autocast is off"
    if not config.fp16:
        why = f"a {mode.upper()} run has no dynamic loss scale"
        reasons.update(dict.fromkeys(LOSS_SCALER_FIELDS, why))
    elif config.loss_scale:
        reasons.update(dict.fromkeys(LOSS_SCALER_FIELDS, "the loss scale is constant"))
    if mode == "fp32":
        reasons["grad_reduce_in_fp32"] = "gradients are FP32 in an FP32 run"
    return reasons


def _find_fields_out_of_family(
    config: PrecisionConfig, scheme: str | None, run_name: str
) -> dict[str, str]:
    """Return the fields of families and of scaling schemes that the run does not use."""
    is_known = scheme in FP8_SCHEMES or scheme in FP4_SCHEMES
    reasons = {}
    for name, field in FIELDS.items():
        if field.family in ("fp8", "fp4") and getattr(config, field.family) is None:
            reasons[name] = f"no {field.family.upper()} in this {run_name} run"
        elif field.family == "low" and scheme is None:
            reasons[name] = f"no FP8 or FP4 in this {run_name} run"
        elif field.schemes and is_known and scheme not in field.schemes:
            readers = ", ".join(sorted(field.schemes))
            reasons[name] = f"{scheme} scaling does not read it (only {readers})"
    return reasons
