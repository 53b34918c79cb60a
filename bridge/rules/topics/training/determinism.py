"""Rules about runs that repeat bit for bit: `deterministic_mode` and `batch_invariant_mode`."""

from collections.abc import Iterator

from bridge.rules.context import RuleContext
from bridge.rules.rule import error, mcore, warning
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation
from bridge.target.versions import is_at_least

NCCL_ALGORITHMS = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")
FIXED_SPLIT_FLASH_VERSIONS = (3, 4)
"""Major versions of FlashAttention whose number of splits can be fixed."""
BATCH_INVARIANT_SOURCE = "megatron-core 0.19.2 transformer_config.py __post_init__"
GEMM_SOURCE = (
    "megatron-core 0.16.1 and 0.19.2 transformer/custom_layers/batch_invariant_kernels.py "
    "_te_general_gemm_patched"
)
TRAINING_SOURCE = (
    "Megatron-LM core_v0.16.1 to core_v0.18.2 training/arguments.py; megatron-core 0.19.2 "
    "training/determinism.py; Megatron Bridge 0.6.2 training/config.py "
    "_validate_and_apply_deterministic_mode"
)


def is_flash_attention(context: RuleContext) -> bool:
    """Return whether the attention backend is FlashAttention, by enum member or by name."""
    stated = context.model.attention_backend
    name = str(getattr(stated, "name", stated))
    return name.rpartition(".")[2].lower() == "flash"


def find_split_or_random_attention(context: RuleContext) -> Iterator[Violation]:
    """Yield context parallelism and attention dropout under batch-invariant mode."""
    if not context.model.batch_invariant_mode:
        return
    if (context.model.context_parallel_size or 1) > 1:
        yield Violation("model.context_parallel_size")
    if context.model.attention_dropout:
        yield Violation("model.attention_dropout")


def is_batch_invariant_in_low_precision(context: RuleContext) -> bool:
    """Return whether batch-invariant GEMMs are in FP8 or FP4.

    Experts are left out: Megatron refuses them, and PB432 reports them.
    """
    is_refused = (
        bool(context.model.num_moe_experts) and is_at_least(context.target.mcore, "0.20") is True
    )
    return bool(context.model.batch_invariant_mode) and context.is_low_precision and not is_refused


def find_nondeterministic_kernels(context: RunContext) -> Iterator[Violation]:
    """Yield the kernels that Megatron's training refuses under deterministic mode."""
    if not context.model.deterministic_mode or context.program.is_train_script:
        return
    if context.model.cross_entropy_loss_fusion:
        yield Violation("model.cross_entropy_loss_fusion")
    if context.model.tp_comm_overlap and is_at_least(context.target.mcore, "0.19") is True:
        yield Violation("model.tp_comm_overlap")


def find_refused_nccl_algorithm(context: RunContext) -> Violation | None:
    """Return a violation if Megatron Bridge refuses NCCL's algorithm in deterministic mode."""
    if not (
        context.has_environment
        and context.program.is_megatron_bridge
        and context.model.deterministic_mode
    ):
        return None
    chosen = context.environment.get("NCCL_ALGO")
    if chosen not in NCCL_ALGORITHMS:
        return Violation(value=chosen, known=", ".join(NCCL_ALGORITHMS))
    return None


RULES = (
    error(
        id="PB531",
        title="batch-invariant mode without FlashAttention",
        setting="model.attention_backend",
        when=lambda context: context.model.batch_invariant_mode and not is_flash_attention(context),
        message="must be flash under batch_invariant_mode, as no other attention has batch-invariant kernels",
        remedies=("set model.attention_backend=flash", "set batch_invariant_mode=False"),
        source="megatron-core 0.16.1 to 0.19.2 transformer_config.py __post_init__",
    ),
    error(
        id="PB532",
        title="batch-invariant mode without a version of FlashAttention",
        setting="model.flash_attention_version",
        versions=(mcore(since="0.19"),),
        when=lambda context: (
            context.model.batch_invariant_mode
            and context.model.flash_attention_version not in FIXED_SPLIT_FLASH_VERSIONS
        ),
        message="must be 3 or 4 under batch_invariant_mode, so that training and inference run one kernel",
        remedies=("set model.flash_attention_version=3", "set batch_invariant_mode=False"),
        source=BATCH_INVARIANT_SOURCE,
    ),
    error(
        id="PB533",
        title="batch-invariant mode with split or random attention",
        setting="model.context_parallel_size",
        versions=(mcore(since="0.19"),),
        when=find_split_or_random_attention,
        message="batch_invariant_mode has neither context parallelism nor attention dropout",
        remedies=("set it to its default", "set batch_invariant_mode=False"),
        source=BATCH_INVARIANT_SOURCE,
    ),
    error(
        id="PB534",
        title="batch-invariant mode with overlapped tensor parallelism",
        setting="model.tp_comm_overlap",
        when=lambda context: context.model.batch_invariant_mode and context.model.tp_comm_overlap,
        message="the batch-invariant GEMM refuses the user buffers that tp_comm_overlap multiplies in",
        remedies=("set it to False", "set batch_invariant_mode=False"),
        source=GEMM_SOURCE,
    ),
    warning(
        id="PB535",
        title="batch-invariant mode in FP8 or FP4",
        setting="model.batch_invariant_mode",
        when=is_batch_invariant_in_low_precision,
        message="the batch-invariant GEMM takes FP16, BF16 and FP32 operands alone, and this run's are in {run.scheme}",
        remedies=("choose a recipe without FP8 and FP4", "set it to False"),
        source=GEMM_SOURCE,
    ),
    error(
        id="PB536",
        title="deterministic mode with kernels that are not",
        setting="model.cross_entropy_loss_fusion",
        when=find_nondeterministic_kernels,
        message="is not deterministic, and Megatron's training refuses it under deterministic_mode",
        remedies=("set it to False", "set deterministic_mode=False"),
        source=TRAINING_SOURCE,
    ),
    error(
        id="PB537",
        title="deterministic mode without an algorithm of NCCL",
        setting="environment.NCCL_ALGO",
        when=find_refused_nccl_algorithm,
        message="must be one of {known} under deterministic_mode, or Megatron Bridge stops at the start",
        remedies=("set NCCL_ALGO=Ring", "set deterministic_mode=False"),
        source="Megatron Bridge 0.6.2 training/config.py _validate_and_apply_deterministic_mode",
    ),
)
