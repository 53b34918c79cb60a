"""Rules about first and last layers in BF16: counts without effect, and refused counts."""

from collections.abc import Iterator

from bridge.precision.stated_field import LAYER_COUNTS
from bridge.rules.context import RuleContext
from bridge.rules.inert_field_violation import find_fields_without_effect
from bridge.rules.rule import (
    MODEL_CHECK_SOURCE,
    contradiction,
    error,
    info,
    no_effect,
    sync_error,
    te,
    warning,
)
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation
from bridge.target.fields import OWNER_DEFAULTS


def _keeps_layers(context: RuleContext) -> bool:
    """Return whether layers are kept in BF16."""
    return context.model.first_last_layers_bf16 and _count_kept_layers(context) > 0


def _count_kept_layers(context: RuleContext) -> int:
    return context.model.num_layers_at_start_in_bf16 + context.model.num_layers_at_end_in_bf16


def has_two_zero_counts(context: RuleContext) -> bool:
    """Return whether layers are kept in BF16 although both counts are 0.

    In a recipe both counts must be stated: unstated counts have Megatron's defaults.
    """
    if not context.is_low_precision:
        return False
    if not context.stated.get("first_last_layers_bf16", context.model.first_last_layers_bf16):
        return False
    for name in LAYER_COUNTS:
        if context.stated.get(name, getattr(context.model, name)) != 0:
            return False
        if context.precision is not None and name not in context.stated:
            return False
    return True


def find_count_without_effect(context: RuleContext) -> Iterator[Violation]:
    """Yield the first count without effect.

    A count at Megatron's default is an info, because saved configs always state it.
    """
    severity: str | None = "info"
    for name in LAYER_COUNTS:
        default = OWNER_DEFAULTS["model"][name]
        if context.stated.get(name, default) != default:
            severity = None
    switch = ""
    if context.is_low_precision:
        switch = "state first_last_layers_bf16=True"
    for violation in find_fields_without_effect(context, LAYER_COUNTS):
        yield Violation(
            violation.path, severity=severity, why=violation.words["why"], switch=switch
        )
        return


def find_counts_beyond_stage(context: RunContext) -> Iterator[Violation]:
    """Yield the counts that are larger than the number of layers of a pipeline stage.

    This is Megatron's check under FP8. It is stricter than needed, because the counts are about the
    whole model.
    """
    if context.is_fp8 and context.model.first_last_layers_bf16:
        yield from _find_counts_beyond(
            context, context.model.num_layers // context.parallel.pipeline
        )


def find_counts_beyond_model(context: RunContext) -> Iterator[Violation]:
    """Yield the counts that are larger than the number of layers of a model in FP4."""
    if context.is_fp4 and context.model.first_last_layers_bf16:
        yield from _find_counts_beyond(context, context.model.num_layers)


def _find_counts_beyond(context: RuleContext, limit: int) -> Iterator[Violation]:
    if context.model.num_layers < 1:
        return
    for name in LAYER_COUNTS:
        count = getattr(context.model, name)
        if count > limit:
            yield Violation(name, value=count, limit=limit)


def keeps_all_layers_in_bf16(context: RuleContext) -> bool:
    """Return whether two possible counts together keep all layers in BF16."""
    if (
        not context.is_low_precision
        or not context.model.first_last_layers_bf16
        or context.model.num_layers <= 0
    ):
        return False
    most = max(context.model.num_layers_at_start_in_bf16, context.model.num_layers_at_end_in_bf16)
    return most <= context.model.num_layers <= _count_kept_layers(context)


def find_switch_without_effect(context: RuleContext) -> Iterator[Violation]:
    """Yield the switch of layers in BF16 in a run without low precision."""
    if context.stated.get("first_last_layers_bf16"):
        yield from find_fields_without_effect(context, ["first_last_layers_bf16"])


def find_mtp_layers_in_low_precision(context: RunContext) -> Violation | None:
    """Return a violation if linear layers of multi-token prediction compute in FP8 or FP4."""
    if not context.is_low_precision or not context.model.keep_mtp_spec_in_bf16:
        return None
    linears = context.mtp_schemes
    schemes = [scheme for scheme in linears if scheme is not None]
    if schemes:
        named = " and ".join(dict.fromkeys(schemes))
        return Violation(low=len(schemes), linears=len(linears), schemes=named)
    return None


