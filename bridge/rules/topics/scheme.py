"""Which low-precision format under which scaling scheme, settings that it does not read, and delayed scaling itself."""

from typing import Any

from bridge.errors import close_matches, did_you_mean, listed
from bridge.precision.config import CHOICES
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES
from bridge.rules.context import RuleContext
from bridge.rules.inert import BUFFER, PADDING, SCHEME_SETTINGS
from bridge.rules.rule import MODEL_CHECK, Rule, mcore, owners_rule, precision_rule, sync_rule, target_rule
from bridge.rules.topics.modules import next_to_stored_weights, wrong_payloads
from bridge.rules.versions import at_least

_FORMATS = {"fp8": ("e4m3", "hybrid"), "fp4": ("e2m1",)}
_SCHEMES = {"fp8": tuple(FP8_SCHEMES), "fp4": tuple(FP4_SCHEMES)}
_ALGORITHMS = ("most_recent", "max")


def _hint(value: object, known: tuple[str, ...]) -> str:
    """Return a remedy: the nearest name, or all of them."""
    return did_you_mean(close_matches(str(value), known)) or f"use {listed(known)}"


def _unknown_format(s: RuleContext) -> list[dict[str, Any]]:
    found = []
    for family, value in (("fp8", s.fp8), ("fp4", s.fp4)):
        if value and value not in _FORMATS[family]:
            hint = _hint(value, _FORMATS[family])
            if value in _SCHEMES["fp8"] or value in _SCHEMES["fp4"]:
                hint = f"say {family}_recipe={value!r}, which is a scheme, and {listed(_FORMATS[family])} here"
            elif value == "e5m2":
                hint = "use 'hybrid' for E5M2 gradients; nothing trains with E5M2 in the forward pass"
            found.append({"path": family, "known": listed(_FORMATS[family]), "hint": hint})
    return found


def _unknown_scheme(s: RuleContext) -> list[dict[str, Any]]:
    return [
        {"path": f"{family}_recipe", "known": listed(_SCHEMES[family]), "hint": _hint(scheme, _SCHEMES[family])}
        for family, scheme, on in (
            ("fp8", s.stated.get("fp8_recipe", s.model.fp8_recipe), s.fp8 or "fp8_recipe" in s.stated),
            ("fp4", s.stated.get("fp4_recipe", s.model.fp4_recipe), s.fp4 or "fp4_recipe" in s.stated),
        )
        if on and scheme not in _SCHEMES[family] and (scheme is not None or getattr(s, family))
    ]


def _unknown_algorithm(s: RuleContext) -> Any:
    algorithm = s.stated.get("fp8_amax_compute_algo", s.model.fp8_amax_compute_algo)
    return algorithm not in _ALGORITHMS and {"value": algorithm, "hint": _hint(algorithm, _ALGORITHMS)}


def _scheme_without_format(s: RuleContext) -> list[dict[str, Any]]:
    found = []
    for family, other in (("fp8", "fp4"), ("fp4", "fp8")):
        scheme = s.stated.get(f"{family}_recipe")
        # A family that is stated to be off, or a run in the other one, leaves no doubt.
        is_open = family not in s.stated and not s.stated.get(other)
        if scheme is not None and not s.stated.get(family) and is_open:
            row = FP8_SCHEMES.get(scheme) if family == "fp8" else None
            chosen = row.formats[-1] if row else _FORMATS[family][-1]
            found.append({"path": f"{family}_recipe", "family": family, "chosen": chosen, "mode": s.mode.upper()})
    return found


def _without_effect(s: RuleContext) -> list[dict[str, Any]]:
    # A model's own FP8 output head and router padding are errors (PB215, PB423).
    errors = {BUFFER, *({"fp8_output_proj", PADDING} - {*s.stated})}
    settings = [name for name in (*SCHEME_SETTINGS, PADDING) if name not in errors]
    if not s.fp8:
        settings.append("fp8_wgrad")
    # A scheme, stored weights or the buffer without their format are an error (PB205, PB305, PB244) unless the format
    # is stated to be off, or the run is in the other one.
    off = [family for family in ("fp8", "fp4") if not getattr(s, family) and (family in s.stated or s.is_low)]
    for family in off:
        stored = [name for name in (f"{family}_param_gather", f"{family}_param") if name in s.stated][:1]
        settings += [name for name in (f"{family}_recipe", *stored) if s.stated.get(name)]
    if "fp8" in off and s.stated.get(BUFFER):
        settings.append(BUFFER)
    return s.inert_and_stated(settings)


def _refused_values(s: RuleContext) -> list[dict[str, Any]]:
    return [
        {"path": name, "legal": listed([one.replace("uint8", "fp8") for one in legal])}
        for name, legal in CHOICES.items()
        if s.stated.get(name) not in (None, *legal)
    ]


def _unfused_activation(s: RuleContext) -> bool:
    is_fused = s.model.bias_activation_fusion or s.model.use_te_activation_func
    return s.stands_out("activation_func_fp8_input_store") and s.has_model and not is_fused


