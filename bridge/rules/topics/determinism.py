"""Runs that repeat bit for bit: `deterministic_mode`, and `batch_invariant_mode`."""

from bridge.rules.context import RuleContext
from bridge.rules.rule import error, mcore, warning
from bridge.rules.versions import at_least
from bridge.rules.violation import Violation, all_of, violations

NCCL_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")
SHARED_KERNELS = (3, 4)
"""Major versions of FlashAttention with a fixed number of splits."""
_INVARIANT = "megatron-core 0.19.2 transformer_config.py __post_init__"
_GEMM = "megatron-core 0.16.1 and 0.19.2 transformer/custom_layers/batch_invariant_kernels.py _te_general_gemm_patched"


def _is_flash(run: RuleContext) -> bool:
    given = run.model.attention_backend
    return str(getattr(given, "name", given)).rpartition(".")[2].lower() == "flash"


def _is_refused(run: RuleContext) -> bool:
    """Return whether Megatron refuses batch-invariant experts in FP8 or FP4 (PB432)."""
    return bool(run.model.num_moe_experts) and at_least(run.target.mcore, "0.20") is True


def _split_attention(run: RuleContext) -> list[Violation]:
    return violations(
        {
            "model.context_parallel_size": (run.model.context_parallel_size or 1) > 1,
            "model.attention_dropout": bool(run.model.attention_dropout),
        }
    )


def _unordered_kernels(run: RuleContext) -> list[Violation]:
    return violations(
        {
            "model.cross_entropy_loss_fusion": bool(run.model.cross_entropy_loss_fusion),
            "model.tp_comm_overlap": bool(run.model.tp_comm_overlap) and at_least(run.target.mcore, "0.19") is True,
        }
    )


def _wrong_nccl(run: RuleContext) -> list[Violation]:
    chosen = run.environment.get("NCCL_ALGO")
    if chosen in NCCL_ALGORITHMS:
        return []
    return [Violation("environment.NCCL_ALGO", value=chosen, known=", ".join(NCCL_ALGORITHMS))]


RULES = (
    error(
        id="PB531",
        title="batch-invariant mode without FlashAttention",
        setting="model.attention_backend",
        when=all_of("model.batch_invariant_mode", lambda run: not _is_flash(run)),
        message="must be flash under batch_invariant_mode, as no other attention has batch-invariant kernels",
        remedies=("set model.attention_backend=flash", "set batch_invariant_mode=False"),
        source="megatron-core 0.16.1 to 0.19.2 transformer_config.py __post_init__",
    ),
    error(
        id="PB532",
        title="batch-invariant mode without a version of FlashAttention",
        setting="model.flash_attention_version",
        versions=(mcore(since="0.19"),),
        when=all_of("model.batch_invariant_mode", lambda run: run.model.flash_attention_version not in SHARED_KERNELS),
        message="must be 3 or 4 under batch_invariant_mode, so that training and inference run one kernel",
        remedies=("set model.flash_attention_version=3", "set batch_invariant_mode=False"),
        source=_INVARIANT,
    ),
    error(
        id="PB533",
        title="batch-invariant mode with split or random attention",
        setting="model.context_parallel_size",
        versions=(mcore(since="0.19"),),
        when=all_of("model.batch_invariant_mode", find=_split_attention),
        message="batch_invariant_mode has neither context parallelism nor attention dropout",
        remedies=("set it to its default", "set batch_invariant_mode=False"),
        source=_INVARIANT,
    ),
    error(
        id="PB534",
        title="batch-invariant mode with overlapped tensor parallelism",
        setting="model.tp_comm_overlap",
        when=all_of("model.batch_invariant_mode", "model.tp_comm_overlap"),
        message="the batch-invariant GEMM refuses the user buffers that tp_comm_overlap multiplies in",
        remedies=("set it to False", "set batch_invariant_mode=False"),
        source=_GEMM,
    ),
    warning(
        id="PB535",
        title="batch-invariant mode in FP8 or FP4",
        setting="model.batch_invariant_mode",
        when=all_of("model.batch_invariant_mode", "is_low", lambda run: not _is_refused(run)),
        message="the batch-invariant GEMM takes FP16, BF16 and FP32 operands alone, and this run's are in {run.scheme}",
        remedies=("choose a recipe without FP8 and FP4", "set it to False"),
        source=_GEMM,
    ),
    error(
        id="PB536",
        title="deterministic mode with kernels that are not",
        setting="model.cross_entropy_loss_fusion",
        when=all_of("model.deterministic_mode", "not is_own", find=_unordered_kernels),
        message="is not deterministic, and Megatron's training refuses it under deterministic_mode",
        remedies=("set it to False", "set deterministic_mode=False"),
        source="Megatron-LM core_v0.16.1 to core_v0.18.2 training/arguments.py, megatron-core 0.19.2 "
        "training/determinism.py, Megatron Bridge 0.6.2 training/config.py _validate_and_apply_deterministic_mode",
    ),
    error(
        id="PB537",
        title="deterministic mode without an algorithm of NCCL",
        setting="environment.NCCL_ALGO",
        when=all_of("has_environment", "is_bridge", "model.deterministic_mode", find=_wrong_nccl),
        message="must be one of {known} under deterministic_mode, or Megatron Bridge stops at the start",
        remedies=("set NCCL_ALGO=Ring", "set deterministic_mode=False"),
        source="Megatron Bridge 0.6.2 training/config.py _validate_and_apply_deterministic_mode",
    ),
)
