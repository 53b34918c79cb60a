"""First and last layers in BF16: counts that act, counts that Megatron refuses, and layers that do not listen."""

from bridge.errors import RunConfigError
from bridge.precision.fields import LAYER_COUNTS
from bridge.rules.context import RuleContext
from bridge.rules.rule import MODEL_CHECK, contradiction, error, info, no_effect, te, warning
from bridge.rules.violation import Violation, all_of, without_effect
from bridge.target.fields import DEFAULTS

_MEGATRON_COUNTS = {name: DEFAULTS["model"][name] for name in LAYER_COUNTS}


def _is_on(run: RuleContext) -> bool:
    return run.model.first_last_layers_bf16 and (_kept(run) > 0)


def _kept(run: RuleContext) -> int:
    return int(run.model.num_layers_at_start_in_bf16 + run.model.num_layers_at_end_in_bf16)


def _beyond(run: RuleContext, limit: int) -> list[Violation]:
    if run.model.num_layers < 1:
        return []
    counts = {name: getattr(run.model, name) for name in LAYER_COUNTS}
    return [Violation(name, value=count, limit=limit) for name, count in counts.items() if count > limit]


def _unread_counts(run: RuleContext) -> list[Violation]:
    """Return the first of the counts that act on nothing; Megatron's own are what a saved config has anyway."""
    is_default = all(run.stated.get(name, count) == count for name, count in _MEGATRON_COUNTS.items())
    switch, severity = "state first_last_layers_bf16=True" if run.is_low else "", "info" if is_default else None
    found = without_effect(run, LAYER_COUNTS)[:1]
    return [Violation(one.path, severity=severity, **one.words, switch=switch) for one in found]


def _stated_zero(run: RuleContext) -> bool:
    on = run.is_low and run.stated.get("first_last_layers_bf16", run.model.first_last_layers_bf16)
    zero = all(run.stated.get(name, getattr(run.model, name)) == 0 for name in LAYER_COUNTS)
    return bool(on and zero and (run.precision is None or all(name in run.stated for name in LAYER_COUNTS)))


def _low_prediction(run: RuleContext) -> list[Violation]:
    """Return the linear layers of multi-token prediction that compute in FP8 or FP4."""
    try:
        layers = [layer for layer in run.plan.layers if layer.is_mtp]
    except RunConfigError:  # PB619 names it
        return []
    linears = [module for layer in layers for module in layer.modules if module.kind == "linear"]
    schemes = [module.scheme for module in linears if module.scheme is not None]
    if not schemes:
        return []
    named = " and ".join(dict.fromkeys(schemes))
    return [Violation(low=len(schemes), linears=len(linears), schemes=named)]


