"""Rules about formats and scaling schemes, and about settings that a scheme does not read."""

from collections.abc import Iterator

from bridge.errors import close_matches, did_you_mean, listed
from bridge.precision.precision_config import FIELD_CHOICES
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES
from bridge.rules.context import FAMILIES, RuleContext
from bridge.rules.facts.payloads import find_recipes_with_stored_weights, find_refused_payloads
from bridge.rules.inert_field_violation import find_fields_without_effect
from bridge.rules.inert_fields import GRAD_BUFFER_REUSE, ROUTER_PADDING, SCHEME_SPECIFIC_FIELDS
from bridge.rules.rule import (
    MODEL_CHECK_SOURCE,
    contradiction,
    error,
    info,
    mcore,
    no_effect,
    sync_warning,
    warning,
)
from bridge.rules.violation import Violation

_FORMATS_BY_FAMILY = {"fp8": ("e4m3", "hybrid"), "fp4": ("e2m1",)}
_SCHEMES_BY_FAMILY = {"fp8": tuple(FP8_SCHEMES), "fp4": tuple(FP4_SCHEMES)}
_OTHER_FAMILY = {"fp8": "fp4", "fp4": "fp8"}
"""Family -> the other family."""
_AMAX_ALGORITHMS = ("most_recent", "max")
HARMLESS_FIELDS = ("tp_only_amax_red", "fp8_wgrad")
"""Fields that turn something off. If such a field has no effect, this is harmless."""


def _format_hint(value: object, known: tuple[str, ...]) -> str:
    return did_you_mean(close_matches(str(value), known)) or f"use {listed(known)}"


def find_unknown_formats(context: RuleContext) -> Iterator[Violation]:
    """Yield the formats that their family does not have, with the nearest format."""
    for family, known in _FORMATS_BY_FAMILY.items():
        value = context.get_format(family)
        if not value or value in known:
            continue
        hint = _format_hint(value, known)
        if value in _SCHEMES_BY_FAMILY["fp8"] or value in _SCHEMES_BY_FAMILY["fp4"]:
            hint = f"state {family}_recipe={value!r}, which is a scheme, and {listed(known)} here"
        elif value == "e5m2":
            hint = "use 'hybrid' for E5M2 gradients; nothing trains with E5M2 in the forward pass"
        yield Violation(family, known=listed(known), hint=hint)


def find_unknown_schemes(context: RuleContext) -> Iterator[Violation]:
    """Yield the used or stated schemes that their family does not have."""
    for family, known in _SCHEMES_BY_FAMILY.items():
        name = f"{family}_recipe"
        scheme = context.get_setting_value(name)
        is_read = context.get_format(family) or (name in context.stated and scheme is not None)
        if is_read and scheme not in (*known, *context.added_schemes):
            yield Violation(name, known=listed(known), hint=_format_hint(scheme, known))


def find_unknown_amax_algorithm(context: RuleContext) -> Violation | None:
    """Return a violation if delayed scaling does not know the amax algorithm."""
    algorithm = context.get_setting_value("fp8_amax_compute_algo")
    if algorithm not in _AMAX_ALGORITHMS:
        return Violation(hint=_format_hint(algorithm, _AMAX_ALGORITHMS))
    return None


def find_schemes_without_format(context: RuleContext) -> Iterator[Violation]:
    """Yield the schemes that are stated without the format of their family.

    There is no violation if the family is stated to be off, or if the run uses the other family.
    """
    for family in FAMILIES:
        scheme = context.stated.get(f"{family}_recipe")
        if scheme is None or family in context.stated or context.stated.get(_OTHER_FAMILY[family]):
            continue
        chosen = _FORMATS_BY_FAMILY[family][-1]
        row = FP8_SCHEMES.get(scheme)
        if family == "fp8" and row is not None:
            chosen = row.formats[-1]
        mode = context.mode.upper()
        yield Violation(f"{family}_recipe", family=family, chosen=chosen, mode=mode)


def find_custom_without_factory(context: RuleContext) -> Iterator[Violation]:
    """Yield the fields of a custom scheme that have no import path of a factory."""
    for family in FAMILIES:
        if not context.is_custom or not context.get_format(family):
            continue
        name = f"{family}_quantizer_factory"
        if "." not in (getattr(context.model, name) or ""):
            yield Violation(f"model.{name}")


