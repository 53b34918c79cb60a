"""The optimizer's own dtypes, and what it can be combined with."""

from bridge.precision.config import CHOICES
from bridge.rules.context import RuleContext
from bridge.rules.rule import OPTIMIZER_CHECK, PARSER, error, info, no_effect, warning
from bridge.rules.violation import Violation, all_of, stands_out, violations
from bridge.target.fields import FUSED_RECIPES

_STATES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def _impossible_states(run: RuleContext) -> list[Violation]:
    own = {name: getattr(run.optimizer, name) for name in _STATES if name not in run.stated}
    wrong = [name for name, value in own.items() if value not in (*CHOICES[name], None)]
    return [Violation(f"optimizer.{one}", legal=", ".join(CHOICES[one]).replace("uint8", "fp8")) for one in wrong]


_LEAVES_THE_FUSED_PATH = (
    *("optimizer.fp8_recipe is not None", "optimizer.fp8_recipe is not delayed", "not has_megatron_fsdp"),
    *("optimizer.main_params_dtype is fp32", "not optimizer.optimizer_cpu_offload"),
)


def _masters_outside_the_fused_adam(run: RuleContext) -> list[Violation]:
    name = "mixed_precision.fp8_recipe" if run.is_bridge else "optimizer.fp8_recipe"
    has_remainders = run.is_bf16 and run.optimizer.store_param_remainders
    instead = ", not 2 bytes of remainders" if has_remainders else ""
    # Megatron Bridge writes it in every mode, so that nobody chose it.
    return [Violation(name=name, instead=instead, severity="info" if run.is_bridge else None)]


def _stored_blocks(run: RuleContext) -> list[Violation]:
    """Return the family of stored weights that the fused Adam would have to hold the masters of, and the reason."""
    optimizer = run.optimizer
    if run.fp4 and run.gathers_fp4:
        family, setting = "FP4", "fp4_param_gather=False"
    elif run.fp8 and run.gathers_fp8 and run.scheme != "delayed":
        family, setting = "FP8", "fp8_param_gather=False"
    else:
        return []
    if optimizer.optimizer_cpu_offload:
        is_known = family == "FP8"  # PB342
        path, remedy = "optimizer.optimizer_cpu_offload", "keep the optimizer on the GPU"
        return [] if is_known else [Violation(path, family=family, setting=setting, remedy=remedy)]
    if optimizer.main_params_dtype != "fp32":
        path, remedy = "optimizer.main_params_dtype", "set main_params_dtype=fp32"
    elif family == "FP4" and optimizer.fp8_recipe in FUSED_RECIPES:
        path, remedy = "optimizer.fp8_recipe", "set optimizer.fp8_recipe=tensorwise (--fp8-recipe of Megatron-LM)"
        if run.is_whole and run.is_bridge:
            remedy = "set mixed_precision.fp8_recipe=tensorwise"
    else:
        return []
    return [Violation(path, family=family, setting=setting, remedy=remedy)]


def _unread_remainders(run: RuleContext) -> list[Violation]:
    if not run.has_precision_aware:
        return [Violation(why="the optimizer is not precision-aware")]
    if run.optimizer.main_params_dtype != "fp32":
        return [Violation(why=f"the master weights are {run.optimizer.main_params_dtype}, not fp32")]
    return [Violation(why=f"the weights are {run.mode}, not bf16")] if not run.is_bf16 else []


def _lacks_conditions(run: RuleContext) -> list[Violation]:
    # Without overlap_param_gather the optimizer gathers the first chunk after its step: nothing is wrong with it.
    is_possible = run.is_sharded and run.model.virtual_pipeline_model_parallel_size
    if is_possible and run.optimizer.overlap_param_gather:
        return []
    return [Violation(severity="warning" if is_possible else None)]


