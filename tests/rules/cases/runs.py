"""The recipes, targets and models that the cases of several topics share."""

from bridge.registry.registry import REGISTRY
from bridge.rules.program import ProgramKind

MEGATRON_BRIDGE = ProgramKind.MEGATRON_BRIDGE
TRAIN_SCRIPT = ProgramKind.TRAIN_SCRIPT


def run(precision=None, target=None, **sections):
    """The arguments of a setup, without those that are not said."""
    said = {"precision": precision, "target": target, **sections}
    return {name: value for name, value in said.items() if value is not None}


def full(precision, target, model=None, optimizer=None, ddp=None, **more):
    """A run with a dense model and a distributed optimizer, unless others are given."""
    sections = {
        "model": DENSE if model is None else model,
        "optimizer": OVERLAP if optimizer is None else optimizer,
        "ddp": OVERLAP if ddp is None else ddp,
    }
    return run(precision, target, **sections, **more)


def recipe(name, **more):
    return dict(REGISTRY.get(name).to_dict(), **more)


H100 = "h100x8,te2.9,cuda12.9,cudnn9.14,mcore0.19.2"
B200 = "b200x8,te2.14,cuda12.9,cudnn9.14,mcore0.19.2"
CURRENT_RECIPE = "bf16_with_fp8_current_scaling_mixed"
DELAYED_RECIPE = "bf16_with_fp8_delayed_scaling_mixed"
NVFP4_RECIPE = "bf16_with_nvfp4_mixed"
BF16 = recipe("bf16_mixed")
CURRENT = recipe(CURRENT_RECIPE)
CURRENT_PLAIN = dict(CURRENT, fp8_param_gather=False)
CURRENT_ALL = dict(CURRENT, first_last_layers_bf16=False, num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
DELAYED = recipe(DELAYED_RECIPE, fp8_param_gather=False)
MXFP8 = recipe("bf16_with_mxfp8_mixed")
MXFP8_FSDP = {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True}
NVFP4 = recipe(NVFP4_RECIPE, first_last_layers_bf16=True, num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=4)
BLOCKWISE = {"bf16": True, "fp8": "hybrid", "fp8_recipe": "blockwise"}
CUSTOM = {"bf16": True, "fp8": "hybrid", "fp8_recipe": "custom"}
DENSE = {
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "pipeline_dtype": "bf16"}
BF16_MODEL = dict(DENSE, bf16=True, params_dtype="bf16")
MOE = dict(
    DENSE,
    num_moe_experts=8,
    moe_ffn_hidden_size=4096,
    moe_router_dtype="fp32",
    moe_token_dispatcher_type="alltoall",  # noqa: S106  a dispatcher
)
PADDED_MOE = dict(MOE, moe_router_padding_for_quantization=True)
HYBRID = dict(DENSE, is_hybrid_model=True)
SEQUENCE_PARALLEL = dict(DENSE, tensor_model_parallel_size=2, sequence_parallel=True)
OVERLAPPED = dict(SEQUENCE_PARALLEL, tp_comm_overlap=True)
OVERLAP = {"use_distributed_optimizer": True, "overlap_param_gather": True}
PRECISION_AWARE = dict(OVERLAP, use_precision_aware_optimizer=True)
FP32_DDP = dict(OVERLAP, grad_reduce_in_fp32=True)
MEGATRON_FSDP = dict(OVERLAP, use_megatron_fsdp=True, megatron_fsdp_main_grads_dtype="fp32")


def module_recipe(scheme):
    """Megatron's per-module recipes, with one module."""
    row = {"fp8_quantization_recipe": scheme}
    return {"configs": {"head": {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": row}}}


MODULE_DELAYED, MODULE_MXFP8 = module_recipe("delayed"), module_recipe("mxfp8")