RULES = (
    contradiction(
        id="PB261",
        title="both counts are zero",
        setting="first_last_layers_bf16",
        sync="reported",
        when=has_two_zero_counts,
        message="both layer counts are 0, so no layer is kept in BF16",
        remedies=(
            "state a count above 0",
            "leave both unstated (Megatron keeps 1 and 1)",
            "set it to False",
        ),
        source="megatron-core 0.16.1 fp8_utils.is_first_last_bf16_layer; "
        "NVIDIA-NeMo/Megatron-Bridge training/mixed_precision.py, 2026-08-22, whose "
        "0 and 0 switch it off",
    ),
    no_effect(
        id="PB262",
        title="layer counts without the switch",
        setting="num_layers_at_start_in_bf16",
        when=find_count_without_effect,
        message="has no effect: {why}",
        remedies=("{switch}", "drop it"),
        source="megatron-core 0.16.1 fp8_utils.is_first_last_bf16_layer",
    ),
    contradiction(
        id="PB263",
        title="layers in BF16 under delayed scaling",
        setting="first_last_layers_bf16",
        when=lambda context: context.is_delayed and context.model.first_last_layers_bf16,
        message="delayed scaling cannot keep layers in BF16: its FP8 context spans the whole block",
        remedies=("use fp8_recipe='tensorwise'", "set first_last_layers_bf16=False"),
        source=f"{MODEL_CHECK_SOURCE}, fp8_utils.get_fp8_context",
    ),
    error(
        id="PB264",
        title="more layers in BF16 than a pipeline stage has",
        setting="num_layers_at_start_in_bf16",
        when=find_counts_beyond_stage,
        message="must be at most num_layers // pipeline stages, which is {limit}",
        remedies=("use {limit} or less", "use fewer pipeline stages"),
        source=MODEL_CHECK_SOURCE,
    ),
    error(
        id="PB265",
        title="more layers in BF16 than the model has",
        setting="num_layers_at_start_in_bf16",
        when=find_counts_beyond_model,
        message="must be at most num_layers, which is {limit}; Megatron checks it under FP8 only",
        remedies=("use {limit} or less",),
        source="megatron-core 0.16.1 and 0.19.2 transformer_config.py __post_init__: the check "
        "stands under `if self.fp8`",
    ),
    sync_error(
        id="PB266",
        title="no layer left in low precision",
        setting="first_last_layers_bf16",
        sync="reported",
        when=keeps_all_layers_in_bf16,
        message="all {run.model.num_layers} layers are kept in BF16, so nothing of "
        "this run is in {run.scheme}",
        remedies=("lower the counts", "use a deeper model", "choose a recipe without FP8 and FP4"),
        source="megatron-core 0.16.1 fp8_utils.is_first_last_bf16_layer",
    ),
    error(
        id="PB267",
        title="layers in BF16 under tensor-parallel overlap",
        setting="model.tp_comm_overlap",
        versions=(te(until="2.8"),),
        when=lambda context: (
            context.is_fp8
            and _keeps_layers(context)
            and context.model.tp_comm_overlap
            and context.parallel.tensor > 1
            and not context.is_emulated
        ),
        message="user buffers hold FP8 and BF16 layers at once from Transformer Engine 2.8 on only",
        remedies=(
            "use Transformer Engine 2.8",
            "set tp_comm_overlap=False",
            "set first_last_layers_bf16=False",
        ),
        source="NVIDIA/Megatron-LM issue 1703, 2025-07-24; UserBufferQuantizationMode is absent "
        "from Transformer Engine 2.7 although megatron-core 0.19.2 training/initialize.py asks "
        "for it from 2.7 on",
        evidence="reported",
    ),
    info(
        id="PB268",
        title="multi-token prediction does not count as last layer",
        setting="first_last_layers_bf16",
        when=lambda context: (
            context.is_fp8
            and _keeps_layers(context)
            and context.shape.has_mtp
            and not context.shape.is_hybrid
        ),
        message="multi-token prediction (layers: {run.model.mtp_num_layers}) runs in "
        "FP8 whatever the counts are",
        remedies=("read the last layers as those of the decoder",),
        source="megatron-core 0.16.1 and 0.19.2 transformer/multi_token_prediction.py: layer "
        "number -1 (0.16.1: line 775, which enters the FP8 context without one)",
    ),
    no_effect(
        id="PB269",
        title="layers in BF16 without low precision",
        setting="first_last_layers_bf16",
        when=find_switch_without_effect,
        message="has no effect: {why}",
        remedies=("drop it", "state fp8 or fp4"),
        source="megatron-core 0.16.1 fp8_utils.get_fp8_context",
    ),
    warning(
        id="PB270",
        title="captured graphs ignore the layers in BF16",
        setting="model.cuda_graph_impl",
        versions=(te(until="2.8"),),
        when=lambda context: (
            context.is_fp8
            and _keeps_layers(context)
            and context.model.cuda_graph_impl == "transformer_engine"
        ),
        message="graphs captured by Transformer Engine before 2.8 run every layer in FP8",
        remedies=(
            "use Transformer Engine 2.8",
            "set cuda_graph_impl=none",
            "set first_last_layers_bf16=False",
        ),
        source="megatron-core 0.19.2 transformer/cuda_graphs.py",
    ),
    info(
        id="PB271",
        title="blocks of a hybrid model count as layers",
        setting="first_last_layers_bf16",
        when=lambda context: (
            context.is_low_precision and _keeps_layers(context) and context.shape.is_hybrid
        ),
        message="each Mamba, attention and MLP block counts as one of the {run.model.num_layers} "
        "layers, so the counts keep blocks, not pairs of them",
        remedies=("count blocks",),
        source="megatron-core 0.16.1 ssm/mamba_block.py, fp8_utils.is_first_last_bf16_layer",
    ),
    warning(
        id="PB272",
        title="prediction layers that nothing keeps in BF16",
        setting="model.keep_mtp_spec_in_bf16",
        when=find_mtp_layers_in_low_precision,
        message="has no effect: neither Megatron Bridge nor Megatron Core reads it, and {low} of "
        "the {linears} linear layers of multi-token prediction compute in {schemes}",
        remedies=(
            'state mixed_precision.modules=[{{select:"mtp.*",precision:bf16}}]',
            'give model.quant_recipe a matcher of "mtp.*" in a run of Megatron Bridge',
            "accept it, and set model.keep_mtp_spec_in_bf16=False",
        ),
        source="NVIDIA-NeMo/Megatron-Bridge of 2026-08-22 models/hybrid/hybrid_provider.py:167, "
        "which declares it, nemotronh/nemotron_h_bridge.py:328 and recipes, which set it; "
        "megatron-core 0.16.1 to Megatron-LM main of 2026-08-22 "
        "transformer/multi_token_prediction.py: the FP8 context of every prediction layer",
    ),
)
