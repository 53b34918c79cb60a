"""Environment variables that change a precision behind the config's back; Transformer Engine reads its at import."""

from bridge.rules.context import RuleContext
from bridge.rules.rule import error, mcore, warning
from bridge.rules.variables import concerning
from bridge.rules.violation import Violation, all_of


def _is_on(run: RuleContext, name: str) -> bool:
    return run.environment.get(name, "").lower() not in ("", "0", "none")


def _is_refused(run: RuleContext) -> bool:
    return run.target.is_from(10) and _is_on(run, "NVTE_FP8_BLOCK_SCALING_FP32_SCALES")


def _another_source(run: RuleContext) -> bool:
    stated = run.environment.get("ACCELERATE_MIXED_PRECISION", "").lower()
    theirs = {"no": "fp32", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16"}.get(stated)
    return bool(stated) and theirs != run.mode and not (stated == "fp8" and run.fp8)


def _changed_numbers(run: RuleContext) -> list[Violation]:
    """Return the variables that change a keyword of the recipe, apart from those that other rules refuse."""
    given = concerning(run.scheme, run.environment, attention=False)
    refused = {row.name for row, _ in given if run.scheme in row.refused_by}
    refused |= {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES"} if _is_refused(run) else set()
    names = [row.name for row, text in given if row.keyword and row.is_active(text) is not False]
    return [Violation(f"environment.{name}") for name in names if name not in refused]


def _attention_variables(run: RuleContext) -> list[Violation]:
    given = run.model.attention_backend
    chosen = str(getattr(given, "name", given) or "auto").lower()
    expected = {"auto": "111", "local": "000", "flash": "100", "fused": "010", "unfused": "001"}.get(chosen)
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    return [
        Violation(f"environment.{name}", on=on, chosen=chosen)
        for name, on in zip(names, expected or (), strict=False)
        if run.environment.get(name, on) != on
    ]


RULES = (
    error(
        id="PB521",
        title="FP32 block scales on Blackwell",
        setting="environment.NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
        when=all_of("scheme is blockwise", _is_refused),
        message="blockwise scaling runs as MXFP8 there, which takes power-of-two scales only",
        remedies=("set it to 0", "use Hopper", "choose an MXFP8 recipe"),
        source="Transformer Engine 2.20 common/transpose/quantize_transpose_vector_blockwise.cu: an error",
    ),
    error(
        id="PB522",
        title="query-key scaling set in one place only",
        setting="model.apply_query_key_layer_scaling",
        when=all_of(
            *("has_environment", "model.transformer_impl is transformer_engine", "not is_emulated"),
            lambda run: run.model.apply_query_key_layer_scaling != _is_on(run, "NVTE_APPLY_QK_LAYER_SCALING"),
        ),
        message="must agree with the environment variable NVTE_APPLY_QK_LAYER_SCALING (1 or unset)",
        remedies=("set the variable to 1 where it is True and unset it where it is False", "change the field"),
        source="megatron-core 0.16.1 extensions/transformer_engine.py TEDotProductAttention",
    ),
    error(
        id="PB523",
        title="determinism set in one place only",
        setting="model.deterministic_mode",
        when=all_of(
            *("has_environment", "model.deterministic_mode", "not is_emulated"),
            lambda run: run.environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") != "0",
        ),
        message="needs the environment variable NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
        remedies=("set the variable", "set deterministic_mode=False"),
        source="megatron-core 0.19.2 extensions/transformer_engine.py: RuntimeError",
    ),
    warning(
        id="PB524",
        title="another source says another precision",
        setting="environment.ACCELERATE_MIXED_PRECISION",
        when=all_of(_another_source),
        message="says another precision than this run's {run.mode}; Megatron does not read it, other libraries do",
        remedies=("unset it", "make it agree"),
        source="huggingface/transformers issue 29510; huggingface/accelerate issue 3139, 2024-10-02",
        evidence="reported",
    ),
    warning(
        id="PB525",
        title="FP8 attention overruled by a variable",
        setting="environment.NVTE_DPA_FP8_RECIPE",
        when=all_of(
            lambda run: run.environment.get("NVTE_DPA_FP8_RECIPE"),
            lambda run: run.model.fp8_dot_product_attention or run.model.fp8_multi_head_attention,
        ),
        message="replaces the attention's scheme, and F16 turns FP8 attention off, whatever the config says",
        remedies=("unset it",),
        source="Transformer Engine 2.20 pytorch/attention/dot_product_attention/dot_product_attention.py",
    ),
    error(
        id="PB526",
        title="backward override under delayed scaling",
        setting="environment.NVTE_BACKWARD_OVERRIDE",
        when=all_of("scheme is delayed", lambda run: _is_on(run, "NVTE_BACKWARD_OVERRIDE")),
        message="must be unset under delayed scaling, whose recipe class refuses any value",
        remedies=("unset it", "use fp8_recipe='tensorwise'"),
        source="Transformer Engine 2.20 common/recipe/__init__.py DelayedScaling",
    ),
    warning(
        id="PB527",
        title="a variable changes the numbers",
        setting="environment.NVTE_BACKWARD_OVERRIDE",
        when=all_of("is_low", find=_changed_numbers),
        message="gives {run.scheme} scaling other numbers than the config shows, on every rank that has it set",
        remedies=("unset it", "set it on every rank and keep it with the run"),
        source="Transformer Engine 2.20 common/recipe/__init__.py: read once, at import",
    ),
    error(
        id="PB528",
        title="attention backend in two places",
        setting="environment.NVTE_FUSED_ATTN",
        versions=(mcore(since="0.11"),),
        when=_attention_variables,
        message="must be {on} or unset under model.attention_backend={chosen}, or Megatron stops when it builds the "
        "model",
        remedies=("unset it", "choose the backend with model.attention_backend"),
        source="megatron-core 0.11.0, not 0.10.0, and 0.16.1 to 0.19.2 "
        "models/common/language_module/language_module.py; met in a rehearsal of "
        "ROCm/Megatron-LM gpt3_345m_weekly_dgx_h100_1N8G_mcore_tp1_pp2_fp8_pp, written for an earlier one",
    ),
)