def find_unread_settings(context: RuleContext) -> Iterator[Violation]:
    """Yield the stated settings that no scheme of the run reads.

    For a setting that only turns something off, the violation is an info.
    """
    for violation in find_fields_without_effect(context, _list_scheme_settings(context)):
        if violation.path in HARMLESS_FIELDS:
            violation.severity = "info"
        yield violation


def _list_scheme_settings(context: RuleContext) -> list[str]:
    """Return the settings without effect that no error reports."""
    settings = []
    for name in (*SCHEME_SPECIFIC_FIELDS, ROUTER_PADDING):
        # In a model, the FP8 output head and the router padding are errors (PB215, PB423).
        is_error = name == GRAD_BUFFER_REUSE or (
            name in ("fp8_output_proj", ROUTER_PADDING) and name not in context.stated
        )
        if not is_error:
            settings.append(name)
    if not context.is_fp8:
        settings.append("fp8_wgrad")
    for family in FAMILIES:
        settings += _list_settings_without_format(context, family)
    if _is_left_out(context, "fp8") and context.stated.get(GRAD_BUFFER_REUSE):
        settings.append(GRAD_BUFFER_REUSE)
    # The precision-aware optimizer reads the scheme in runs without FP8 too.
    if context.has_owners and context.has_precision_aware_optimizer and context.has_optimizer:
        settings = [name for name in settings if name != "fp8_recipe"]
    return settings


def _list_settings_without_format(context: RuleContext, family: str) -> list[str]:
    """Return the stated scheme and stored weights of a family that the run leaves out."""
    if not _is_left_out(context, family):
        return []
    settings = []
    if context.stated.get(f"{family}_recipe"):
        settings.append(f"{family}_recipe")
    for name in (f"{family}_param_gather", f"{family}_param"):
        if name in context.stated:
            if context.stated[name]:
                settings.append(name)
            break
    return settings


def _is_left_out(context: RuleContext, family: str) -> bool:
    """Return whether a family is stated to be off, or the run uses the other family.

    In other runs, a scheme, stored weights or the buffer without their format are an error (PB205,
    PB305, PB244).
    """
    return not context.get_format(family) and (family in context.stated or context.is_low_precision)


def find_refused_values(context: RuleContext) -> Iterator[Violation]:
    """Yield the stated values that are not among Megatron's choices."""
    for name, choices in FIELD_CHOICES.items():
        if context.stated.get(name) not in (None, *choices):
            legal = listed([choice.replace("uint8", "fp8") for choice in choices])
            yield Violation(name, legal=legal)


