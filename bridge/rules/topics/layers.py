"""First and last layers in BF16: counts that act, counts that Megatron refuses, and layers that do not listen."""

from functools import partial
from typing import Any

from bridge.precision.fields import LAYER_COUNTS
from bridge.rules.context import RuleContext
from bridge.rules.rule import MODEL_CHECK, Rule, precision_rule, sync_rule, te


def _is_on(s: RuleContext) -> bool:
    return s.model.first_last_layers_bf16 and (_kept(s) > 0)


def _kept(s: RuleContext) -> int:
    return int(s.model.num_layers_at_start_in_bf16 + s.model.num_layers_at_end_in_bf16)


def _beyond_a_stage(s: RuleContext) -> list[dict[str, Any]]:
    """Megatron's own check under FP8, stricter than what runs: counts are global, its limit is one stage's share."""
    if not s.model.first_last_layers_bf16 or s.model.num_layers < 1:
        return []
    limit = s.model.num_layers // s.pp
    return [
        {"path": name, "value": getattr(s.model, name), "limit": limit}
        for name in LAYER_COUNTS
        if getattr(s.model, name) > limit
    ]


def _beyond_the_model(s: RuleContext) -> list[dict[str, Any]]:
    if not s.model.first_last_layers_bf16 or s.model.num_layers < 1:
        return []
    return [{"path": n, "value": getattr(s.model, n)} for n in LAYER_COUNTS if getattr(s.model, n) > s.model.num_layers]


def _stated_zero(s: RuleContext) -> bool:
    on = s.is_low and s.stated.get("first_last_layers_bf16", s.model.first_last_layers_bf16)
    zero = all(s.stated.get(name, getattr(s.model, name)) == 0 for name in LAYER_COUNTS)
    return bool(on and zero and (s.precision is None or all(name in s.stated for name in LAYER_COUNTS)))


_under_fp8 = partial(Rule, gate="fp8")

RULES = (
    precision_rule(
        heading="PB261: both counts are zero",
        sync="reported",
        predicate=_stated_zero,
        error="first_last_layers_bf16: both layer counts are 0, so no layer is kept in BF16",
        remedies=("state a count above 0", "leave both unstated (Megatron keeps 1 and 1)", "set it to False"),
        verified="megatron-core 0.16.1 fp8_utils.is_first_last_bf16_layer; NVIDIA-NeMo/Megatron-Bridge "
        "training/mixed_precision.py, 2026-08-22, whose 0 and 0 switch it off",
    ),
    sync_rule(
        heading="PB262: layer counts without the switch",
        warning="num_layers_at_start_in_bf16: has no effect: {why}",
        predicate=lambda s: s.inert_and_stated(LAYER_COUNTS),
        remedies=("state first_last_layers_bf16=True", "drop it"),
        verified="megatron-core 0.16.1 fp8_utils.is_first_last_bf16_layer",
    ),
    precision_rule(
        heading="PB263: layers in BF16 under delayed scaling",
        predicate=lambda s: s.model.first_last_layers_bf16,
        error="first_last_layers_bf16: delayed scaling cannot keep layers in BF16: its FP8 context spans the whole "
        "block",
        remedies=("use fp8_recipe='tensorwise'", "set first_last_layers_bf16=False"),
        verified=f"{MODEL_CHECK}, fp8_utils.get_fp8_context",
        gate="is_delayed",
    ),
    _under_fp8(
        heading="PB264: more layers in BF16 than a pipeline stage has",
        predicate=_beyond_a_stage,
        error="num_layers_at_start_in_bf16: must be at most num_layers // pipeline stages, which is {limit}",
        remedies=("use {limit} or less", "use fewer pipeline stages"),
        verified=MODEL_CHECK,
    ),
    Rule(
        heading="PB265: more layers in BF16 than the model has",
        predicate=_beyond_the_model,
        error="num_layers_at_start_in_bf16: must be at most num_layers, which is {s.model.num_layers}; Megatron checks "
        "it under FP8 only",
        remedies=("use {s.model.num_layers} or less",),
        verified="megatron-core 0.16.1 and 0.19.2 transformer_config.py __post_init__: the check stands under `if "
        "self.fp8`",
        gate="fp4",
    ),
    Rule(
        heading="PB266: no layer left in low precision",
        predicate=lambda s: (
            s.model.first_last_layers_bf16
            and max(getattr(s.model, name) for name in LAYER_COUNTS) <= s.model.num_layers <= _kept(s)
            and s.model.num_layers > 0
        ),
        error="first_last_layers_bf16: all {s.model.num_layers} layers are kept in BF16, so nothing of this run is in "
        "{s.scheme}",
        remedies=("lower the counts", "use a deeper model", "choose a recipe without FP8 and FP4"),
        verified="megatron-core 0.16.1 fp8_utils.is_first_last_bf16_layer",
        gate="is_low",
    ),
    _under_fp8(
        heading="PB267: layers in BF16 under tensor-parallel overlap",
        needs="target",
        predicate=lambda s: _is_on(s) and s.model.tp_comm_overlap and s.tp > 1 and not s.is_emulated,
        error="model.tp_comm_overlap: user buffers hold FP8 and BF16 layers at once from Transformer Engine 2.8 on "
        "only",
        remedies=("use Transformer Engine 2.8", "set tp_comm_overlap=False", "set first_last_layers_bf16=False"),
        reported="NVIDIA/Megatron-LM issue 1703, 2025-07-24; UserBufferQuantizationMode is absent from Transformer "
        "Engine 2.7 although megatron-core 0.19.2 training/initialize.py asks for it from 2.7 on",
        versions=(te(until="2.8"),),
    ),
    _under_fp8(
        heading="PB268: multi-token prediction does not count as last layer",
        predicate=lambda s: _is_on(s) and s.has_mtp and not s.is_hybrid,
        info="first_last_layers_bf16: multi-token prediction (layers: {s.model.mtp_num_layers}) runs in FP8 whatever "
        "the counts are",
        remedies=("read the last layers as those of the decoder",),
        verified="megatron-core 0.16.1 and 0.19.2 transformer/multi_token_prediction.py: layer number -1 (0.16.1: line "
        "775, which enters the FP8 context without one)",
    ),
    sync_rule(
        heading="PB269: layers in BF16 without low precision",
        warning="first_last_layers_bf16: has no effect: {why}",
        predicate=lambda s: s.stated.get("first_last_layers_bf16") and s.inert_and_stated(["first_last_layers_bf16"]),
        remedies=("drop it", "say fp8 or fp4"),
        verified="megatron-core 0.16.1 fp8_utils.get_fp8_context",
    ),
    _under_fp8(
        heading="PB270: captured graphs ignore the layers in BF16",
        predicate=lambda s: _is_on(s) and s.model.cuda_graph_impl == "transformer_engine",
        warning="model.cuda_graph_impl: graphs captured by Transformer Engine before 2.8 run every layer in FP8",
        remedies=("use Transformer Engine 2.8", "set cuda_graph_impl=none", "set first_last_layers_bf16=False"),
        verified="megatron-core 0.19.2 transformer/cuda_graphs.py",
        versions=(te(until="2.8"),),
    ),
    Rule(
        heading="PB271: blocks of a hybrid model count as layers",
        predicate=lambda s: _is_on(s) and s.is_hybrid,
        info="first_last_layers_bf16: each Mamba, attention and MLP block counts as one of the {s.model.num_layers} "
        "layers, so the counts keep blocks, not pairs of them",
        remedies=("count blocks",),
        verified="megatron-core 0.16.1 ssm/mamba_block.py, fp8_utils.is_first_last_bf16_layer",
        gate="is_low",
    ),
)