RULES = (
    precision_rule(
        heading="PB201: unknown format",
        predicate=_unknown_format,
        error="fp8: must be {known}",
        remedies=("{hint}",),
        verified="megatron-core 0.16.1 fp8_utils.get_fp8_recipe: checked at the first FP8 layer, and only with "
        "Transformer Engine",
        gate="is_low",
    ),
    precision_rule(
        heading="PB202: unknown scheme",
        predicate=_unknown_scheme,
        error="fp8_recipe: must be {known}",
        remedies=("{hint}",),
        verified="megatron-core 0.16.1 fp8_utils.get_fp8_recipe, fp4_utils.get_fp4_recipe: checked at the first layer",
    ),
    precision_rule(
        heading="PB203: unknown amax algorithm",
        predicate=_unknown_algorithm,
        error="fp8_amax_compute_algo: must be 'most_recent' or 'max'",
        remedies=("{hint}",),
        verified="Transformer Engine 2.20 common/recipe/__init__.py DelayedScaling",
    ),
    precision_rule(
        heading="PB204: FP8 and FP4 together",
        predicate=lambda s: s.fp8 and s.fp4,
        error="fp4: cannot be combined with FP8, which is {s.fp8!r}",
        remedies=("set fp8=None for an FP4 run", "set fp4=None for an FP8 run"),
        verified=MODEL_CHECK,
        gate="is_low",
    ),
    precision_rule(
        heading="PB205: scheme without a format",
        predicate=_scheme_without_format,
        error="fp8_recipe: a scheme needs a format: without {family} this is a plain {mode} run",
        remedies=("say {family}={chosen!r} as well", "drop {family}_recipe"),
        verified="NVIDIA-NeMo/Megatron-Bridge training/mixed_precision.py finalize(), 2026-08-22: accepted silently",
        gate="precision",
    ),
    precision_rule(
        heading="PB206: format that the scheme was not made for",
        sync="reported",
        predicate=lambda s: s.fp8 == "hybrid",
        warning="fp8: MXFP8 is meant for 'e4m3' in every operand: E5M2 gradients were found to diverge",
        remedies=("use fp8='e4m3'", "use fp8_recipe='tensorwise' for E5M2 gradients"),
        reported="NVIDIA-NeMo/Megatron-Bridge issue 638, 2025-09-14; legal in Transformer Engine 2.20, and run in "
        "NVIDIA's own CI from megatron-core 0.14 to 0.16",
        gate="is_mxfp8",
    ),
    precision_rule(
        heading="PB207: format under blockwise scaling",
        predicate=lambda s: s.fp8 in ("hybrid", "e4m3"),
        info="fp8: whether hybrid or e4m3 tracks BF16 better under blockwise scaling is an open question",
        remedies=("compare both with a BF16 run of the same seed before a long run",),
        weak="NVIDIA/TransformerEngine issue 2754, 2026-03-11, for hybrid; DeepSeek-V3 and its followers train in e4m3",
        gate="is_blockwise",
    ),
    owners_rule(
        heading="PB208: custom scheme without a factory",
        predicate=lambda s: [
            {"path": f"model.{family}_quantizer_factory", "value": getattr(s.model, f"{family}_quantizer_factory")}
            for family in ("fp8", "fp4")
            if getattr(s, family) and "." not in (getattr(s.model, f"{family}_quantizer_factory") or "")
        ],
        error="model.fp8_quantizer_factory: a custom scheme needs the dotted path of a function that makes quantizers",
        remedies=("set it to package.module.function", "choose a named scheme"),
        verified=f"{MODEL_CHECK}, fp8_utils.py _get_custom_recipe",
        gate="is_custom",
    ),
    precision_rule(
        heading="PB209: custom scheme does not read the format",
        predicate=lambda s: s.fp8 == "e4m3",
        warning="fp8: is not handed to a custom recipe, whose own default is hybrid",
        remedies=("let the factory choose the format", "say fp8='hybrid'"),
        verified="megatron-core 0.16.1 fp8_utils.get_fp8_recipe, Transformer Engine 2.20 CustomRecipe",
        gate="is_custom",
    ),
    sync_rule(
        heading="PB210: setting without effect",
        warning="fp8_margin: has no effect: {why}",
        predicate=_without_effect,
        remedies=("drop it", "choose a scheme that reads it"),
        verified="megatron-core 0.16.1 fp8_utils.get_fp8_recipe: what each recipe class is given",
        explanation="Transformer Engine's recipe classes ignore keywords they do not know, so nothing complains later.",
    ),
    sync_rule(
        heading="PB211: weight gradients cannot leave FP8",
        predicate=lambda s: s.model.fp8_wgrad is False and at_least(s.te, "2.0") is not False,
        warning="fp8_wgrad: has no effect: Transformer Engine 2.0 and later run the weight gradient in FP8 too",
        remedies=("drop it", "use Transformer Engine 1.x with delayed scaling"),
        verified="NVIDIA/TransformerEngine commit 544dd14b4; megatron-core 0.16.1 extensions/transformer_engine.py",
        gate="fp8",
    ),
    target_rule(
        heading="PB212: local layers run no FP8",
        predicate=lambda s: s.model.transformer_impl == "local" and not s.is_emulated,
        warning="model.transformer_impl: Megatron's local layers ignore FP8 and FP4: every GEMM of this {s.scheme} run "
        "would be {s.mode}",
        remedies=("use transformer_impl='transformer_engine'", "choose a recipe without FP8 and FP4"),
        verified="megatron-core 0.16.1 to 0.19.2: the loss is bit-equal with and without fp8; "
        "hiyouga/LLaMA-Factory issue 9500, 2025-11-16",
        gate="is_low",
    ),
    Rule(
        heading="PB213: per-module recipe that Transformer Engine refuses",
        predicate=wrong_payloads,
        error="model.quant_recipe: {key}: {what}",
        remedies=("correct the entry",),
        verified="megatron-core 0.19.2 extensions/transformer_engine.py TEQuantizationRecipe.parse_from_config",
        gate="has_model",
    ),
    Rule(
        heading="PB214: per-module recipes together with stored weights",
        predicate=next_to_stored_weights,
        warning="model.quant_recipe: each module recipe has fp8_param and fp4_param of its own, which Megatron does "
        "not compare with the run's",
        remedies=("make them agree with fp8_param_gather and fp4_param_gather", "gather weights in {s.mode}"),
        verified="Megatron-LM main of 2026-08-22 training/argument_utils.py",
        gate="is_low",
    ),
    Rule(
        heading="PB215: FP8 output head without MXFP8",
        predicate=lambda s: s.model.fp8_output_proj and not s.is_mxfp8,
        error="model.fp8_output_proj: the output head runs in FP8 under MXFP8 only",
        remedies=("set fp8_output_proj=False", "choose an MXFP8 recipe"),
        verified="megatron-core 0.19.2 transformer_config.py __post_init__",
        versions=(mcore(since="0.18"),),
    ),
    Rule(
        heading="PB216: FP8 output head of a hybrid model",
        predicate=lambda s: s.model.fp8_output_proj and s.is_hybrid,
        warning="model.fp8_output_proj: has no effect: only GPTModel has an FP8 output head",
        remedies=("set it to False",),
        verified="megatron-core 0.19.2 models/hybrid/hybrid_model.py",
        gate="is_mxfp8",
        versions=(mcore(since="0.18"),),
    ),
    Rule(
        heading="PB217: FP8 activation input without SwiGLU",
        predicate=lambda s: s.model.activation_func_fp8_input_store and not s.model.gated_linear_unit,
        error="model.activation_func_fp8_input_store: the activation's input can be stored in FP8 for SwiGLU only",
        remedies=("set it to False", "use activation_func=silu with gated_linear_unit=True"),
        verified=MODEL_CHECK,
    ),
    precision_rule(
        heading="PB218: value that Megatron does not take",
        predicate=_refused_values,
        error="moe_router_dtype: must be {legal}",
        remedies=("use one of these",),
        verified="megatron-core 0.19.2 transformer_config.py, Megatron-LM training/arguments.py: the choices of each",
        gate="precision",
    ),
    sync_rule(
        heading="PB219: FP8 activation input without the fused activation",
        predicate=_unfused_activation,
        warning="activation_func_fp8_input_store: has no effect: only a fused activation stores its input in FP8",
        remedies=("drop it", "set model.bias_activation_fusion=True"),
        verified="megatron-core 0.16.1 transformer/mlp.py:179",
    ),
)

