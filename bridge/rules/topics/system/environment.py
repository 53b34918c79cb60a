"""Rules about environment variables that change a precision without a change of the config.

Transformer Engine reads its variables when it is imported.
"""

from collections.abc import Iterator

from bridge.rules.context import RuleContext
from bridge.rules.environment_variables import list_scheme_variables
from bridge.rules.rule import error, mcore, warning
from bridge.rules.violation import Violation

FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
ACCELERATE_MODES = {"no": "fp32", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}
"""Value of ACCELERATE_MIXED_PRECISION -> the mode."""
ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
ATTENTION_BACKEND_FLAGS = {
    "auto": "111",
    "local": "000",
    "flash": "100",
    "fused": "010",
    "unfused": "001",
}
"""Attention backend -> the values that Megatron asserts for `ATTENTION_VARIABLES`."""


def _is_on(context: RuleContext, name: str) -> bool:
    return context.environment.get(name, "").lower() not in ("", "0", "none")


def _refuses_fp32_scales(context: RuleContext) -> bool:
    return context.target.is_from(10) and _is_on(context, FP32_SCALES)


def has_other_accelerate_precision(context: RuleContext) -> bool:
    """Return whether Accelerate's variable states another precision than the run's."""
    stated = context.environment.get("ACCELERATE_MIXED_PRECISION", "").lower()
    if not stated or ACCELERATE_MODES.get(stated) == context.mode:
        return False
    return not (stated == "fp8" and context.is_fp8)


def find_recipe_changing_variables(context: RuleContext) -> Iterator[Violation]:
    """Yield the variables that change a keyword of the recipe and that no other rule refuses.

    If `FP32_SCALES` is not set, slime sets it to 1 for its training processes, and so does miles on
    GPUs before Blackwell. So the remedy for this variable is 0, which turns it off everywhere.
    """
    if not context.is_low_precision:
        return
    variables = list_scheme_variables(context.scheme, context.environment, attention=False)
    refused = set()
    for row, _ in variables:
        if context.scheme in row.refused_by:
            refused.add(row.name)
    if _refuses_fp32_scales(context):
        refused.add(FP32_SCALES)
    for row, value in variables:
        if row.keyword and row.is_active(value) is not False and row.name not in refused:
            off = "unset it"
            if row.name == FP32_SCALES:
                off = "set it to 0"
            yield Violation(f"environment.{row.name}", off=off)


def find_attention_variable_conflicts(context: RuleContext) -> Iterator[Violation]:
    """Yield the variables that Megatron refuses under the chosen attention backend."""
    stated = context.model.attention_backend
    chosen = str(getattr(stated, "name", stated) or "auto").lower()
    if chosen not in ATTENTION_BACKEND_FLAGS:
        return
    for name, on in zip(ATTENTION_VARIABLES, ATTENTION_BACKEND_FLAGS[chosen], strict=True):
        if context.environment.get(name, on) != on:
            yield Violation(f"environment.{name}", on=on, chosen=chosen)


def has_one_sided_query_key_scaling(context: RuleContext) -> bool:
    """Return whether the config and the variable state different values for query-key scaling."""
    if not context.has_environment or context.is_emulated:
        return False
    if context.model.transformer_impl != "transformer_engine":
        return False
    in_environment = _is_on(context, "NVTE_APPLY_QK_LAYER_SCALING")
    return context.model.apply_query_key_layer_scaling != in_environment


def has_overruled_fp8_attention(context: RuleContext) -> bool:
    """Return whether a variable replaces the scheme of FP8 attention."""
    if not context.environment.get("NVTE_DPA_FP8_RECIPE"):
        return False
    return context.model.fp8_dot_product_attention or context.model.fp8_multi_head_attention


