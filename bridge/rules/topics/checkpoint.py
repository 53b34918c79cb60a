"""What is read of a checkpoint, and adapters on low-precision weights."""

from bridge.rules.context import FAMILIES, RuleContext
from bridge.rules.rule import te, warning
from bridge.rules.violation import Violation, all_of, violations


def _odd_rank(run: RuleContext) -> list[Violation]:
    # Adapters of Megatron Bridge's classes are Megatron's own layers, unless Transformer Engine fuses them.
    is_of_te = run.peft.type is None or run.model.use_transformer_engine_op_fuser
    rank = run.peft.rank or run.peft.dim or 0
    return [Violation(value=rank)] if is_of_te and rank % 16 else []


RULES = (
    warning(
        id="PB542",
        title="delayed scaling's state is pickled",
        setting="environment.NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE",
        versions=(te(since="2.20"),),
        when=all_of(
            *("is_resumed", "scheme is delayed", "has_environment"),
            lambda run: run.environment.get("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE") != "1",
        ),
        message="Transformer Engine reads delayed scaling's state from a checkpoint with this set to 1 only",
        remedies=("set it to 1 for checkpoints of your own", "use fp8_recipe='tensorwise', which has no state"),
        source="Transformer Engine 2.20 pytorch/module/base.py, _extra_state.py",
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
        when=all_of(
            "has_peft",
            find=lambda run: violations({f"{one}_param_gather": getattr(run, f"gathers_{one}") for one in FAMILIES}),
        ),
        message="frozen base weights have no master weights to be cast from, and crashes were reported",
        remedies=("set it to False",),
        source="modelscope/ms-swift issues 7290 (2026-01-05) and 9371 (2026-05-17)",
        evidence="reported",
    ),
)