RULES = (
    error(
        id="PB341",
        title="offloaded optimizer that is not precision-aware",
        setting="optimizer.optimizer_cpu_offload",
        when=all_of("has_optimizer", "optimizer.optimizer_cpu_offload", "not has_precision_aware"),
        message="an offloaded optimizer reuses the code of the precision-aware one",
        remedies=("set optimizer.use_precision_aware_optimizer=True", "keep the optimizer on the GPU"),
        source=PARSER,
    ),
    error(
        id="PB342",
        title="offloaded optimizer with FP8 weights",
        setting="optimizer.optimizer_cpu_offload",
        when=all_of("gathers_fp8", "optimizer.optimizer_cpu_offload", "scheme is not delayed"),
        message="an offloaded optimizer updates FP8 weights under delayed scaling only",
        remedies=("set fp8_param_gather=False", "use fp8_recipe='delayed'", "keep the optimizer on the GPU"),
        source=f"{PARSER}; NVIDIA/Megatron-LM issue 2582, 2025-12-07, for the two messages that contradict each other",
    ),
    error(
        id="PB343",
        title="optimizer state dtype without the precision-aware optimizer",
        setting="optimizer.exp_avg_dtype",
        when=all_of(
            *("has_optimizer", "not has_precision_aware"),
            find=lambda run: violations(
                {f"optimizer.{one}": getattr(run.optimizer, one) not in ("fp32", None) for one in _STATES}
            ),
        ),
        message="must be fp32 unless optimizer.use_precision_aware_optimizer is on",
        remedies=("set use_precision_aware_optimizer=True", "leave it at fp32"),
        source=OPTIMIZER_CHECK,
    ),
    error(
        id="PB344",
        title="impossible optimizer state dtype",
        setting="optimizer.exp_avg_dtype",
        when=all_of("has_precision_aware", find=_impossible_states),
        message="must be one of {legal}",
        remedies=("use one of them",),
        source="Megatron-LM training/arguments.py, 0.19.2: choices of the argument parser",
    ),
    error(
        id="PB345",
        title="precision-aware optimizer that is not Adam",
        setting="optimizer.optimizer",
        when=all_of("has_precision_aware", "optimizer.optimizer is not adam"),
        message="only Adam is precision-aware",
        remedies=("use adam", "set use_precision_aware_optimizer=False"),
        source=OPTIMIZER_CHECK,
    ),
    error(
        id="PB346",
        title="precision-aware optimizer that is not distributed",
        setting="optimizer.use_distributed_optimizer",
        when=all_of("has_precision_aware", "not optimizer.use_distributed_optimizer", "not has_megatron_fsdp"),
        message="the precision-aware optimizer works as a distributed optimizer only",
        remedies=("set use_distributed_optimizer=True", "set use_precision_aware_optimizer=False"),
        source=f"{OPTIMIZER_CHECK}; from 0.20 on refused when the optimizer is built",
    ),
    warning(
        id="PB347",
        title="FP8 branch in a run without FP8",
        setting="optimizer.fp8_recipe",
        when=all_of(
            *("has_precision_aware", "not fp8", *_LEAVES_THE_FUSED_PATH),
            lambda run: not (run.fp4 and run.gathers_fp4),
            find=_masters_outside_the_fused_adam,
        ),
        message="sends the precision-aware optimizer down its FP8 branch although fp8 is off: Megatron keeps FP32 "
        "masters (4 bytes a parameter{instead}) and casts gradients to FP32",
        remedies=("set {name}=null", "keep it for FP32 masters"),
        source="megatron-core 0.16.1 and 0.19.2 optimizer_config.py __post_init__; Megatron Bridge's "
        "MixedPrecisionConfig.setup writes 'tensorwise' here in every mode, 2026-08-22",
    ),
    info(
        id="PB348",
        title="precision-aware optimizer together with FP8 scaling",
        setting="optimizer.use_precision_aware_optimizer",
        when=all_of("has_precision_aware", "fp8", *_LEAVES_THE_FUSED_PATH),
        message="under {run.scheme} scaling Megatron keeps the FP32 masters itself and casts gradients to FP32, so "
        "BF16 main gradients and param remainders save nothing; the moments' dtypes still do",
        remedies=("keep it for exp_avg_dtype and exp_avg_sq_dtype", "use fp8_recipe='delayed' for the fused path"),
        source="megatron-core 0.16.1 and 0.19.2 optimizer_config.py __post_init__, distrib_optimizer.py",
    ),
    error(
        id="PB350",
        title="precision-aware optimizer without Transformer Engine",
        setting="optimizer.use_precision_aware_optimizer",
        when=all_of("has_precision_aware", "target.has_te is False", "not optimizer.optimizer_cpu_offload"),
        message="needs Transformer Engine's FusedAdam, and the target has no Transformer Engine",
        remedies=("install Transformer Engine", "set use_precision_aware_optimizer=False"),
        source=OPTIMIZER_CHECK,
    ),
    error(
        id="PB351",
        title="gathering inside the step without its conditions",
        setting="optimizer.overlap_param_gather_with_optimizer_step",
        when=all_of("has_optimizer", "optimizer.overlap_param_gather_with_optimizer_step", find=_lacks_conditions),
        message="needs the distributed optimizer, overlap_param_gather and interleaved pipeline stages",
        remedies=("set it to False", "set these three"),
        source=f"{PARSER}; Megatron-LM main of 2026-08-22 optimizer/optimizer.py:1672, which gathers "
        "without overlap where overlap_param_gather is off",
    ),
    error(
        id="PB352",
        title="precision-aware optimizer by layers",
        setting="optimizer.use_layer_wise_distributed_optimizer",
        when=all_of("has_precision_aware", "optimizer.use_layer_wise_distributed_optimizer"),
        message="the layer-wise distributed optimizer cannot be precision-aware",
        remedies=("set one of the two to False",),
        source="Megatron-LM main of 2026-08-22 optimizer/__init__.py",
    ),
    no_effect(
        id="PB353",
        title="param remainders without effect",
        setting="store_param_remainders",
        when=all_of(stands_out("store_param_remainders"), "has_optimizer", find=_unread_remainders),
        message="has no effect: {why}",
        remedies=("drop it", "state use_precision_aware_optimizer=True in a bf16 run"),
        source="megatron-core 0.16.1 optimizer/__init__.py:387; Transformer Engine 2.20 "
        "pytorch/optimizers/fused_adam.py",
    ),
    no_effect(
        id="PB354",
        title="precision of Muon without Muon",
        setting="muon_fp32_matmul_prec",
        when=all_of(
            stands_out("muon_fp32_matmul_prec"), "has_optimizer", lambda run: "muon" not in str(run.optimizer.optimizer)
        ),
        message="has no effect: the optimizer is {run.optimizer.optimizer}",
        remedies=("drop it", "use muon"),
        source="megatron-core 0.16.1 optimizer/muon.py:265",
    ),
    error(
        id="PB356",
        title="stored weights that the fused Adam cannot update",
        setting="optimizer.fp8_recipe",
        sync="strict",
        when=all_of("has_precision_aware", "not has_megatron_fsdp", find=_stored_blocks),
        message="leaves the masters to the optimizer, which gets no tensor for weights stored in {family}: the first "
        "step ends in an AttributeError",
        remedies=("{remedy}", "set {setting}", "set use_precision_aware_optimizer=False"),
        source="megatron-core 0.17.1, 0.18.2, 0.19.2 and Megatron-LM main of 2026-08-22, "
        "optimizer/distrib_optimizer.py _build_model_and_main_param_groups, "
        "_copy_model_grads_to_main_grads; 0.16.1 for FP8",
        explanation="Megatron gives the optimizer a shard of each weight, and None for weights in blocks, whose "
        "memory has no such view. Where Megatron keeps FP32 masters itself, the optimizer gets those. Under "
        "fp8_recipe None or 'delayed', with masters of another dtype and under offloading, it keeps none.",
    ),
    warning(
        id="PB358",
        title="optimizer state dtype that an offloaded optimizer does not read",
        setting="optimizer.exp_avg_dtype",
        sync="reported",
        when=all_of(
            *("has_precision_aware", "optimizer.optimizer_cpu_offload"),
            find=lambda run: violations(
                {f"optimizer.{one}": getattr(run.optimizer, one) not in ("fp32", None) for one in _STATES[1:]}
            ),
        ),
        message="has no effect: HybridDeviceOptimizer, which steps under optimizer_cpu_offload, keeps FP32 masters "
        "and FP32 moments, on the host and on the GPU",
        remedies=("set it to fp32, which says the same", "set optimizer_cpu_offload=False"),
        source="megatron-core 0.16.1 optimizer/__init__.py:336-346, and the same in 0.17.1, 0.18.2, 0.19.2 and "
        "Megatron-LM main of 2026-08-22; radixark/Megatron-LM pull request 67 measured it",
    ),
    warning(
        id="PB360",
        title="offloading that moves nothing",
        setting="optimizer.optimizer_offload_fraction",
        sync="reported",
        when=all_of("has_optimizer", "optimizer.optimizer_cpu_offload", "not optimizer.optimizer_offload_fraction"),
        message="leaves masters and moments on the GPU, in FP32, although optimizer_cpu_offload is on; 0 is the "
        "default of OptimizerConfig, and only Megatron-LM's parser has 1",
        remedies=("set optimizer.optimizer_offload_fraction=1.0", "set optimizer_cpu_offload=False"),
        source="megatron-core 0.16.1 and Megatron-LM main of 2026-08-22, optimizer/optimizer_config.py, "
        "optimizer/cpu_offloading/hybrid_optimizer.py _get_sub_optimizer_param_groups; training/arguments.py",
    ),
)
