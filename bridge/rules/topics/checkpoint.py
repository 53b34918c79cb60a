"""Resuming in another precision, and adapters on low-precision weights."""

from bridge.rules.context import FAMILIES, RuleContext
from bridge.rules.rule import PARSER, error, mcore, te, warning
from bridge.rules.violation import Violation, all_of, violations

FINGERPRINT = (
    *("fp8", "fp8_recipe", "fp8_amax_history_len", "fp8_param", "fp4", "fp4_recipe", "fp4_param", "bf16", "fp16"),
    "params_dtype",
)
"""Fields of the model that a checkpoint's fingerprint may hold; it holds the optimizer's dtypes and `te` too."""
_STATES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def _changed(run: RuleContext) -> list[Violation]:
    """Return what the checkpoint was written with and this run would read otherwise."""
    before = run.checkpoint or {}
    found = []
    for owner, names in ((run.model, FINGERPRINT), (run.optimizer, _STATES)):
        role = "model" if owner is run.model else "optimizer"
        for name in names:
            inert = name.partition("_")[0] in FAMILIES and "_" in name and not getattr(run, name[:3])
            if name in before and before[name] != getattr(owner, name) and not inert:
                found.append(Violation(f"{role}.{name}", before=before[name]))
    major = str(before.get("te") or "").partition(".")[0]
    if major and run.te is not None and run.is_low and major != str(run.te.major):
        found.append(Violation("target.te", value=str(run.te), before=before["te"]))
    return found


def _odd_rank(run: RuleContext) -> list[Violation]:
    # Adapters of Megatron Bridge's classes are Megatron's own layers, unless Transformer Engine fuses them.
    is_of_te = run.peft.type is None or run.model.use_transformer_engine_op_fuser
    return [Violation(value=run.rank)] if is_of_te and run.rank is not None and run.rank % 16 else []


def _stored_under_adapters(run: RuleContext) -> list[Violation]:
    return violations({f"{family}_param_gather": getattr(run, f"gathers_{family}") for family in FAMILIES})


RULES = (
    error(
        id="PB541",
        title="resuming in another precision",
        setting="model.fp8",
        when=_changed,
        message="the checkpoint was written with {before!r}",
        remedies=(
            "resume with the precision it was written in",
            "silence this with the reason, if the change is meant",
        ),
        source="NVIDIA/TransformerEngine issue 982 (2024-07-02: the loss explodes); NVIDIA-NeMo/Automodel issue 3814, "
        "2026-09-05",
        evidence="reported",
        explanation="Delayed scaling keeps its scales and histories in the checkpoint: another scheme drops them, and "
        "coming from one it starts with scale 1. Stored FP8 weights are read as what they were written in.",
    ),
    warning(
        id="PB542",
        title="delayed scaling's state is pickled",
        setting="environment.NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE",
        versions=(te(since="2.20"),),
        when=all_of(
            *("is_resumed", "is_delayed", "has_environment"),
            lambda run: run.environment.get("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE") != "1",
        ),
        message="Transformer Engine reads delayed scaling's state from a checkpoint with this set to 1 only",
        remedies=("set it to 1 for checkpoints of your own", "use fp8_recipe='tensorwise', which has no state"),
        source="Transformer Engine 2.20 pytorch/module/base.py, _extra_state.py",
    ),
    warning(
        id="PB543",
        title="checkpoint dequantised slice by slice",
        setting="train.stream_ckpt_dequant",
        versions=(mcore(since="0.19", until="0.20"),),
        when=all_of("is_tensorwise", "train.stream_ckpt_dequant"),
        message="weights under current scaling are scaled again per slice, which corrupts what is loaded",
        remedies=("set it to False, as Megatron-LM's argument parser does",),
        source=PARSER,
    ),
    warning(
        id="PB544",
        title="adapter rank that FP8 GEMMs do not take",
        setting="peft.rank",
        when=all_of("has_peft", "is_low", find=_odd_rank),
        message="must be a multiple of 16 for FP8 and FP4 GEMMs",
        remedies=("use 16 or 32", "keep the adapters in {run.mode}"),
        source="Transformer Engine 2.20 pytorch/utils.py assert_dim_for_fp8_exec; modelscope/ms-swift issue 5063, "
        "2025-07-22",
    ),
    warning(
        id="PB545",
        title="frozen weights stored in low precision",
        setting="fp8_param_gather",
        when=all_of("has_peft", find=_stored_under_adapters),
        message="frozen base weights have no master weights to be cast from, and crashes were reported",
        remedies=("set it to False",),
        source="modelscope/ms-swift issues 7290 (2026-01-05) and 9371 (2026-05-17)",
        evidence="reported",
    ),
)