RULES = (
    contradiction(
        id="PB201",
        title="unknown format",
        setting="fp8",
        when=find_unknown_formats,
        message="must be {known}",
        remedies=("{hint}",),
        source="megatron-core 0.16.1 fp8_utils.get_fp8_recipe: checked at the first FP8 layer, "
        "and only with Transformer Engine",
    ),
    contradiction(
        id="PB202",
        title="unknown scheme",
        setting="fp8_recipe",
        when=find_unknown_schemes,
        message="must be {known}",
        remedies=("{hint}",),
        source="megatron-core 0.16.1 fp8_utils.get_fp8_recipe, fp4_utils.get_fp4_recipe: checked "
        "at the first layer",
    ),
    contradiction(
        id="PB203",
        title="unknown amax algorithm",
        setting="fp8_amax_compute_algo",
        when=find_unknown_amax_algorithm,
        message="must be 'most_recent' or 'max'",
        remedies=("{hint}",),
        source="Transformer Engine 2.20 common/recipe/__init__.py DelayedScaling",
    ),
    contradiction(
        id="PB204",
        title="FP8 and FP4 together",
        setting="fp4",
        when=lambda context: context.is_fp8 and context.is_fp4,
        message="cannot be combined with FP8, which is {run.fp8!r}",
        remedies=("set fp8=None for an FP4 run", "set fp4=None for an FP8 run"),
        source=MODEL_CHECK_SOURCE,
    ),
    contradiction(
        id="PB205",
        title="scheme without a format",
        setting="fp8_recipe",
        when=find_schemes_without_format,
        message="a scheme needs a format: without {family} this is a plain {mode} run",
        remedies=("state {family}={chosen!r} too", "drop {family}_recipe"),
        source="NVIDIA-NeMo/Megatron-Bridge training/mixed_precision.py finalize(), 2026-08-22: "
        "accepted silently",
    ),
    sync_warning(
        id="PB206",
        title="format that the scheme was not made for",
        setting="fp8",
        sync="reported",
        when=lambda context: context.is_mxfp8 and context.fp8 == "hybrid",
        message="MXFP8 is meant for 'e4m3' in every operand: E5M2 gradients were found to diverge",
        remedies=("use fp8='e4m3'", "use fp8_recipe='tensorwise' for E5M2 gradients"),
        source="NVIDIA-NeMo/Megatron-Bridge issue 638, 2025-09-14; legal in Transformer Engine "
        "2.20, and run in NVIDIA's own CI from megatron-core 0.14 to 0.16",
        evidence="reported",
    ),
    info(
        id="PB207",
        title="format under blockwise scaling",
        setting="fp8",
        when=lambda context: context.is_blockwise and context.fp8 in ("hybrid", "e4m3"),
        message="whether hybrid or e4m3 tracks BF16 better under blockwise "
        "scaling is an open question",
        remedies=("compare both with a BF16 run of the same seed before a long run",),
        source="NVIDIA/TransformerEngine issue 2754, 2026-03-11, for hybrid; DeepSeek-V3 and its "
        "followers train in e4m3",
        evidence="weak",
    ),
    error(
        id="PB208",
        title="custom scheme without a factory",
        setting="model.fp8_quantizer_factory",
        when=find_custom_without_factory,
        message="a custom scheme needs the dotted path of a function that makes quantizers",
        remedies=("set it to package.module.function", "choose a named scheme"),
        source=f"{MODEL_CHECK_SOURCE}, fp8_utils.py _get_custom_recipe",
    ),
    warning(
        id="PB209",
        title="custom scheme does not read the format",
        setting="fp8",
        when=lambda context: context.is_custom and context.fp8 == "e4m3",
        message="is not handed to a custom recipe, whose own default is hybrid",
        remedies=("let the factory choose the format", "state fp8='hybrid'"),
        source="megatron-core 0.16.1 fp8_utils.get_fp8_recipe, Transformer "
        "Engine 2.20 CustomRecipe",
    ),
    no_effect(
        id="PB210",
        title="setting without effect",
        setting="fp8_margin",
        when=find_unread_settings,
        message="has no effect: {why}",
        remedies=("drop it", "choose a scheme that reads it"),
        source="megatron-core 0.16.1 fp8_utils.get_fp8_recipe: what each recipe class is given",
        explanation="Transformer Engine's recipe classes ignore keywords they do not know, so "
        "nothing complains later.",
    ),
    no_effect(
        id="PB211",
        title="weight gradients cannot leave FP8",
        setting="fp8_wgrad",
        when=lambda context: context.is_fp8 and context.model.fp8_wgrad is False,
        message="has no effect: Transformer Engine 2.0 and later run the "
        "weight gradient in FP8 too",
        remedies=("drop it", "use Transformer Engine 1.x with delayed scaling"),
        source="NVIDIA/TransformerEngine commit 544dd14b4; megatron-core 0.16.1 "
        "extensions/transformer_engine.py",
    ),
    warning(
        id="PB212",
        title="local layers run no FP8",
        setting="model.transformer_impl",
        when=lambda context: (
            context.is_low_precision
            and context.model.transformer_impl == "local"
            and not context.is_emulated
        ),
        message="Megatron's local layers ignore FP8 and FP4: every GEMM of this {run.scheme} run "
        "would be {run.mode}",
        remedies=(
            "use transformer_impl='transformer_engine'",
            "choose a recipe without FP8 and FP4",
        ),
        source="megatron-core 0.16.1 to 0.19.2: the loss is bit-equal with and without fp8; "
        "hiyouga/LLaMA-Factory issue 9500, 2025-11-16",
    ),
    error(
        id="PB213",
        title="per-module recipe that Transformer Engine refuses",
        setting="model.quant_recipe",
        when=find_refused_payloads,
        message="{key}: {what}",
        remedies=("correct the entry",),
        source="megatron-core 0.19.2 extensions/transformer_engine.py "
        "TEQuantizationRecipe.parse_from_config",
    ),
    warning(
        id="PB214",
        title="per-module recipes together with stored weights",
        setting="model.quant_recipe",
        when=find_recipes_with_stored_weights,
        message="each module recipe has fp8_param and fp4_param of its own, which Megatron does "
        "not compare with the run's",
        remedies=(
            "make them agree with fp8_param_gather and fp4_param_gather",
            "gather weights in {run.mode}",
        ),
        source="Megatron-LM main of 2026-08-22 training/argument_utils.py",
    ),
    error(
        id="PB215",
        title="FP8 output head without MXFP8",
        setting="model.fp8_output_proj",
        versions=(mcore(since="0.18"),),
        when=lambda context: context.model.fp8_output_proj and not context.is_mxfp8,
        message="the output head runs in FP8 under MXFP8 only",
        remedies=("set fp8_output_proj=False", "choose an MXFP8 recipe"),
        source="megatron-core 0.19.2 transformer_config.py __post_init__",
    ),
    warning(
        id="PB216",
        title="FP8 output head of a hybrid model",
        setting="model.fp8_output_proj",
        versions=(mcore(since="0.18"),),
        when=lambda context: (
            context.is_mxfp8 and context.model.fp8_output_proj and context.shape.is_hybrid
        ),
        message="has no effect: only GPTModel has an FP8 output head",
        remedies=("set it to False",),
        source="megatron-core 0.19.2 models/hybrid/hybrid_model.py",
    ),
    error(
        id="PB217",
        title="FP8 activation input without SwiGLU",
        setting="model.activation_func_fp8_input_store",
        when=lambda context: (
            context.model.activation_func_fp8_input_store and not context.model.gated_linear_unit
        ),
        message="the activation's input can be stored in FP8 for SwiGLU only",
        remedies=("set it to False", "use activation_func=silu with gated_linear_unit=True"),
        source=MODEL_CHECK_SOURCE,
    ),
    contradiction(
        id="PB218",
        title="value that Megatron does not take",
        setting="moe_router_dtype",
        when=find_refused_values,
        message="must be {legal}",
        remedies=("use one of these",),
        source="megatron-core 0.19.2 transformer_config.py, Megatron-LM training/arguments.py: "
        "the choices of each",
    ),
    no_effect(
        id="PB219",
        title="FP8 activation input without the fused activation",
        setting="activation_func_fp8_input_store",
        when=lambda context: (
            context.differs_from_default("activation_func_fp8_input_store")
            and context.has_model
            and not context.model.bias_activation_fusion
            and not context.model.use_te_activation_func
        ),
        message="has no effect: only a fused activation stores its input in FP8",
        remedies=("drop it", "set model.bias_activation_fusion=True"),
        source="megatron-core 0.16.1 transformer/mlp.py:179",
    ),
)

DELAYED_RULES = (
    info(
        id="PB222",
        title="largest of one amax",
        setting="fp8_amax_history_len",
        when=lambda context: (
            context.is_delayed
            and context.model.fp8_amax_compute_algo == "max"
            and context.model.fp8_amax_history_len == 1
        ),
        message="the largest of a history of one step is the most recent",
        remedies=(
            "use 1024, the length that the delayed recipes state",
            "state fp8_amax_compute_algo='most_recent'",
        ),
        source="Transformer Engine 2.20 common/recipe/delayed_scaling.cu",
    ),
    info(
        id="PB223",
        title="first step without a scale",
        setting="model.fp8_param",
        when=lambda context: context.is_delayed and context.model.fp8_param,
        message="delayed scaling begins with scale 1, and weights stored in "
        "FP8 are first cast with it",
        remedies=("warm up the learning rate", "use fp8_recipe='tensorwise'"),
        source="Transformer Engine 2.20 pytorch/quantization.py quantized_model_init",
    ),
)
