"""Resuming in another precision, and adapters on low-precision weights."""

from typing import Any

from bridge.rules.context import RuleContext
from bridge.rules.rule import PARSER, Rule, environment_rule, mcore, te

FINGERPRINT = (
    *("fp8", "fp8_recipe", "fp8_amax_history_len", "fp8_param", "fp4", "fp4_recipe", "fp4_param", "bf16", "fp16"),
    "params_dtype",
)
"""Fields of the model that a checkpoint's fingerprint may hold; it holds the optimizer's dtypes and `te` too."""
_STATES = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def _changed(s: RuleContext) -> list[dict[str, Any]]:
    """Return what the checkpoint was written with and this run would read otherwise."""
    before = s.checkpoint or {}
    found = []
    for owner, names in ((s.model, FINGERPRINT), (s.optimizer, _STATES)):
        role = "model" if owner is s.model else "optimizer"
        for name in names:
            inert = name.partition("_")[0] in ("fp8", "fp4") and "_" in name and not getattr(s, name[:3])
            if name in before and before[name] != getattr(owner, name) and not inert:
                found.append({"path": f"{role}.{name}", "before": before[name]})
    major = str(before.get("te") or "").partition(".")[0]
    if major and s.te is not None and s.is_low and major != str(s.te.major):
        found.append({"path": "target.te", "value": str(s.te), "before": before["te"]})
    return found


RULES = (
    Rule(
        heading="PB541: resuming in another precision",
        predicate=_changed,
        error="model.fp8: the checkpoint was written with {before!r}",
        remedies=(
            "resume with the precision it was written in",
            "silence this with the reason, if the change is meant",
        ),
        reported="NVIDIA/TransformerEngine issue 982 (2024-07-02: the loss explodes); NVIDIA-NeMo/Automodel issue "
        "3814, 2026-09-05",
        gate="is_resumed",
        explanation="Delayed scaling keeps its scales and histories in the checkpoint: another scheme drops them, and "
        "coming from one it starts with scale 1. Stored FP8 weights are read as what they were written in.",
    ),
    environment_rule(
        heading="PB542: delayed scaling's state is pickled",
        predicate=lambda s: (
            s.is_delayed
            and s.has_environment
            and s.environment.get("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE") != "1"
            and {"value": s.environment.get("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE")}
        ),
        warning="environment.NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE: Transformer Engine reads delayed scaling's state "
        "from a checkpoint with this set to 1 only",
        remedies=("set it to 1 for checkpoints of your own", "use fp8_recipe='tensorwise', which has no state"),
        verified="Transformer Engine 2.20 pytorch/module/base.py, _extra_state.py",
        gate="is_resumed",
        versions=(te(since="2.20"),),
    ),
    Rule(
        heading="PB543: checkpoint dequantised slice by slice",
        predicate=lambda s: s.train.stream_ckpt_dequant,
        warning="train.stream_ckpt_dequant: weights under current scaling are scaled anew per slice, which corrupts "
        "what is loaded",
        remedies=("set it to False, as Megatron-LM's argument parser does",),
        verified=PARSER,
        gate="is_tensorwise",
        versions=(mcore(since="0.19", until="0.20"),),
    ),
    Rule(
        heading="PB544: adapter rank that FP8 GEMMs do not take",
        predicate=lambda s: s.is_low and s.rank is not None and s.rank % 16 and {"value": s.rank},
        warning="peft.rank: must be a multiple of 16 for FP8 and FP4 GEMMs",
        remedies=("use 16 or 32", "keep the adapters in {s.mode}"),
        verified="Transformer Engine 2.20 pytorch/utils.py assert_dim_for_fp8_exec; modelscope/ms-swift issue 5063, "
        "2025-07-22",
        gate="has_peft",
    ),
    Rule(
        heading="PB545: frozen weights stored in low precision",
        predicate=lambda s: [
            {"path": f"{family}_param_gather", "value": True}
            for family in ("fp8", "fp4")
            if getattr(s, f"gathers_{family}")
        ],
        warning="fp8_param_gather: frozen base weights have no master weights to be cast from, and crashes were "
        "reported",
        remedies=("set it to False",),
        reported="modelscope/ms-swift issues 7290 (2026-01-05) and 9371 (2026-05-17)",
        gate="has_peft",
    ),
)
