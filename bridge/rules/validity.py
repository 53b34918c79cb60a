"""What can never be right about a precision config, whatever the model, machine or version.

Each rule is a function of the config that yields findings; `faults` runs them all. What depends on an owner, a
version or a machine is judged where those are known (`bridge.sync`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bridge.errors import Finding, close_matches, did_you_mean, listed
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bridge.precision.config import PrecisionConfig

__all__ = ["RULES", "faults"]

FP8_FORMATS = ("e4m3", "hybrid")
FP4_FORMATS = ("e2m1",)
AMAX_ALGORITHMS = ("most_recent", "max")


def faults(config: PrecisionConfig) -> list[Finding]:
    """Return every fault of `config`, in the order of the rules."""
    return [finding for rule in RULES for finding in rule(config)]


def _finding(config: PrecisionConfig, field: str, rule: str, remedy: str) -> Finding:
    return Finding(
        path=f"mixed_precision.{field}",
        rule=rule,
        value=config.to_dict(full=True)[field],
        where=config.source_of(field),
        remedy=remedy,
    )


def one_mode(config: PrecisionConfig) -> Iterator[Finding]:
    """At most one of fp32, fp16 and bf16."""
    on = [name for name in ("fp32", "fp16", "bf16") if getattr(config, name)]
    if len(on) > 1:
        others = " and ".join(f"{name}=False" for name in on[:-1])
        yield _finding(
            config,
            on[-1],
            f"only one mode can be on, and {' and '.join(on[:-1])} is on too",
            f"Set {others}, or keep one.",
        )


def one_low_precision_format(config: PrecisionConfig) -> Iterator[Finding]:
    """Never FP8 and FP4 at once."""
    if config.fp8 is not None and config.fp4 is not None:
        remedy = "Set fp8=None for an FP4 run, or fp4=None for an FP8 run."
        yield _finding(config, "fp4", f"FP4 cannot be combined with FP8 (fp8={config.fp8!r})", remedy)


def known_names(config: PrecisionConfig) -> Iterator[Finding]:
    """Formats, schemes and algorithms have one of the known names."""
    rows: tuple[tuple[str, tuple[str, ...], bool], ...] = (
        ("fp8", FP8_FORMATS, config.fp8 is not None),
        ("fp8_recipe", tuple(FP8_SCHEMES), config.fp8 is not None or config.is_stated("fp8_recipe")),
        ("fp8_amax_compute_algo", AMAX_ALGORITHMS, True),
        ("fp4", FP4_FORMATS, config.fp4 is not None),
        ("fp4_recipe", tuple(FP4_SCHEMES), config.fp4 is not None or config.is_stated("fp4_recipe")),
    )
    for field, known, applies in rows:
        value = getattr(config, field)
        if not applies or value in known or (value is None and not getattr(config, field[:3])):
            continue
        remedy = did_you_mean(close_matches(str(value), known)) or f"Use {listed(known)}."
        if field in ("fp8", "fp4") and value in (*FP8_SCHEMES, *FP4_SCHEMES):
            family = "fp8" if value in FP8_SCHEMES else "fp4"
            remedy = f"{value!r} is a scaling scheme: say {family}_recipe={value!r} and {listed(known)} here."
        elif field == "fp8" and value == "e5m2":
            remedy = "Use 'hybrid' for E5M2 gradients; nothing trains with E5M2 in the forward pass."
        yield _finding(config, field, f"must be one of {', '.join(known)}", remedy)


def scheme_has_format(config: PrecisionConfig) -> Iterator[Finding]:
    """A scheme that was stated has a format, or the run is not the low-precision run it looks like.

    Who says that the family is off, or runs in the other one, has said what the run is: the scheme is without effect
    then, and a sync reports it.
    """
    for family, other in (("fp8", "fp4"), ("fp4", "fp8")):
        field = f"{family}_recipe"
        scheme = getattr(config, field)
        if not config.is_stated(field) or getattr(config, family) is not None or scheme is None:
            continue
        if config.is_stated(family) or getattr(config, other) is not None:
            continue
        formats = FP8_SCHEMES[scheme].formats if family == "fp8" and scheme in FP8_SCHEMES else FP4_FORMATS
        mode = config.mode.upper()
        remedy = f"Say {family}={formats[-1]!r} as well, or drop {field}."
        yield _finding(config, field, f"a scheme needs a format: without {family} this is a plain {mode} run", remedy)


def legal_format_for_scheme(config: PrecisionConfig) -> Iterator[Finding]:
    """The format is one the scheme can train with."""
    row = FP8_SCHEMES.get(config.fp8_recipe) if config.fp8 in FP8_FORMATS else None
    if row is not None and config.fp8 not in row.formats:
        remedy = f"Use fp8={row.formats[0]!r}, or fp8_recipe='tensorwise' for E5M2 gradients."
        rule = f"{row.name} trains with {listed(row.formats)} in every operand (E5M2 gradients were found to diverge)"
        yield _finding(config, "fp8", rule, remedy)


def first_last_layers(config: PrecisionConfig) -> Iterator[Finding]:
    """Layers kept in BF16 need a scheme that allows it, and a count that is not zero twice."""
    if not config.first_last_layers_bf16:
        return
    row = FP8_SCHEMES.get(config.fp8_recipe) if config.fp8 else None
    if row is not None and not row.first_last_layers_bf16:
        remedy = "Use fp8_recipe='tensorwise', or set first_last_layers_bf16=False."
        yield _finding(config, "first_last_layers_bf16", f"{row.name} scaling cannot keep layers in BF16", remedy)
    counts = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    if all(config.is_stated(name) and getattr(config, name) == 0 for name in counts):
        remedy = "State at least one count above 0, leave both unstated (Megatron keeps 1 and 1), or set it to False."
        yield _finding(config, "first_last_layers_bf16", "both layer counts are 0, so no layer would be kept", remedy)


def counts(config: PrecisionConfig) -> Iterator[Finding]:
    """Counts are not negative, and those that count from one are at least one."""
    for field, least in (
        ("fp8_margin", 0),
        ("fp8_amax_history_len", 1),
        ("num_layers_at_start_in_bf16", 0),
        ("num_layers_at_end_in_bf16", 0),
        ("hysteresis", 1),
    ):
        if getattr(config, field) < least:
            yield _finding(config, field, f"must be at least {least}", f"Use {least} or more.")


def stored_weights(config: PrecisionConfig) -> Iterator[Finding]:
    """Weights are stored in a format only where that format is not left open, under one answer to the one question."""
    for family in ("fp8", "fp4"):
        model_name, ddp_name = f"{family}_param", f"{family}_param_gather"
        own = {name: config.to_dict().get(name) for name in (model_name, ddp_name)}
        if None not in own.values() and own[model_name] != own[ddp_name]:
            remedy = f"Give one of the two names, or the same value to both; {ddp_name} is what is read."
            rule = f"is another name of {ddp_name}, which says {own[ddp_name]!r}"
            yield Finding(
                path=f"mixed_precision.{model_name}",
                rule=rule,
                value=own[model_name],
                where=config.source_of(model_name),
                remedy=remedy,
            )
        if getattr(config, ddp_name) and getattr(config, family) is None and not config.is_stated(family):
            field = ddp_name if ddp_name in config.stated else model_name
            chosen = FP8_FORMATS[0] if family == "fp8" else FP4_FORMATS[0]
            remedy = f"Set {field}=False, or say {family}={chosen!r}."
            yield _finding(config, field, f"weights can be stored in {family.upper()} only in an {family} run", remedy)


def reused_grad_buffer(config: PrecisionConfig) -> Iterator[Finding]:
    """The gradient buffer is reused only to gather MXFP8 weights."""
    field = "reuse_grad_buf_for_mxfp8_param_ag"
    if not getattr(config, field) or (config.fp8 is None and config.is_stated("fp8")):
        return
    if config.fp8 is None or config.fp8_recipe != "mxfp8":
        rule = "the gradient buffer can be reused under MXFP8 only"
        yield _finding(config, field, rule, f"Set {field}=False, or use fp8='e4m3' with fp8_recipe='mxfp8'.")
    elif not config.fp8_param_gather:
        rule = "the gradient buffer can be reused only where weights are gathered as MXFP8 (fp8_param_gather)"
        yield _finding(config, field, rule, f"Set {field}=False, or fp8_param_gather=True.")


def dtypes(config: PrecisionConfig) -> Iterator[Finding]:
    """Stated dtypes belong to the mode."""
    tokens = config.to_dict(full=True)
    for field in ("params_dtype", "pipeline_dtype"):
        # FP32 beside a half-precision mode is Megatron's own: weights created in FP32 and cast, an FP32 residual.
        legal = (config.mode,) if config.mode == "fp32" else (config.mode, "fp32")
        if tokens[field] is not None and tokens[field] not in legal:
            remedy = f"Drop {field} (it follows the mode), or set {tokens[field]}=True instead of {config.mode}."
            if tokens[field] not in ("fp16", "bf16", "fp32"):
                remedy = f"Drop {field}: it follows the mode."
            yield _finding(config, field, f"must be {' or '.join(legal)} in {config.mode} mode", remedy)
    if tokens["autocast_dtype"] not in (None, "fp16", "bf16", "fp32"):
        yield _finding(config, "autocast_dtype", "must be bf16, fp16 or fp32", "Use one of these, or drop it.")
    elif config.autocast_enabled and (tokens["autocast_dtype"] or tokens["params_dtype"] or config.mode) == "fp32":
        rule = "autocast needs a half-precision dtype to cast to, and would cast to fp32"
        yield _finding(config, "autocast_enabled", rule, "State autocast_dtype='bf16', or set autocast_enabled=False.")


def _finite(value: float) -> bool:
    """Return whether a float can hold it; `math.isfinite` raises on an integer of hundreds of digits."""
    return abs(value) <= sys.float_info.max


def loss_scaling(config: PrecisionConfig) -> Iterator[Finding]:
    """The loss scale and its schedule are numbers the grad scaler can work with."""
    scale, initial, least = config.loss_scale, config.initial_loss_scale, config.min_loss_scale
    if scale is not None and not (_finite(scale) and scale > 0):
        remedy = "Use a scale above 0, or None for a dynamic one (FP16) or none at all."
        yield _finding(config, "loss_scale", "must be above 0 and finite; Megatron takes 0 for unset", remedy)
    if not (_finite(least) and least > 0):
        yield _finding(config, "min_loss_scale", "must be above 0 and finite", "Use 1.0, Megatron's default.")
    window = config.loss_scale_window
    if not (_finite(window) and window >= 1 and float(window).is_integer()):
        rule = "must be a whole number of steps, at least 1: the scaler compares it with a step count by =="
        yield _finding(config, "loss_scale_window", rule, "Use 1000, Megatron's default, or another whole number.")
    if initial is None:
        if config.fp16 and scale is None:
            remedy = "Give a number; Megatron's default is 4294967296."
            yield _finding(config, "initial_loss_scale", "a dynamic loss scale needs a value to begin with", remedy)
    elif not (_finite(initial) and initial > 0):
        yield _finding(
            config, "initial_loss_scale", "must be above 0 and finite", "Use 4294967296, Megatron's default."
        )
    elif initial < least:
        rule = f"must not be below min_loss_scale ({least!r})"
        yield _finding(config, "initial_loss_scale", rule, "Raise it, or lower min_loss_scale.")


RULES: tuple[Callable[[PrecisionConfig], Iterator[Finding]], ...] = (
    one_mode,
    one_low_precision_format,
    known_names,
    scheme_has_format,
    legal_format_for_scheme,
    first_last_layers,
    counts,
    stored_weights,
    reused_grad_buffer,
    dtypes,
    loss_scaling,
)