RULES = (
    error(
        id="PB521",
        title="FP32 block scales on Blackwell",
        setting=f"environment.{FP32_SCALES}",
        when=lambda context: context.is_blockwise and _refuses_fp32_scales(context),
        message="blockwise scaling runs as MXFP8 on this GPU, and MXFP8 takes power-of-two scales only",
        remedies=("set it to 0", "use Hopper", "choose an MXFP8 recipe"),
        source="Transformer Engine 2.20 common/transpose/quantize_transpose_vector_blockwise.cu: "
        "an error",
    ),
    error(
        id="PB522",
        title="query-key scaling set in one place only",
        setting="model.apply_query_key_layer_scaling",
        when=has_one_sided_query_key_scaling,
        message="must agree with the environment variable NVTE_APPLY_QK_LAYER_SCALING (1 or unset)",
        remedies=(
            "set the variable to 1 where it is True and unset it where it is False",
            "change the field",
        ),
        source="megatron-core 0.16.1 extensions/transformer_engine.py TEDotProductAttention",
    ),
    error(
        id="PB523",
        title="determinism set in one place only",
        setting="model.deterministic_mode",
        when=lambda context: (
            context.has_environment
            and context.model.deterministic_mode
            and not context.is_emulated
            and context.environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") != "0"
        ),
        message="needs the environment variable NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
        remedies=("set the variable", "set deterministic_mode=False"),
        source="megatron-core 0.19.2 extensions/transformer_engine.py: RuntimeError",
    ),
    warning(
        id="PB524",
        title="another source states another precision",
        setting="environment.ACCELERATE_MIXED_PRECISION",
        when=has_other_accelerate_precision,
        message="states another precision than this run's {run.mode}; Megatron does not read it, "
        "other libraries do",
        remedies=("unset it", "make it agree"),
        source="huggingface/transformers issue 29510; huggingface/accelerate "
        "issue 3139, 2024-10-02",
        evidence="reported",
    ),
    warning(
        id="PB525",
        title="FP8 attention overruled by a variable",
        setting="environment.NVTE_DPA_FP8_RECIPE",
        when=has_overruled_fp8_attention,
        message="replaces the attention's scheme, and F16 turns FP8 attention off, "
        "whatever the config says",
        remedies=("unset it",),
        source="Transformer Engine 2.20 "
        "pytorch/attention/dot_product_attention/dot_product_attention.py",
    ),
    error(
        id="PB526",
        title="backward override under delayed scaling",
        setting="environment.NVTE_BACKWARD_OVERRIDE",
        when=lambda context: context.is_delayed and _is_on(context, "NVTE_BACKWARD_OVERRIDE"),
        message="must be unset under delayed scaling, whose recipe class refuses any value",
        remedies=("unset it", "use fp8_recipe='tensorwise'"),
        source="Transformer Engine 2.20 common/recipe/__init__.py DelayedScaling",
    ),
    warning(
        id="PB527",
        title="a variable changes the numbers",
        setting="environment.NVTE_BACKWARD_OVERRIDE",
        when=find_recipe_changing_variables,
        message="gives {run.scheme} scaling other numbers than the config shows, on "
        "every rank that has it set",
        remedies=("{off}", "set it on every rank and keep it with the run"),
        source="Transformer Engine 2.20 common/recipe/__init__.py: read once, at import",
    ),
    error(
        id="PB528",
        title="attention backend in two places",
        setting="environment.NVTE_FUSED_ATTN",
        versions=(mcore(since="0.11"),),
        when=find_attention_variable_conflicts,
        message="must be {on} or unset under model.attention_backend={chosen}, or Megatron stops "
        "when it builds the model",
        remedies=("unset it", "choose the backend with model.attention_backend"),
        source="megatron-core 0.11.0, not 0.10.0, and 0.16.1 to 0.19.2 "
        "models/common/language_module/language_module.py; met in a rehearsal of ROCm/Megatron-LM "
        "gpt3_345m_weekly_dgx_h100_1N8G_mcore_tp1_pp2_fp8_pp, written for an earlier one",
    ),
)
