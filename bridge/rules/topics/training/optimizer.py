"""Rules about the dtypes of the optimizer, and the settings that they can be combined with."""

from collections.abc import Iterator

from bridge.precision.precision_config import FIELD_CHOICES
from bridge.rules.context import RuleContext
from bridge.rules.rule import (
    OPTIMIZER_CHECK_SOURCE,
    PARSER_SOURCE,
    error,
    info,
    no_effect,
    sync_error,
    sync_warning,
    warning,
)
from bridge.rules.run_context import RunContext
from bridge.rules.violation import Violation
from bridge.target.fields import FUSED_ADAM_RECIPES

_STATE_DTYPE_FIELDS = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_DTYPE_FIELDS = ("main_grads_dtype", *_STATE_DTYPE_FIELDS)


def find_states_without_precision_aware(context: RuleContext) -> Iterator[Violation]:
    """Yield the state dtypes that need the precision-aware optimizer, if it is off."""
    if not context.has_optimizer or context.has_precision_aware_optimizer:
        return
    for name in _DTYPE_FIELDS:
        if getattr(context.optimizer, name) not in ("fp32", None):
            yield Violation(f"optimizer.{name}")


def find_offload_not_precision_aware(context: RunContext) -> Violation | None:
    """Return a violation if an offloaded optimizer is not precision-aware."""
    is_offloaded = context.has_optimizer and context.optimizer.optimizer_cpu_offload
    if is_offloaded and not context.has_precision_aware_optimizer:
        return Violation(severity=_get_parser_severity(context))
    return None


def find_offload_with_fp8_weights(context: RunContext) -> Violation | None:
    """Return a violation if the optimizer of weights stored in FP8 is offloaded, unless delayed."""
    if context.gathers_fp8 and context.optimizer.optimizer_cpu_offload and not context.is_delayed:
        return Violation(severity=_get_parser_severity(context))
    return None


def _get_parser_severity(context: RunContext) -> str | None:
    """Return "warning" if Megatron-LM's parser does not check the run. None: the rule's severity.

    Without this parser nothing refuses the setting.

    Source: Megatron Core 0.19.2, optimizer/__init__.py and optimizer_config.py; Megatron Bridge
    0.6.2, training/config.py, ConfigContainer.validate.
    """
    if context.program.has_argument_parser:
        return None
    return "warning"


def find_unread_states(context: RuleContext) -> Iterator[Violation]:
    """Yield the state dtypes that an offloaded optimizer does not read."""
    if not context.has_precision_aware_optimizer or not context.optimizer.optimizer_cpu_offload:
        return
    for name in _STATE_DTYPE_FIELDS:
        if getattr(context.optimizer, name) not in ("fp32", None):
            yield Violation(f"optimizer.{name}")


def find_impossible_states(context: RuleContext) -> Iterator[Violation]:
    """Yield the dtypes in the optimizer config that no optimizer has."""
    if not context.has_precision_aware_optimizer:
        return
    for name in _DTYPE_FIELDS:
        if name in context.stated:
            continue
        if getattr(context.optimizer, name) not in (*FIELD_CHOICES[name], None):
            legal = ", ".join(FIELD_CHOICES[name]).replace("uint8", "fp8")
            yield Violation(f"optimizer.{name}", legal=legal)


def _leaves_fused_path(context: RuleContext) -> bool:
    """Return whether Megatron keeps the FP32 masters of the precision-aware optimizer itself."""
    return (
        context.optimizer.fp8_recipe not in FUSED_ADAM_RECIPES
        and not context.has_megatron_fsdp
        and context.optimizer.main_params_dtype == "fp32"
        and not context.optimizer.optimizer_cpu_offload
    )


def find_masters_outside_fused_adam(context: RunContext) -> Violation | None:
    """Return a violation if the optimizer config has an FP8 scheme in a run without FP8.

    Megatron Bridge writes it in every mode. There, nobody chose it, so the finding is an info.
    """
    if (
        not context.has_precision_aware_optimizer
        or context.is_fp8
        or not _leaves_fused_path(context)
    ):
        return None
    if context.is_fp4 and context.gathers_fp4:
        return None
    instead = ""
    if context.is_bf16 and context.optimizer.store_param_remainders:
        instead = ", not 2 bytes of remainders"
    if context.program.is_megatron_bridge:
        return Violation(name="mixed_precision.fp8_recipe", instead=instead, severity="info")
    return Violation(name="optimizer.fp8_recipe", instead=instead)


