"""Environment variables that change a precision behind the config's back; Transformer Engine reads its at import."""

from functools import partial
from typing import Any

from bridge.rules.context import RuleContext
from bridge.rules.rule import environment_rule

_CHANGES = {
    "tensorwise": ("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",),
    "blockwise": ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES",),
    "nvfp4": (
        "NVTE_NVFP4_DISABLE_RHT",
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
        "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
        "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
        "NVTE_NVFP4_4OVER6",
    ),
}
"""Scheme -> variables that give it other numbers."""


def _is_on(s: RuleContext, name: str) -> bool:
    return s.environment.get(name, "").lower() not in ("", "0", "none")


def _is_refused(s: RuleContext) -> bool:
    is_blackwell = s.capability is not None and s.capability >= (10, 0)
    return is_blackwell and _is_on(s, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES")


def _another_source(s: RuleContext) -> Any:
    stated = s.environment.get("ACCELERATE_MIXED_PRECISION", "").lower()
    theirs = {"no": "fp32", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}.get(stated)
    if not stated or theirs == s.mode or (stated == "fp8" and s.fp8):
        return None
    return {"value": stated}


def _changed_numbers(s: RuleContext) -> list[dict[str, Any]]:
    names = ["NVTE_BACKWARD_OVERRIDE"]
    if not (s.is_blockwise and _is_refused(s)):
        names += _CHANGES.get(s.scheme or "", ())
    return [{"path": f"environment.{name}", "value": s.environment[name]} for name in names if _is_on(s, name)]


def _attention_overruled(s: RuleContext) -> Any:
    recipe = s.environment.get("NVTE_DPA_FP8_RECIPE")
    on = s.model.fp8_dot_product_attention or s.model.fp8_multi_head_attention
    return bool(recipe and on) and {"value": recipe}


def _attention_variables(s: RuleContext) -> list[dict[str, Any]]:
    """Return the variables that say another attention backend than the model's field."""
    given = s.model.attention_backend
    chosen = str(getattr(given, "name", given) or "auto").lower()
    expected = {"auto": "111", "local": "000", "flash": "100", "fused": "010", "unfused": "001"}.get(chosen)
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    return [
        {"path": f"environment.{name}", "value": s.environment[name], "on": on, "chosen": chosen}
        for name, on in zip(names, expected or (), strict=False)
        if s.environment.get(name, on) != on
    ]


_variable = partial(environment_rule, gate="has_environment")

RULES = (
    environment_rule(
        heading="PB521: FP32 block scales on Blackwell",
        predicate=lambda s: _is_refused(s) and {"value": s.environment["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"]},
        error="environment.NVTE_FP8_BLOCK_SCALING_FP32_SCALES: blockwise scaling runs as MXFP8 there, which takes "
        "power-of-two scales only",
        remedies=("unset it", "use Hopper", "choose an MXFP8 recipe"),
        verified="Transformer Engine 2.20 common/transpose/quantize_transpose_vector_blockwise.cu: an error",
        gate="is_blockwise",
    ),
    _variable(
        heading="PB522: query-key scaling set in one place only",
        predicate=lambda s: (
            s.model.transformer_impl == "transformer_engine"
            and not s.is_emulated
            and s.model.apply_query_key_layer_scaling != _is_on(s, "NVTE_APPLY_QK_LAYER_SCALING")
        ),
        error="model.apply_query_key_layer_scaling: must agree with the environment variable "
        "NVTE_APPLY_QK_LAYER_SCALING (1 or unset)",
        remedies=("set the variable to 1 where it is True and unset it where it is False", "change the field"),
        verified="megatron-core 0.16.1 extensions/transformer_engine.py TEDotProductAttention",
    ),
    _variable(
        heading="PB523: determinism set in one place only",
        predicate=lambda s: (
            s.model.deterministic_mode
            and not s.is_emulated
            and s.environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") != "0"
        ),
        error="model.deterministic_mode: needs the environment variable NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
        remedies=("set the variable", "set deterministic_mode=False"),
        verified="megatron-core 0.19.2 extensions/transformer_engine.py: RuntimeError",
    ),
    _variable(
        heading="PB524: another source says another precision",
        predicate=_another_source,
        warning="environment.ACCELERATE_MIXED_PRECISION: says another precision than this run's {s.mode}; Megatron "
        "does not read it, other libraries do",
        remedies=("unset it", "make it agree"),
        reported="huggingface/transformers issue 29510; huggingface/accelerate issue 3139, 2024-10-02",
    ),
    _variable(
        heading="PB525: FP8 attention overruled by a variable",
        predicate=_attention_overruled,
        warning="environment.NVTE_DPA_FP8_RECIPE: replaces the attention's scheme, and F16 turns FP8 attention off, "
        "whatever the config says",
        remedies=("unset it",),
        verified="Transformer Engine 2.20 pytorch/attention/dot_product_attention/dot_product_attention.py",
    ),
    environment_rule(
        heading="PB526: backward override under delayed scaling",
        predicate=lambda s: _is_on(s, "NVTE_BACKWARD_OVERRIDE") and {"value": s.environment["NVTE_BACKWARD_OVERRIDE"]},
        error="environment.NVTE_BACKWARD_OVERRIDE: must be unset under delayed scaling, whose recipe class refuses any "
        "value",
        remedies=("unset it", "use fp8_recipe='tensorwise'"),
        verified="Transformer Engine 2.20 common/recipe/__init__.py DelayedScaling",
        gate="is_delayed",
    ),
    environment_rule(
        heading="PB527: a variable changes the numbers",
        predicate=lambda s: [] if s.is_delayed else _changed_numbers(s),
        warning="environment.NVTE_BACKWARD_OVERRIDE: gives {s.scheme} scaling other numbers than the config shows, on "
        "every rank that has it set",
        remedies=("unset it", "set it on every rank and keep it with the run"),
        verified="Transformer Engine 2.20 common/recipe/__init__.py: read once, at import",
        gate="is_low",
    ),
    _variable(
        heading="PB528: attention backend in two places",
        predicate=_attention_variables,
        error="environment.NVTE_FUSED_ATTN: must be {on} or unset under model.attention_backend={chosen}, or Megatron "
        "stops when it builds the model",
        remedies=("unset it", "choose the backend with model.attention_backend"),
        verified="megatron-core 0.16.1 and 0.19.2 models/common/language_module/language_module.py:102; met in a "
        "rehearsal of ROCm/Megatron-LM gpt3_345m_weekly_dgx_h100_1N8G_mcore_tp1_pp2_fp8_pp, written for an earlier one",
    ),
)