RULES = (
    contradiction(
        id="PB261",
        title="both counts are zero",
        setting="first_last_layers_bf16",
        sync="reported",
        when=all_of(_stated_zero),
        message="both layer counts are 0, so no layer is kept in BF16",
        remedies=("state a count above 0", "leave both unstated (Megatron keeps 1 and 1)", "set it to False"),
        source="megatron-core 0.16.1 fp8_utils.is_first_last_bf16_layer; NVIDIA-NeMo/Megatron-Bridge "
        "training/mixed_precision.py, 2026-08-22, whose 0 and 0 switch it off",
    ),
    no_effect(
        id="PB262",
        title="layer counts without the switch",
        setting="num_layers_at_start_in_bf16",
        when=_unread_counts,
        message="has no effect: {why}",
        remedies=("{switch}", "drop it"),
        source="megatron-core 0.16.1 fp8_utils.is_first_last_bf16_layer",
    ),
    contradiction(
        id="PB263",
        title="layers in BF16 under delayed scaling",
        setting="first_last_layers_bf16",
        when=all_of("scheme is delayed", "model.first_last_layers_bf16"),
        message="delayed scaling cannot keep layers in BF16: its FP8 context spans the whole block",
        remedies=("use fp8_recipe='tensorwise'", "set first_last_layers_bf16=False"),
        source=f"{MODEL_CHECK}, fp8_utils.get_fp8_context",
    ),
    error(
        id="PB264",
        title="more layers in BF16 than a pipeline stage has",
        setting="num_layers_at_start_in_bf16",
        # Megatron's own check under FP8, stricter than what runs: counts are global, its limit is one stage's share.
        when=all_of(
            *("fp8", "model.first_last_layers_bf16"),
            find=lambda run: _beyond(run, run.model.num_layers // run.parallel.pipeline),
        ),
        message="must be at most num_layers // pipeline stages, which is {limit}",
        remedies=("use {limit} or less", "use fewer pipeline stages"),
        source=MODEL_CHECK,
    ),
    error(
        id="PB265",
        title="more layers in BF16 than the model has",
        setting="num_layers_at_start_in_bf16",
        when=all_of("fp4", "model.first_last_layers_bf16", find=lambda run: _beyond(run, run.model.num_layers)),
        message="must be at most num_layers, which is {limit}; Megatron checks it under FP8 only",
        remedies=("use {limit} or less",),
        source="megatron-core 0.16.1 and 0.19.2 transformer_config.py __post_init__: the check stands under `if "
        "self.fp8`",
    ),
    error(
        id="PB266",
        title="no layer left in low precision",
        setting="first_last_layers_bf16",
        sync="reported",
        when=all_of(
            *("is_low", "model.first_last_layers_bf16", lambda run: run.model.num_layers > 0),
            lambda run: max(getattr(run.model, name) for name in LAYER_COUNTS) <= run.model.num_layers <= _kept(run),
        ),
        message="all {run.model.num_layers} layers are kept in BF16, so nothing of this run is in {run.scheme}",
        remedies=("lower the counts", "use a deeper model", "choose a recipe without FP8 and FP4"),
        source="megatron-core 0.16.1 fp8_utils.is_first_last_bf16_layer",
    ),
    error(
        id="PB267",
        title="layers in BF16 under tensor-parallel overlap",
        setting="model.tp_comm_overlap",
        versions=(te(until="2.8"),),
        when=all_of("fp8", _is_on, "model.tp_comm_overlap", lambda run: run.parallel.tensor > 1, "not is_emulated"),
        message="user buffers hold FP8 and BF16 layers at once from Transformer Engine 2.8 on only",
        remedies=("use Transformer Engine 2.8", "set tp_comm_overlap=False", "set first_last_layers_bf16=False"),
        source="NVIDIA/Megatron-LM issue 1703, 2025-07-24; UserBufferQuantizationMode is absent from Transformer "
        "Engine 2.7 although megatron-core 0.19.2 training/initialize.py asks for it from 2.7 on",
        evidence="reported",
    ),
    info(
        id="PB268",
        title="multi-token prediction does not count as last layer",
        setting="first_last_layers_bf16",
        when=all_of("fp8", _is_on, "shape.has_mtp", "not shape.is_hybrid"),
        message="multi-token prediction (layers: {run.model.mtp_num_layers}) runs in FP8 whatever the counts are",
        remedies=("read the last layers as those of the decoder",),
        source="megatron-core 0.16.1 and 0.19.2 transformer/multi_token_prediction.py: layer number -1 (0.16.1: line "
        "775, which enters the FP8 context without one)",
    ),
    no_effect(
        id="PB269",
        title="layers in BF16 without low precision",
        setting="first_last_layers_bf16",
        when=all_of(
            lambda run: run.stated.get("first_last_layers_bf16"),
            find=lambda run: without_effect(run, ["first_last_layers_bf16"]),
        ),
        message="has no effect: {why}",
        remedies=("drop it", "say fp8 or fp4"),
        source="megatron-core 0.16.1 fp8_utils.get_fp8_context",
    ),
    warning(
        id="PB270",
        title="captured graphs ignore the layers in BF16",
        setting="model.cuda_graph_impl",
        versions=(te(until="2.8"),),
        when=all_of("fp8", _is_on, "model.cuda_graph_impl is transformer_engine"),
        message="graphs captured by Transformer Engine before 2.8 run every layer in FP8",
        remedies=("use Transformer Engine 2.8", "set cuda_graph_impl=none", "set first_last_layers_bf16=False"),
        source="megatron-core 0.19.2 transformer/cuda_graphs.py",
    ),
    info(
        id="PB271",
        title="blocks of a hybrid model count as layers",
        setting="first_last_layers_bf16",
        when=all_of("is_low", _is_on, "shape.is_hybrid"),
        message="each Mamba, attention and MLP block counts as one of the {run.model.num_layers} layers, so the "
        "counts keep blocks, not pairs of them",
        remedies=("count blocks",),
        source="megatron-core 0.16.1 ssm/mamba_block.py, fp8_utils.is_first_last_bf16_layer",
    ),
    warning(
        id="PB272",
        title="prediction layers that nothing keeps in BF16",
        setting="model.keep_mtp_spec_in_bf16",
        when=all_of("is_whole", "is_low", "model.keep_mtp_spec_in_bf16", find=_low_prediction),
        message="has no effect: neither Megatron Bridge nor Megatron Core reads it, and {low} of the {linears} linear "
        "layers of multi-token prediction compute in {schemes}",
        remedies=(
            'state mixed_precision.modules=[{{select:"mtp.*",precision:bf16}}]',
            'give model.quant_recipe a matcher of "mtp.*" in a run of Megatron Bridge',
            "accept it, and set model.keep_mtp_spec_in_bf16=False",
        ),
        source="NVIDIA-NeMo/Megatron-Bridge of 2026-08-22 models/hybrid/hybrid_provider.py:167, which declares it, "
        "nemotronh/nemotron_h_bridge.py:328 and recipes, which set it; megatron-core 0.16.1 to Megatron-LM main of "
        "2026-08-22 transformer/multi_token_prediction.py: the FP8 context of every prediction layer",
    ),
)