def find_masters_in_blocks(context: RuleContext) -> Violation | None:
    """Return a violation if the fused Adam would keep the masters of blockwise weights."""
    if not context.has_precision_aware_optimizer or context.has_megatron_fsdp:
        return None
    optimizer = context.optimizer
    if context.is_fp4 and context.gathers_fp4:
        words = {"family": "FP4", "setting": "fp4_param_gather=False"}
    elif context.is_fp8 and context.gathers_fp8 and not context.is_delayed:
        words = {"family": "FP8", "setting": "fp8_param_gather=False"}
    else:
        return None
    is_fp4 = words["family"] == "FP4"
    if optimizer.optimizer_cpu_offload:
        if is_fp4:  # PB342 is about FP8
            remedy = "keep the optimizer on the GPU"
            return Violation("optimizer.optimizer_cpu_offload", remedy=remedy, **words)
    elif optimizer.main_params_dtype != "fp32":
        remedy = "set main_params_dtype=fp32"
        return Violation("optimizer.main_params_dtype", remedy=remedy, **words)
    elif is_fp4 and optimizer.fp8_recipe in FUSED_ADAM_RECIPES:
        remedy = "set optimizer.fp8_recipe=tensorwise (--fp8-recipe of Megatron-LM)"
        if isinstance(context, RunContext) and context.program.is_megatron_bridge:
            remedy = "set mixed_precision.fp8_recipe=tensorwise"
        return Violation("optimizer.fp8_recipe", remedy=remedy, **words)
    return None


def find_remainders_without_effect(context: RuleContext) -> Violation | None:
    """Return a violation if no optimizer keeps the param remainders, with the reason."""
    if not context.differs_from_default("store_param_remainders") or not context.has_optimizer:
        return None
    if not context.has_precision_aware_optimizer:
        return Violation(why="the optimizer is not precision-aware")
    masters = context.optimizer.main_params_dtype
    if masters != "fp32":
        return Violation(why=f"the master weights are {masters}, not fp32")
    if not context.is_bf16:
        return Violation(why=f"the weights are {context.mode}, not bf16")
    return None


def find_gather_inside_step(context: RuleContext) -> Violation | None:
    """Return a violation if parameters are gathered inside the step without its conditions.

    Without overlap_param_gather, the optimizer gathers the first chunk after its step. The result
    is correct, so the violation is a warning.
    """
    if not context.has_optimizer or not context.optimizer.overlap_param_gather_with_optimizer_step:
        return None
    if not context.is_sharded or not context.model.virtual_pipeline_model_parallel_size:
        return Violation()
    if not context.optimizer.overlap_param_gather:
        return Violation(severity="warning")
    return None