DELAYED_RULES = (
    Rule(
        heading="PB221: amax reduction over pipeline or expert ranks",
        predicate=lambda s: s.pp > 1 or s.ep > 1,
        warning="fp8_recipe: amax histories are reduced over groups of ranks, and every FP8 module has to run on all "
        "of them in the first step (PP {s.pp}, EP {s.ep}); hangs were reported",
        remedies=(
            "use fp8_recipe='tensorwise', which keeps no history",
            "make sure that no expert or stage stays idle",
        ),
        reported="NVIDIA/Megatron-LM issues 442 (2023-08-01) and 912 (2024-07-09); NVIDIA/TransformerEngine issue 2343",
        gate="is_delayed",
    ),
    precision_rule(
        heading="PB222: largest of one amax",
        predicate=lambda s: s.model.fp8_amax_history_len == 1 and s.model.fp8_amax_compute_algo == "max",
        info="fp8_amax_history_len: the largest of a history of one step is the most recent",
        remedies=("use 1024, the length that the delayed recipes state", "say fp8_amax_compute_algo='most_recent'"),
        verified="Transformer Engine 2.20 common/recipe/delayed_scaling.cu",
        gate="is_delayed",
    ),
    owners_rule(
        heading="PB223: first step without a scale",
        predicate=lambda s: s.model.fp8_param,
        info="model.fp8_param: delayed scaling begins with scale 1, and weights stored in FP8 are first cast with it",
        remedies=("warm up the learning rate", "use fp8_recipe='tensorwise'"),
        verified="Transformer Engine 2.20 pytorch/quantization.py quantized_model_init",
        gate="is_delayed",
    ),
)
