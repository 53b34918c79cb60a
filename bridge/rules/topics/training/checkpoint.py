"""Rules about scaling state in a checkpoint, and about adapters on low-precision weights."""

from packaging.specifiers import SpecifierSet

from bridge.rules.rule import warning
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation
from bridge.target.fields import TE_ADAPTER
from bridge.target.versions import VersionRange

UNSAFE_PICKLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def find_unaligned_adapter_rank(context: RunContext) -> Violation | None:
    """Return a violation if Transformer Engine's GEMMs do not accept the rank of the adapters.

    Adapters of Megatron Bridge's classes are Megatron's layers, unless Transformer Engine fuses
    them. Adapters of mcore-bridge are Transformer Engine's layers. They compute in high precision
    if the weights are stored in FP8.
    """
    if not context.has_peft or not context.is_low_precision:
        return None
    is_of_te = context.peft.type is None or context.model.use_transformer_engine_op_fuser
    if context.peft.type == TE_ADAPTER:
        is_of_te = not context.model.fp8_param
    rank = context.peft.rank or context.peft.dim or 0
    if is_of_te and rank % 16:
        return Violation(value=rank)
    return None


def find_frozen_stored_weights(context: RunContext) -> Violation | None:
    """Return a violation if frozen weights are stored in FP8, an info unless they are blockwise."""
    if not context.has_peft or not context.gathers_fp8 or context.is_emulated:
        return None
    if context.is_blockwise:
        return Violation()
    return Violation(severity="info")


RULES = (
    warning(
        id="PB542",
        title="delayed scaling's state is pickled",
        setting=f"environment.{UNSAFE_PICKLE}",
        versions=(VersionRange(product="te", versions=SpecifierSet(">=2.16.1,!=2.17.0")),),
        when=lambda context: (
            context.program.is_resumed
            and context.is_delayed
            and context.has_environment
            and context.environment.get(UNSAFE_PICKLE) != "1"
        ),
        message="Transformer Engine reads delayed scaling's state from a "
        "checkpoint with this set to 1 only",
        remedies=(
            "set it to 1 for checkpoints of your own",
            "use fp8_recipe='tensorwise', which has no state",
        ),
        source="Transformer Engine 2.16.1, 2.17.1, 2.18 and 2.20 pytorch/module/base.py, "
        "_extra_state.py (pull request 3123); 2.16.0 and 2.17.0 have it not",
    ),
    warning(
        id="PB544",
        title="adapter rank that FP8 GEMMs do not take",
        setting="peft.rank",
        when=find_unaligned_adapter_rank,
        message="must be a multiple of 16 for FP8 and FP4 GEMMs",
        remedies=("use 16 or 32", "keep the adapters in {run.mode}"),
        source="Transformer Engine 2.20 pytorch/utils.py assert_dim_for_fp8_exec; "
        "modelscope/ms-swift issue 5063, 2025-07-22",
    ),
    warning(
        id="PB545",
        title="frozen weights stored in low precision",
        setting="fp8_param_gather",
        when=find_frozen_stored_weights,
        message="frozen base weights that are stored in FP8 were reported to crash under "
        "blockwise scaling (GEMM with Float8BlockwiseQTensor requires GEMM_READY format), and "
        "under another scheme to take the memory of FP16",
        remedies=("set fp8_param_gather=False",),
        source="modelscope/ms-swift issues 7290 (2026-01-05) and 9371 (2026-05-17)",
        evidence="weak",
    ),
)