RULES = (
    error(
        id="PB341",
        title="offloaded optimizer that is not precision-aware",
        setting="optimizer.optimizer_cpu_offload",
        when=find_offload_not_precision_aware,
        message="an offloaded optimizer reuses the code of the precision-aware one",
        remedies=(
            "set optimizer.use_precision_aware_optimizer=True",
            "keep the optimizer on the GPU",
        ),
        source=PARSER_SOURCE,
    ),
    error(
        id="PB342",
        title="offloaded optimizer with FP8 weights",
        setting="optimizer.optimizer_cpu_offload",
        when=find_offload_with_fp8_weights,
        message="an offloaded optimizer updates FP8 weights under delayed scaling only",
        remedies=(
            "set fp8_param_gather=False",
            "use fp8_recipe='delayed'",
            "keep the optimizer on the GPU",
        ),
        source=f"{PARSER_SOURCE}; NVIDIA/Megatron-LM issue 2582, 2025-12-07, for the two messages that "
        f"contradict each other",
    ),
    error(
        id="PB343",
        title="optimizer state dtype without the precision-aware optimizer",
        setting="optimizer.exp_avg_dtype",
        when=find_states_without_precision_aware,
        message="must be fp32 unless optimizer.use_precision_aware_optimizer is on",
        remedies=("set use_precision_aware_optimizer=True", "leave it at fp32"),
        source=OPTIMIZER_CHECK_SOURCE,
    ),
    error(
        id="PB344",
        title="impossible optimizer state dtype",
        setting="optimizer.exp_avg_dtype",
        when=find_impossible_states,
        message="must be one of {legal}",
        remedies=("use one of them",),
        source="Megatron-LM training/arguments.py, 0.19.2: choices of the argument parser",
    ),
    error(
        id="PB345",
        title="precision-aware optimizer that is not Adam",
        setting="optimizer.optimizer",
        when=lambda context: (
            context.has_precision_aware_optimizer and context.optimizer.optimizer != "adam"
        ),
        message="only Adam is precision-aware",
        remedies=("use adam", "set use_precision_aware_optimizer=False"),
        source=OPTIMIZER_CHECK_SOURCE,
    ),
    error(
        id="PB346",
        title="precision-aware optimizer that is not distributed",
        setting="optimizer.use_distributed_optimizer",
        when=lambda context: (
            context.has_precision_aware_optimizer
            and not context.optimizer.use_distributed_optimizer
            and not context.has_megatron_fsdp
        ),
        message="the precision-aware optimizer works as a distributed optimizer only",
        remedies=("set use_distributed_optimizer=True", "set use_precision_aware_optimizer=False"),
        source=f"{OPTIMIZER_CHECK_SOURCE}; from 0.20 on refused when the optimizer is built",
    ),
    warning(
        id="PB347",
        title="FP8 branch in a run without FP8",
        setting="optimizer.fp8_recipe",
        when=find_masters_outside_fused_adam,
        message="sends the precision-aware optimizer down its FP8 branch although fp8 is off: "
        "Megatron keeps FP32 masters (4 bytes a parameter{instead}) and casts gradients to FP32",
        remedies=("set {name}=null", "keep it for FP32 masters"),
        source="megatron-core 0.16.1 and 0.19.2 optimizer_config.py __post_init__; Megatron "
        "Bridge's MixedPrecisionConfig.setup writes 'tensorwise' here in every mode, 2026-08-22",
    ),
    info(
        id="PB348",
        title="precision-aware optimizer together with FP8 scaling",
        setting="optimizer.use_precision_aware_optimizer",
        when=lambda context: (
            context.has_precision_aware_optimizer and context.is_fp8 and _leaves_fused_path(context)
        ),
        message="under {run.scheme} scaling Megatron keeps the FP32 masters itself and casts "
        "gradients to FP32, so BF16 main gradients and param remainders save nothing; the "
        "moments' dtypes still do",
        remedies=(
            "keep it for exp_avg_dtype and exp_avg_sq_dtype",
            "use fp8_recipe='delayed' for the fused path",
        ),
        source="megatron-core 0.16.1 and 0.19.2 optimizer_config.py __post_init__, "
        "distrib_optimizer.py",
    ),
    error(
        id="PB350",
        title="precision-aware optimizer without Transformer Engine",
        setting="optimizer.use_precision_aware_optimizer",
        when=lambda context: (
            context.has_precision_aware_optimizer
            and context.target.has_te is False
            and not context.optimizer.optimizer_cpu_offload
        ),
        message="needs Transformer Engine's FusedAdam, and the target has no Transformer Engine",
        remedies=("install Transformer Engine", "set use_precision_aware_optimizer=False"),
        source=OPTIMIZER_CHECK_SOURCE,
    ),
    error(
        id="PB351",
        title="gathering inside the step without its conditions",
        setting="optimizer.overlap_param_gather_with_optimizer_step",
        when=find_gather_inside_step,
        message="needs the distributed optimizer, overlap_param_gather and "
        "interleaved pipeline stages",
        remedies=("set it to False", "set these three"),
        source=f"{PARSER_SOURCE}; Megatron-LM main of 2026-08-22 optimizer/optimizer.py:1672, which "
        f"gathers "
        "without overlap where overlap_param_gather is off",
    ),
    error(
        id="PB352",
        title="precision-aware optimizer by layers",
        setting="optimizer.use_layer_wise_distributed_optimizer",
        when=lambda context: (
            context.has_precision_aware_optimizer
            and context.optimizer.use_layer_wise_distributed_optimizer
        ),
        message="the layer-wise distributed optimizer cannot be precision-aware",
        remedies=("set one of the two to False",),
        source="Megatron-LM main of 2026-08-22 optimizer/__init__.py",
    ),
    no_effect(
        id="PB353",
        title="param remainders without effect",
        setting="store_param_remainders",
        when=find_remainders_without_effect,
        message="has no effect: {why}",
        remedies=("drop it", "state use_precision_aware_optimizer=True in a bf16 run"),
        source="megatron-core 0.16.1 optimizer/__init__.py:387; Transformer Engine 2.20 "
        "pytorch/optimizers/fused_adam.py",
    ),
    no_effect(
        id="PB354",
        title="precision of Muon without Muon",
        setting="muon_fp32_matmul_prec",
        when=lambda context: (
            context.differs_from_default("muon_fp32_matmul_prec")
            and context.has_optimizer
            and "muon" not in str(context.optimizer.optimizer)
        ),
        message="has no effect: the optimizer is {run.optimizer.optimizer}",
        remedies=("drop it", "use muon"),
        source="megatron-core 0.16.1 optimizer/muon.py:265",
    ),
    sync_error(
        id="PB356",
        title="stored weights that the fused Adam cannot update",
        setting="optimizer.fp8_recipe",
        sync="last",
        when=find_masters_in_blocks,
        message="leaves the masters to the optimizer, which gets no tensor for weights stored in "
        "{family}: the first step ends in an AttributeError",
        remedies=("{remedy}", "set {setting}", "set use_precision_aware_optimizer=False"),
        source="megatron-core 0.17.1, 0.18.2, 0.19.2 and Megatron-LM main of 2026-08-22, "
        "optimizer/distrib_optimizer.py _build_model_and_main_param_groups, "
        "_copy_model_grads_to_main_grads; 0.16.1 for FP8",
        explanation="Megatron gives the optimizer a shard of each weight, and None for weights in "
        "blocks, whose memory has no such view. Where Megatron keeps FP32 masters itself, the "
        "optimizer gets those. Under fp8_recipe None or 'delayed', with masters of another dtype "
        "and under offloading, it keeps none.",
    ),
    sync_warning(
        id="PB358",
        title="optimizer state dtype that an offloaded optimizer does not read",
        setting="optimizer.exp_avg_dtype",
        sync="reported",
        when=find_unread_states,
        message="has no effect: HybridDeviceOptimizer, which steps under optimizer_cpu_offload, "
        "keeps FP32 masters and FP32 moments, on the host and on the GPU",
        remedies=("set it to fp32, which says the same", "set optimizer_cpu_offload=False"),
        source="megatron-core 0.16.1 optimizer/__init__.py:336-346, and the same in 0.17.1, "
        "0.18.2, 0.19.2 and Megatron-LM main of 2026-08-22; radixark/Megatron-LM "
        "pull request 67 measured it",
    ),
    sync_warning(
        id="PB360",
        title="offloading that moves nothing",
        setting="optimizer.optimizer_offload_fraction",
        sync="reported",
        when=lambda context: (
            context.has_optimizer
            and context.optimizer.optimizer_cpu_offload
            and not context.optimizer.optimizer_offload_fraction
        ),
        message="leaves masters and moments on the GPU, in FP32, although optimizer_cpu_offload "
        "is on; 0 is the default of OptimizerConfig, and only Megatron-LM's parser has 1",
        remedies=(
            "set optimizer.optimizer_offload_fraction=1.0",
            "set optimizer_cpu_offload=False",
        ),
        source="megatron-core 0.16.1 and Megatron-LM main of 2026-08-22, "
        "optimizer/optimizer_config.py, optimizer/cpu_offloading/hybrid_optimizer.py "
        "_get_sub_optimizer_param_groups; training/arguments.py",
    ),
)
