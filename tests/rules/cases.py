"""For each rule a run that breaks it and one that differs from it by as little as possible and does not."""

from dataclasses import dataclass

from bridge.precision.fields import stated
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY


@dataclass(kw_only=True, repr=False, eq=False)
class WithOwnField(MixedPrecisionConfig):
    """A team's class with a field that Megatron's configs do not have."""

    kernel: str | None = stated(None, kind="name", optional=True)


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
H200 = "h200x8,te2.9,cuda12.9,cudnn9.14,mcore0.19.2"
OLD_H100 = "h100x8,te2.9,cuda12.9,cudnn9.14,mcore0.16.1"
B200 = "b200x8,te2.14,cuda12.9,cudnn9.14,mcore0.19.2"

CURRENT_RECIPE = "bf16_with_fp8_current_scaling_mixed"
DELAYED_RECIPE = "bf16_with_fp8_delayed_scaling_mixed"
NVFP4_RECIPE = "bf16_with_nvfp4_mixed"
BF16 = recipe("bf16_mixed")
FP16 = recipe("fp16_mixed")
CURRENT = recipe(CURRENT_RECIPE)
CURRENT_PLAIN = dict(CURRENT, fp8_param_gather=False)
CURRENT_ALL = dict(CURRENT, first_last_layers_bf16=False, num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0)
BF16_FSDP = {"bf16": True}
BF16_SUMS = dict(BF16, grad_reduce_in_fp32=False)
DELAYED = recipe(DELAYED_RECIPE, fp8_param_gather=False)
MXFP8 = recipe("bf16_with_mxfp8_mixed")
MXFP8_FSDP = {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True}
BUFFER = "reuse_grad_buf_for_mxfp8_param_ag"
WITHOUT_GATHER = REGISTRY.get("bf16_with_mxfp8_mixed")
WITHOUT_GATHER.fp8_param_gather = False
NVFP4 = recipe(NVFP4_RECIPE, first_last_layers_bf16=True, num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=4)
NVFP4_ATTENTION = dict(NVFP4, fp4_param_gather=False, fp8_dot_product_attention=True)
BLOCKWISE_STORED = recipe("nanov2_bf16_with_fp8_subchannel_scaling_mixed")
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
PIPELINE = {"pipeline_model_parallel_size": 4, "pipeline_dtype": "bf16"}
INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "pipeline_dtype": "bf16"}
BF16_MODEL = dict(DENSE, bf16=True, params_dtype="bf16")
FP16_MODEL = dict(DENSE, fp16=True, params_dtype="fp16")
FP8_MODEL = dict(BF16_MODEL, fp8="hybrid", fp8_recipe="tensorwise")
MOE = dict(
    DENSE,
    num_moe_experts=8,
    moe_ffn_hidden_size=4096,
    moe_router_dtype="fp32",
    moe_token_dispatcher_type="alltoall",  # noqa: S106  a dispatcher
)
PADDED_MOE = dict(MOE, moe_router_padding_for_quantization=True)
NCCLEP = dict(
    PADDED_MOE,
    moe_token_dispatcher_type="flex",  # noqa: S106  a dispatcher
    moe_flex_dispatcher_backend="ncclep",
    moe_expert_capacity_factor=1.0,
)
RECOMPUTED = dict(PADDED_MOE, recompute_granularity="selective", recompute_modules=["moe_act"])
HYBRID = dict(DENSE, is_hybrid_model=True)
SEQUENCE_PARALLEL = dict(DENSE, tensor_model_parallel_size=2, sequence_parallel=True)
OVERLAPPED = dict(SEQUENCE_PARALLEL, tp_comm_overlap=True)
WEIGHT_SHARDS = dict(DENSE, tensor_parallel_num_weight_shards=2)

OVERLAP = {"use_distributed_optimizer": True, "overlap_param_gather": True}
SHARDED = {"use_distributed_optimizer": True}
PRECISION_AWARE = dict(OVERLAP, use_precision_aware_optimizer=True)
FP8_OPTIMIZER = dict(OVERLAP, bf16=True, fp8_recipe="tensorwise")
FP32_DDP = dict(OVERLAP, grad_reduce_in_fp32=True)
MEGATRON_FSDP = dict(OVERLAP, use_megatron_fsdp=True, megatron_fsdp_main_grads_dtype="fp32")


def module_recipe(scheme):
    """Megatron's per-module recipes, with one module."""
    row = {"fp8_quantization_recipe": scheme}
    return {"configs": {"head": {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": row}}}


def module_file(pattern, scheme="mxfp8", **more):
    """Megatron's per-module recipe with one matcher, which is on."""
    matcher = {"type": "glob", "pattern": pattern, "config": "head", "enabled": True}
    recipe = module_recipe(scheme)
    recipe["configs"]["head"]["training_recipe"].update(more)
    return {**recipe, "matchers": {"one": matcher}}


def with_row(base, **row):
    """A precision with one row of `modules`."""
    return dict(base, modules=[row])


MODULE_DELAYED, MODULE_MXFP8 = module_recipe("delayed"), module_recipe("mxfp8")
MODULE_OFF = {**MODULE_MXFP8, "matchers": {"one": {"type": "glob", "pattern": "*.linear_qkv", "config": "head"}}}
LATER = {"select": "*.linear_qkv", "precision": "bf16"}

CASES = {
    "PB101": (run({"bf16": True, "fp16": True}), run({"bf16": True})),
    "PB102": (run({"bf16": True, "params_dtype": "fp16"}), run({"bf16": True, "params_dtype": "fp32"})),
    "PB103": (run(model=dict(DENSE, params_dtype="bf16")), run(model=dict(DENSE, params_dtype="bf16", bf16=True))),
    "PB104": (
        run({"fp32": True, "autocast_enabled": True}),
        run({"fp32": True, "autocast_enabled": True, "autocast_dtype": "bf16"}),
    ),
    "PB105": (
        run({"fp32": True, "autocast_dtype": "bf16"}),
        run({"fp32": True, "autocast_enabled": True, "autocast_dtype": "bf16"}),
    ),
    "PB106": (
        run("fp32", model=dict(DENSE, fp32_residual_connection=True)),
        run("bf16_mixed", model=dict(DENSE, fp32_residual_connection=True)),
    ),
    "PB107": (
        run("bf16_mixed", model=dict(DENSE, fp16_lm_cross_entropy=True)),
        run("fp16_mixed", model=dict(DENSE, fp16_lm_cross_entropy=True)),
    ),
    "PB108": (
        run(model=dict(DENSE, bf16=True, params_dtype="bf16", pipeline_model_parallel_size=4)),
        run(model=dict(DENSE, bf16=True, params_dtype="bf16", pipeline_dtype="bf16", pipeline_model_parallel_size=4)),
    ),
    "PB109": (
        run(
            "bf16_mixed",
            "mcore0.16.1",
            model=dict(DENSE, fp32_residual_connection=True, pipeline_model_parallel_size=2),
        ),
        run(
            "bf16_mixed",
            "mcore0.17.1",
            model=dict(DENSE, fp32_residual_connection=True, pipeline_model_parallel_size=2),
        ),
    ),
    "PB110": (
        run("bf16_mixed", model=dict(MOE, enable_autocast=True, overlap_moe_expert_parallel_comm=True)),
        run("bf16_mixed", model=dict(MOE, enable_autocast=True)),
    ),
    "PB111": (
        run("bf16_mixed", model=dict(DENSE, disable_bf16_reduced_precision_matmul=True)),
        run("fp32", model=dict(DENSE, disable_bf16_reduced_precision_matmul=True)),
    ),
    "PB112": (
        run("fp32", model=dict(DENSE, batch_invariant_mode=True)),
        run("bf16_mixed", model=dict(DENSE, batch_invariant_mode=True)),
    ),
    "PB113": (run(dict(BF16, autocast_dtype="fp64", autocast_enabled=True)), run(dict(BF16, autocast_enabled=True))),
    "PB114": (
        run(dict(FP16, disable_bf16_reduced_precision_matmul=True)),
        run(dict(FP16, disable_bf16_reduced_precision_matmul=False)),
    ),
    "PB115": (
        run(dict(BF16, mamba_training_ssm_states_dtype="fp32"), "mcore0.19.2", model=DENSE),
        run(dict(BF16, mamba_training_ssm_states_dtype="fp32"), "mcore0.19.2", model=HYBRID),
    ),
    "PB121": (
        run("bf16_mixed", model=dict(DENSE, first_last_layers_bf16="sometimes")),
        run("bf16_mixed", model=dict(DENSE, first_last_layers_bf16="no")),
    ),
    "PB122": (
        run("bf16_mixed", model=dict(DENSE, moe_router_dtyep="fp32")),
        run("bf16_mixed", model=dict(DENSE, a_providers_own_field="fp32")),
    ),
    "PB123": (run("bf16_mixed", model=dict(DENSE, fp16=True)), run("bf16_mixed", model=dict(DENSE, bf16=True))),
    "PB124": (
        run(
            model=dict(DENSE, bf16=True, params_dtype="bf16"),
            optimizer=dict(OVERLAP, bf16=False),
            ddp=dict(OVERLAP, grad_reduce_in_fp32=True),
        ),
        run(
            model=dict(DENSE, bf16=True, params_dtype="bf16"),
            optimizer=dict(OVERLAP, bf16=True),
            ddp=dict(OVERLAP, grad_reduce_in_fp32=True),
        ),
    ),
    "PB125": (
        run(REGISTRY.get(CURRENT_RECIPE).state("command line", fp8_recipe="blockwise"), H100, model=DENSE),
        run("nanov2_bf16_with_fp8_subchannel_scaling_mixed", H100, model=DENSE),
    ),
    "PB126": (
        run(model=dict(DENSE, fp8="", bf16=True, params_dtype="bf16")),
        run(model=dict(DENSE, fp8=None, bf16=True, params_dtype="bf16")),
    ),
    "PB127": (
        run("bf16_mixed", model=dict(DENSE, pipeline_model_parallel_size=0)),
        run("bf16_mixed", model=dict(DENSE, pipeline_model_parallel_size=1)),
    ),
    "PB128": (full(dict(DELAYED, fp8_margin=-1), H100), full(dict(DELAYED, fp8_margin=0), H100)),
    "PB129": (full(NVFP4, "b200x8,te2.14,cuda12.9,mcore0.16.1"), full(NVFP4, "b200x8,te2.14,cuda12.9,mcore0.17.1")),
    "PB130": (run(WITHOUT_GATHER, B200), run(dict(MXFP8, fp8_param_gather=False, **{BUFFER: False}), B200)),
    "PB131": (run(WithOwnField(bf16=True, kernel="fused")), run(WithOwnField(bf16=True))),
    "PB132": (
        run("bf16_mixed", model={name: value for name, value in DENSE.items() if "dropout" not in name}),
        run("bf16_mixed", model=DENSE),
    ),
    "PB141": (run(recipe("fp16_mixed", loss_scale=0.0)), run(recipe("fp16_mixed", loss_scale=128.0))),
    "PB142": (
        run(recipe("fp16_mixed", initial_loss_scale=1.0, min_loss_scale=2.0)),
        run(recipe("fp16_mixed", initial_loss_scale=2.0, min_loss_scale=2.0)),
    ),
    "PB143": (run(recipe("fp16_mixed", loss_scale_window=2.5)), run(recipe("fp16_mixed", loss_scale_window=2.0))),
    "PB144": (run(recipe("bf16_mixed", hysteresis=4)), run(recipe("fp16_mixed", hysteresis=4))),
    "PB145": (
        run("fp32", model=DENSE, optimizer={"loss_scale": 128.0}),
        run("fp32", model=DENSE, optimizer={"loss_scale": 128.0, "use_distributed_optimizer": True}),
    ),
    "PB146": (
        run(model=FP16_MODEL, optimizer=dict(OVERLAP, fp16=True), ddp=dict(OVERLAP, check_for_nan_in_grad=True)),
        run(
            "fp16_mixed",
            model=FP16_MODEL,
            optimizer=dict(OVERLAP, fp16=True),
            ddp=dict(OVERLAP, check_for_nan_in_grad=True),
        ),
    ),
    "PB147": (
        run("fp16_mixed", model=DENSE, optimizer={"optimizer": "muon"}),
        run("bf16_mixed", model=DENSE, optimizer={"optimizer": "muon"}),
    ),
    "PB148": (
        run("bf16_mixed", model=DENSE, optimizer={"optimizer": "muon", "loss_scale": 8.0}),
        run("bf16_mixed", model=DENSE, optimizer={"optimizer": "adam", "loss_scale": 8.0}),
    ),
    "PB149": (run("fp16_mixed", model=MOE, optimizer=OVERLAP), run("bf16_mixed", model=MOE, optimizer=OVERLAP)),
    "PB201": (full(dict(CURRENT, fp8="e5m2"), H100), full(dict(CURRENT, fp8="e4m3"), H100)),
    "PB202": (full(dict(CURRENT, fp8_recipe="tensorwize"), H100), full(CURRENT, H100)),
    "PB203": (full(dict(DELAYED, fp8_amax_compute_algo="maximum"), H100), full(DELAYED, H100)),
    "PB204": (run({"bf16": True, "fp8": "hybrid", "fp4": "e2m1"}, B200), run({"bf16": True, "fp4": "e2m1"}, B200)),
    "PB205": (run({"bf16": True, "fp8_recipe": "mxfp8"}), run({"bf16": True, "fp8": None, "fp8_recipe": "tensorwise"})),
    "PB206": (full(dict(MXFP8, fp8="hybrid"), B200), full(MXFP8, B200)),
    "PB207": (full(BLOCKWISE_STORED, H100), full(CURRENT, H100)),
    "PB208": (full(CUSTOM, H100), full(CUSTOM, H100, dict(DENSE, fp8_quantizer_factory="house.quantizers.make"))),
    "PB209": (
        run(dict(CUSTOM, fp8="e4m3"), H100, model=dict(DENSE, fp8_quantizer_factory="house.quantizers.make")),
        run(CUSTOM, H100, model=dict(DENSE, fp8_quantizer_factory="house.quantizers.make")),
    ),
    "PB210": (full(dict(CURRENT, fp8_margin=2), H100), full(dict(DELAYED, fp8_margin=2), H100)),
    "PB211": (full(dict(CURRENT, fp8_wgrad=False), H100), full(dict(CURRENT, fp8_wgrad=True), H100)),
    "PB212": (
        full(CURRENT, H100, dict(DENSE, transformer_impl="local")),
        full(BF16, H100, dict(DENSE, transformer_impl="local")),
    ),
    "PB213": (
        run("bf16_mixed", H100, model=dict(DENSE, quant_recipe=MODULE_DELAYED)),
        run("bf16_mixed", H100, model=dict(DENSE, quant_recipe=MODULE_MXFP8)),
    ),
    "PB214": (
        full(CURRENT, H100, dict(HYBRID, quant_recipe=MODULE_MXFP8)),
        full(CURRENT_PLAIN, H100, dict(HYBRID, quant_recipe=MODULE_MXFP8)),
    ),
    "PB215": (
        full(CURRENT, H100, dict(DENSE, fp8_output_proj=True)),
        full(MXFP8, B200, dict(DENSE, fp8_output_proj=True)),
    ),
    "PB216": (
        full(MXFP8, B200, dict(HYBRID, fp8_output_proj=True)),
        full(MXFP8, B200, dict(DENSE, fp8_output_proj=True)),
    ),
    "PB217": (
        run("bf16_mixed", model=dict(DENSE, activation_func_fp8_input_store=True)),
        run("bf16_mixed", model=dict(DENSE, activation_func_fp8_input_store=True, gated_linear_unit=True)),
    ),
    "PB218": (run(dict(BF16, muon_fp32_matmul_prec="tf32")), run(dict(BF16, muon_fp32_matmul_prec="high"))),
    "PB219": (
        run(dict(BF16, activation_func_fp8_input_store=True), model=dict(DENSE, gated_linear_unit=True)),
        run(
            dict(BF16, activation_func_fp8_input_store=True),
            model=dict(DENSE, gated_linear_unit=True, bias_activation_fusion=True),
        ),
    ),
    "PB221": (full(DELAYED, H100, dict(DENSE, pipeline_model_parallel_size=2)), full(DELAYED, H100)),
    "PB222": (full(dict(DELAYED, fp8_amax_history_len=1), H100), full(DELAYED, H100)),
    "PB223": (full(DELAYED_RECIPE, H100), full(DELAYED, H100)),
    "PB241": (
        full(MXFP8, "b200x8,te2.14,cuda12.9,mcore0.16.1", optimizer=SHARDED, ddp=SHARDED),
        full(MXFP8, B200, optimizer=SHARDED, ddp=SHARDED),
    ),
    "PB242": (full(MXFP8, "b200x8,te2.14,cuda12.9,mcore0.18"), full(MXFP8, B200)),
    "PB243": (full(dict(MXFP8, reuse_grad_buf_for_mxfp8_param_ag=False), B200), full(MXFP8, B200)),
    "PB244": (full(dict(CURRENT, reuse_grad_buf_for_mxfp8_param_ag=True), B200), full(CURRENT, B200)),
    "PB245": (
        full(
            MXFP8,
            B200,
            dict(DENSE, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
            optimizer=dict(OVERLAP, overlap_param_gather_with_optimizer_step=True),
        ),
        full(
            CURRENT,
            B200,
            dict(DENSE, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
            optimizer=dict(OVERLAP, overlap_param_gather_with_optimizer_step=True),
        ),
    ),
    "PB246": (
        run({"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": False}, B200),
        run(MXFP8, B200),
    ),
    "PB247": (full(NVFP4, "b200x8,te2.8,cuda12.9,mcore0.18"), full(NVFP4, B200)),
    "PB248": (full(NVFP4, "b200x8,te2.14,cuda12.9,mcore0.17.1"), full(NVFP4, B200)),
    "PB249": (full(NVFP4_RECIPE, B200), full(NVFP4, B200)),
    "PB250": (full(NVFP4, B200, dict(DENSE, mtp_num_layers=1)), full(MXFP8, B200, dict(DENSE, mtp_num_layers=1))),
    "PB251": (
        full(
            dict(NVFP4, fp4_param_gather=False, first_last_layers_bf16=True),
            "b200x8,te2.14,cuda12.9,mcore0.16.1",
            HYBRID,
        ),
        full(dict(NVFP4, fp4_param_gather=False), "b200x8,te2.14,cuda12.9,mcore0.17", HYBRID),
    ),
    "PB252": (
        full(
            dict(
                recipe("fp16_mixed"),
                fp4="e2m1",
                first_last_layers_bf16=True,
                num_layers_at_start_in_bf16=0,
                num_layers_at_end_in_bf16=4,
            ),
            B200,
        ),
        full(NVFP4, B200),
    ),
    "PB261": (
        run(dict(CURRENT, num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0), H100),
        run(dict(CURRENT, num_layers_at_start_in_bf16=0), H100),
    ),
    "PB262": (
        run(
            dict(
                recipe(CURRENT_RECIPE),
                first_last_layers_bf16=False,
                num_layers_at_start_in_bf16=2,
                num_layers_at_end_in_bf16=0,
            ),
            H100,
        ),
        run(dict(CURRENT, num_layers_at_start_in_bf16=2), H100),
    ),
    "PB263": (full(dict(DELAYED, first_last_layers_bf16=True), H100), full(DELAYED, H100)),
    "PB264": (
        full(dict(CURRENT, num_layers_at_end_in_bf16=9), H100, dict(DENSE, pipeline_model_parallel_size=4)),
        full(dict(CURRENT, num_layers_at_end_in_bf16=8), H100, dict(DENSE, pipeline_model_parallel_size=4)),
    ),
    "PB265": (full(dict(NVFP4, num_layers_at_end_in_bf16=100), B200, dict(DENSE)), full(NVFP4, B200)),
    "PB266": (
        full(dict(CURRENT, num_layers_at_start_in_bf16=16, num_layers_at_end_in_bf16=16), H100),
        full(CURRENT, H100),
    ),
    "PB267": (
        full(CURRENT, "h100x8,te2.7,cuda12.9,mcore0.19.2", OVERLAPPED),
        full(CURRENT, "h100x8,te2.8,cuda12.9,mcore0.19.2", OVERLAPPED),
    ),
    "PB268": (
        full(CURRENT, H100, dict(DENSE, mtp_num_layers=1)),
        full(
            dict(CURRENT, first_last_layers_bf16=False, num_layers_at_start_in_bf16=0, num_layers_at_end_in_bf16=0),
            H100,
            dict(DENSE, mtp_num_layers=1),
        ),
    ),
    "PB269": (run(recipe("bf16_mixed", first_last_layers_bf16=True)), run("bf16_mixed")),
    "PB270": (
        full(CURRENT, "h100x8,te2.7,cuda12.9,mcore0.19.2", dict(DENSE, cuda_graph_impl="transformer_engine")),
        full(CURRENT_ALL, "h100x8,te2.7,cuda12.9,mcore0.19.2", dict(DENSE, cuda_graph_impl="transformer_engine")),
    ),
    "PB271": (full(CURRENT, H100, HYBRID), full(CURRENT, H100, DENSE)),
    "PB281": (
        full(with_row(CURRENT, select="*.liner_qkv", precision="bf16"), H100),
        full(with_row(CURRENT, select="*.linear_qkv", precision="bf16"), H100),
    ),
    "PB282": (
        full(dict(CURRENT, modules=[{"select": "*.linear_*", "precision": "bf16"}, LATER]), H100),
        full(dict(CURRENT, modules=[LATER, {"select": "*.linear_*", "precision": "bf16"}]), H100),
    ),
    "PB283": (
        full(with_row(CURRENT_PLAIN, select="*", precision="blockwise"), H100),
        full(with_row(CURRENT_PLAIN, select="*.linear_*", precision="blockwise"), H100),
    ),
    "PB284": (
        full(CURRENT_PLAIN, H100, dict(DENSE, quant_recipe=module_file("*layers.0.*", None), **PIPELINE)),
        full(CURRENT_PLAIN, H100, dict(DENSE, quant_recipe=module_file("*.linear_qkv", None), **PIPELINE)),
    ),
    "PB285": (
        full(with_row(CURRENT, select="decoder.layers.5.mlp.*", precision="bf16"), H100, dict(DENSE, **INTERLEAVED)),
        full(with_row(CURRENT, select="decoder.layers.*.mlp.*", precision="bf16"), H100, dict(DENSE, **INTERLEAVED)),
    ),
    "PB286": (
        full(BF16, H100, dict(DENSE, quant_recipe=module_file("*.linear_qkv", "tensorwise"))),
        full(BF16, H100, dict(DENSE, quant_recipe=module_file("*.linear_qkv", None))),
    ),
    "PB287": (
        full(with_row(BF16, select="*.linear_qkv", precision="tensorwise"), OLD_H100),
        full(with_row(BF16, select="*.linear_qkv", precision="tensorwise"), H100),
    ),
    "PB288": (
        full(with_row(CURRENT_PLAIN, select="*.linear_qkv", fp8_recipe="tensorwise", fp8_param=True), OLD_H100),
        full(with_row(CURRENT_PLAIN, select="*.linear_qkv", fp8_recipe="tensorwise", fp8_param=False), OLD_H100),
    ),
    "PB289": (
        full(with_row(CURRENT_PLAIN, select="*.linear_qkv", fp8_recipe="tensorwise", fp8_param=True), H100),
        full(with_row(CURRENT_PLAIN, select="*.linear_qkv", fp8_recipe="tensorwise", fp8_param=False), H100),
    ),
    "PB290": (
        full(CURRENT_PLAIN, H100, dict(DENSE, quant_recipe=MODULE_OFF)),
        full(CURRENT_PLAIN, H100, dict(DENSE, quant_recipe=MODULE_MXFP8)),
    ),
    "PB291": (
        full(with_row(CURRENT_PLAIN, select="*.linear_qkv", precision="mxfp8"), H100),
        full(with_row(CURRENT_PLAIN, select="*.linear_qkv", precision="blockwise"), H100),
    ),
    "PB292": (
        full(with_row(CURRENT, select={"layers": [0, 99], "module": "linear_fc2"}, precision="bf16"), H100),
        full(with_row(CURRENT, select={"layers": [0, -1], "module": "linear_fc2"}, precision="bf16"), H100),
    ),
    "PB293": (
        run(with_row(BF16, select="*.linear_qkv", precision="bf16"), H100, model=DENSE),
        run(with_row(CURRENT_PLAIN, select="*.linear_qkv", precision="bf16"), H100, model=DENSE),
    ),
    "PB294": (
        run("bf16_mixed", H100, model=dict(DENSE, quant_recipe="te_quant.yaml")),
        run("bf16_mixed", H100, model=DENSE),
    ),
    "PB301": (full(CURRENT, H200, optimizer={}, ddp={}), full(CURRENT, H200)),
    "PB302": (full(NVFP4, B200, optimizer={}, ddp={}), full(NVFP4, B200)),
    "PB303": (
        run(None, H100, model=dict(FP8_MODEL, fp8_param=True), optimizer=FP8_OPTIMIZER, ddp=FP32_DDP),
        run(
            None,
            H100,
            model=dict(FP8_MODEL, fp8_param=True),
            optimizer=FP8_OPTIMIZER,
            ddp=dict(FP32_DDP, fp8_param_gather=True),
        ),
    ),
    "PB304": (run(dict(CURRENT, fp8_param=False), H100), run(dict(CURRENT, fp8_param=True), H100)),
    "PB305": (
        run({"bf16": True, "fp8_param_gather": True}),
        run({"bf16": True, "fp8": "hybrid", "fp8_param_gather": True}, H100),
    ),
    "PB306": (full(dict(CURRENT, fp8_param_gather=False), H100), full(CURRENT, H100)),
    "PB307": (
        full(recipe("fp16_with_mxfp8_mixed", grad_reduce_in_fp32=True), B200),
        full(recipe("fp16_with_mxfp8_mixed", grad_reduce_in_fp32=False), B200),
    ),
    "PB321": (full(CURRENT, H100, ddp={"use_torch_fsdp2": True}, optimizer={}), full(CURRENT, H100)),
    "PB322": (
        full(NVFP4, "b200x8,te2.6,cuda12.9,mcore0.19.2", ddp={"use_torch_fsdp2": True}, optimizer={}),
        full(NVFP4, "b200x8,te2.6,cuda12.9,mcore0.19.2"),
    ),
    "PB323": (
        run("fp16_mixed", model=DENSE, ddp={"use_torch_fsdp2": True}),
        run("bf16_mixed", model=DENSE, ddp={"use_torch_fsdp2": True}),
    ),
    "PB324": (
        full(dict(MXFP8_FSDP, reuse_grad_buf_for_mxfp8_param_ag=True), B200, ddp=MEGATRON_FSDP),
        full(MXFP8_FSDP, B200, ddp=MEGATRON_FSDP),
    ),
    "PB325": (
        full(
            {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True},
            "h100x8,te2.2,cuda12.9,mcore0.19.2",
            ddp=MEGATRON_FSDP,
        ),
        full(
            {"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True},
            H100,
            ddp=MEGATRON_FSDP,
        ),
    ),
    "PB326": (
        run({"fp32": True}, "h100x8,mcore0.20", model=DENSE, ddp=dict(MEGATRON_FSDP, megatron_fsdp_version=2)),
        run({"bf16": True}, "h100x8,mcore0.20", model=DENSE, ddp=dict(MEGATRON_FSDP, megatron_fsdp_version=2)),
    ),
    "PB327": (
        run("bf16_mixed", "mcore0.19.2", model=DENSE, ddp=MEGATRON_FSDP),
        run("bf16_mixed", "mcore0.18", model=DENSE, ddp=MEGATRON_FSDP),
    ),
    "PB328": (
        run({"bf16": True}, "mcore0.19.2", model=DENSE, ddp=dict(OVERLAP, use_megatron_fsdp=True)),
        run({"bf16": True}, "mcore0.19.2", model=DENSE, ddp=MEGATRON_FSDP),
    ),
    "PB329": (
        run("bf16_mixed", model=DENSE, optimizer={"optimizer": "muon"}, ddp={"use_torch_fsdp2": True}),
        run("bf16_mixed", model=DENSE, optimizer={"optimizer": "adam"}, ddp={"use_torch_fsdp2": True}),
    ),
    "PB330": (
        run("bf16_mixed", model=DENSE, optimizer={"use_distributed_optimizer": True}, ddp={}),
        run("bf16_mixed", model=DENSE, optimizer={}, ddp={}),
    ),
    "PB331": (
        full(dict(BF16, megatron_fsdp_grad_comm_dtype="bf16"), H100),
        full(BF16, H100),
    ),
    "PB332": (
        full(dict(BF16_FSDP, megatron_fsdp_use_decoupled_grad=True), H100, ddp=MEGATRON_FSDP),
        full(BF16_FSDP, H100, ddp=MEGATRON_FSDP),
    ),
    "PB341": (
        run("bf16_mixed", model=DENSE, optimizer=dict(OVERLAP, optimizer_cpu_offload=True), ddp=OVERLAP),
        run("bf16_mixed", model=DENSE, optimizer=dict(PRECISION_AWARE, optimizer_cpu_offload=True), ddp=OVERLAP),
    ),
    "PB342": (
        full(CURRENT, H100, optimizer=dict(PRECISION_AWARE, optimizer_cpu_offload=True)),
        full(dict(DELAYED, fp8_param_gather=False), H100, optimizer=dict(PRECISION_AWARE, optimizer_cpu_offload=True)),
    ),
    "PB343": (
        run("bf16_mixed", model=DENSE, optimizer=dict(OVERLAP, exp_avg_dtype="bf16"), ddp=OVERLAP),
        run("bf16_mixed", model=DENSE, optimizer=dict(PRECISION_AWARE, exp_avg_dtype="bf16"), ddp=OVERLAP),
    ),
    "PB344": (
        run("bf16_mixed", H100, model=DENSE, optimizer=dict(PRECISION_AWARE, main_params_dtype="bf16"), ddp=OVERLAP),
        run("bf16_mixed", H100, model=DENSE, optimizer=dict(PRECISION_AWARE, main_params_dtype="fp16"), ddp=OVERLAP),
    ),
    "PB345": (
        run("bf16_mixed", H100, model=DENSE, optimizer=dict(PRECISION_AWARE, optimizer="sgd"), ddp=OVERLAP),
        run("bf16_mixed", H100, model=DENSE, optimizer=PRECISION_AWARE, ddp=OVERLAP),
    ),
    "PB346": (
        run("bf16_mixed", H100, model=DENSE, optimizer={"use_precision_aware_optimizer": True}, ddp={}),
        run("bf16_mixed", H100, model=DENSE, optimizer=PRECISION_AWARE, ddp=OVERLAP),
    ),
    "PB347": (
        run(
            None,
            H100,
            model=BF16_MODEL,
            optimizer=dict(PRECISION_AWARE, bf16=True, fp8_recipe="tensorwise"),
            ddp=FP32_DDP,
        ),
        run(
            "bf16_mixed",
            H100,
            model=BF16_MODEL,
            optimizer=dict(PRECISION_AWARE, bf16=True, fp8_recipe="tensorwise"),
            ddp=FP32_DDP,
        ),
    ),
    "PB348": (full(CURRENT, H100, optimizer=PRECISION_AWARE), full(DELAYED, H100, optimizer=PRECISION_AWARE)),
    "PB349": (
        run("bf16_mixed", "h100x8,te2.0,mcore0.19.2", model=DENSE, optimizer=PRECISION_AWARE, ddp=OVERLAP),
        run("bf16_mixed", "h100x8,te2.1,mcore0.19.2", model=DENSE, optimizer=PRECISION_AWARE, ddp=OVERLAP),
    ),
    "PB350": (
        run(
            "bf16_mixed",
            "h100x8,te-none",
            model=DENSE,
            optimizer=dict(PRECISION_AWARE, store_param_remainders=False),
            ddp=OVERLAP,
        ),
        run("bf16_mixed", H100, model=DENSE, optimizer=PRECISION_AWARE, ddp=OVERLAP),
    ),
    "PB351": (
        run(
            "bf16_mixed",
            model=DENSE,
            optimizer=dict(OVERLAP, overlap_param_gather_with_optimizer_step=True),
            ddp=OVERLAP,
        ),
        run(
            "bf16_mixed",
            model=dict(DENSE, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
            optimizer=dict(OVERLAP, overlap_param_gather_with_optimizer_step=True),
            ddp=OVERLAP,
        ),
    ),
    "PB352": (
        run(
            "bf16_mixed",
            model=DENSE,
            optimizer=dict(PRECISION_AWARE, use_layer_wise_distributed_optimizer=True, store_param_remainders=False),
            ddp=OVERLAP,
        ),
        run("bf16_mixed", model=DENSE, optimizer=dict(OVERLAP, use_layer_wise_distributed_optimizer=True), ddp=OVERLAP),
    ),
    "PB353": (
        full(dict(BF16, store_param_remainders=False), H100),
        full(dict(BF16, store_param_remainders=True), H100),
    ),
    "PB354": (full(dict(BF16, muon_fp32_matmul_prec="high"), H100), full(BF16, H100)),
    "PB361": (
        run(model=BF16_MODEL, optimizer=dict(OVERLAP, bf16=True), ddp=OVERLAP),
        run("bf16_mixed", model=BF16_MODEL, optimizer=dict(OVERLAP, bf16=True), ddp=OVERLAP),
    ),
    "PB362": (
        run(dict(BF16, grad_reduce_in_fp32=False), model=DENSE, ddp=OVERLAP),
        run(BF16, model=DENSE, ddp=OVERLAP),
    ),
    "PB363": (
        run("bf16_mixed", H100, model=DENSE, optimizer=dict(PRECISION_AWARE, main_grads_dtype="bf16"), ddp=OVERLAP),
        run("bf16_mixed", H100, model=DENSE, optimizer=PRECISION_AWARE, ddp=OVERLAP),
    ),
    "PB364": (
        run(
            "bf16_mixed", model=DENSE, optimizer=OVERLAP, ddp=dict(OVERLAP, reduce_scatter_with_fp32_accumulation=True)
        ),
        run("bf16_mixed", model=DENSE, optimizer=OVERLAP, ddp=OVERLAP),
    ),
    "PB365": (
        run(
            "bf16_mixed",
            "mcore0.17",
            model=DENSE,
            optimizer=OVERLAP,
            ddp=dict(OVERLAP, param_name_patterns_for_fp32_local_accumulation=[".*norm.*"]),
        ),
        run(
            "fp16_mixed",
            "mcore0.17",
            model=DENSE,
            optimizer=OVERLAP,
            ddp=dict(OVERLAP, param_name_patterns_for_fp32_local_accumulation=[".*norm.*"]),
        ),
    ),
    "PB366": (
        run(dict(BF16_SUMS, reduce_scatter_with_fp32_accumulation=True), model=DENSE, optimizer={}, ddp={}),
        run(BF16_SUMS, model=DENSE, optimizer={}, ddp={}),
    ),
    "PB401": (run(BLOCKWISE, H100, model=SEQUENCE_PARALLEL), run(BLOCKWISE, H100, model=DENSE)),
    "PB402": (run("bf16_mixed", model=dict(DENSE, tp_comm_overlap=True)), run("bf16_mixed", model=OVERLAPPED)),
    "PB403": (full(MXFP8, B200, dict(OVERLAPPED, ffn_hidden_size=14400)), full(MXFP8, B200, OVERLAPPED)),
    "PB404": (full(dict(NVFP4, fp4_param_gather=False), B200, WEIGHT_SHARDS), full(NVFP4, B200, WEIGHT_SHARDS)),
    "PB405": (
        full(dict(MXFP8, fp8_param_gather=False, reuse_grad_buf_for_mxfp8_param_ag=False), B200, WEIGHT_SHARDS),
        full(dict(MXFP8, fp8_param_gather=False, reuse_grad_buf_for_mxfp8_param_ag=False), B200),
    ),
    "PB406": (
        run("bf16_mixed", "h100x12", model=dict(DENSE, tensor_model_parallel_size=8)),
        run("bf16_mixed", "h100x16", model=dict(DENSE, tensor_model_parallel_size=8)),
    ),
    "PB407": (
        run("bf16_mixed", model=dict(DENSE, **INTERLEAVED)),
        run("bf16_mixed", model=dict(DENSE, **INTERLEAVED, overlap_p2p_comm=True, batch_p2p_comm=False)),
    ),
    "PB408": (
        run("bf16_mixed", model=dict(DENSE, tensor_model_parallel_size=6, ffn_hidden_size=14400, num_query_groups=6)),
        run("bf16_mixed", model=dict(DENSE, tensor_model_parallel_size=8)),
    ),
    "PB421": (full(CURRENT, H100, MOE), full(CURRENT, H100, PADDED_MOE)),
    "PB422": (
        full(CURRENT, H100, dict(PADDED_MOE, moe_token_dispatcher_type="allgather")),  # noqa: S106  a dispatcher
        full(CURRENT, H100, PADDED_MOE),
    ),
    "PB423": (run("bf16_mixed", H100, model=PADDED_MOE), run("bf16_mixed", H100, model=MOE)),
    "PB424": (full(CURRENT, H100, dict(MOE, moe_router_padding_for_fp8=True)), full(CURRENT, H100, PADDED_MOE)),
    "PB425": (
        full(DELAYED, "h100x8,te1.10,cuda12.9,mcore0.16.1", dict(PADDED_MOE, moe_grouped_gemm=True)),
        full(DELAYED, "h100x8,te1.11,cuda12.9,mcore0.16.1", dict(PADDED_MOE, moe_grouped_gemm=True)),
    ),
    "PB426": (run("bf16_mixed", model=dict(MOE, moe_router_dtype=None)), run("bf16_mixed", model=MOE)),
    "PB427": (
        run("fp32", model=dict(MOE, overlap_moe_expert_parallel_comm=True)),
        run("bf16_mixed", model=dict(MOE, overlap_moe_expert_parallel_comm=True)),
    ),
    "PB428": (
        full(NVFP4, "b200x8,te2.14,cuda12.9,mcore0.18", dict(PADDED_MOE, overlap_moe_expert_parallel_comm=True)),
        full(NVFP4, B200, dict(PADDED_MOE, overlap_moe_expert_parallel_comm=True)),
    ),
    "PB429": (
        full(CURRENT, H100, dict(PADDED_MOE, use_transformer_engine_op_fuser=True)),
        full(MXFP8, B200, dict(PADDED_MOE, use_transformer_engine_op_fuser=True)),
    ),
    "PB430": (
        full(CURRENT, H100, dict(PADDED_MOE, moe_single_grouped_weight=True)),
        full(MXFP8, B200, dict(PADDED_MOE, moe_single_grouped_weight=True)),
    ),
    "PB431": (
        run("bf16_mixed", "mcore0.20", model=dict(MOE, moe_dispatch_fwd_dtype="mxfp8")),
        run("bf16_mixed", "mcore0.20", model=MOE),
    ),
    "PB432": (
        full(CURRENT, "h100x8,te2.9,cuda12.9,mcore0.20", dict(PADDED_MOE, batch_invariant_mode=True)),
        full(BF16, "h100x8,te2.9,cuda12.9,mcore0.20", dict(MOE, batch_invariant_mode=True)),
    ),
    "PB433": (
        run("fp16_mixed", "v100x8", model=dict(MOE, moe_grouped_gemm=True)),
        run("fp16_mixed", "a100x8", model=dict(MOE, moe_grouped_gemm=True)),
    ),
    "PB434": (
        full(CURRENT, "h100x8,te2.9,cuda12.9,mcore0.20", NCCLEP),
        full(CURRENT, "h100x8,te2.9,cuda12.9,mcore0.20", dict(NCCLEP, moe_expert_capacity_factor=None)),
    ),
    "PB435": (
        run(dict(BF16, moe_router_dtype="fp32"), model=DENSE),
        run(dict(BF16, moe_router_dtype="fp32"), model=MOE),
    ),
    "PB441": (
        full(dict(CURRENT, fp8_dot_product_attention=True), H100),
        full(dict(CURRENT, fp8_dot_product_attention=True), B200),
    ),
    "PB442": (
        run(dict(MXFP8_FSDP, fp8_dot_product_attention=True), "b200x8,te2.14,cuda12.9,mcore0.17", ddp=MEGATRON_FSDP),
        run(dict(MXFP8_FSDP, fp8_dot_product_attention=True), "b200x8,te2.14,cuda12.9,mcore0.18", ddp=MEGATRON_FSDP),
    ),
    "PB443": (
        full(NVFP4_ATTENTION, "b200x8,te2.14,cuda12.9,mcore0.16.1"),
        full(NVFP4_ATTENTION, "b200x8,te2.14,cuda12.9,mcore0.17"),
    ),
    "PB444": (
        run("bf16_mixed", model=dict(DENSE, apply_query_key_layer_scaling=True, attention_softmax_in_fp32=False)),
        run("bf16_mixed", model=dict(DENSE, apply_query_key_layer_scaling=True)),
    ),
    "PB445": (
        run(dict(BF16, attention_softmax_in_fp32=False), H100, model=DENSE),
        run(dict(BF16, attention_softmax_in_fp32=False), H100, model=dict(DENSE, transformer_impl="local")),
    ),
    "PB446": (
        run(dict(BF16, dsa_indexer_k_norm_fp32=True), "mcore0.19.2", model=DENSE),
        run(
            dict(BF16, dsa_indexer_k_norm_fp32=True),
            "mcore0.19.2",
            model=dict(DENSE, experimental_attention_variant="dsa"),
        ),
    ),
    "PB461": (full(DELAYED, H100, RECOMPUTED), full(DELAYED, H100, dict(RECOMPUTED, recompute_modules=["core_attn"]))),
    "PB462": (full(CURRENT, "h100x8,te2.5,cuda12.9,mcore0.16.1", RECOMPUTED), full(CURRENT, H100, RECOMPUTED)),
    "PB463": (
        full(DELAYED, H100, train={"torch_compile": True}),
        full(DELAYED, H100, train={"torch_compile": False}),
    ),
    "PB464": (
        full(CURRENT, "h100x8,te2.7,cuda12.9,mcore0.19.2", dict(DENSE, cuda_graph_impl="local")),
        full(CURRENT, H100, dict(DENSE, cuda_graph_impl="local")),
    ),
    "PB465": (
        run("bf16_mixed", model=dict(DENSE, cuda_graph_impl="full_iteration"), train={"check_for_nan_in_loss": True}),
        run("bf16_mixed", model=dict(DENSE, cuda_graph_impl="full_iteration"), train={"check_for_nan_in_loss": False}),
    ),
    "PB466": (
        full(CURRENT, H100, dict(DENSE, inference_cuda_graph_scope="block")),
        full(CURRENT, H100, dict(DENSE, inference_cuda_graph_scope="layer")),
    ),
    "PB467": (full(MXFP8, B200, dict(DENSE, transformer_impl="inference_optimized")), full(MXFP8, B200)),
    "PB468": (
        full(
            CURRENT,
            H100,
            dict(
                PADDED_MOE,
                recompute_granularity="selective",
                recompute_modules=["shared_experts"],
                cuda_graph_impl="local",
                gtp_weight_remat_size=2,
            ),
        ),
        full(
            CURRENT,
            H100,
            dict(
                PADDED_MOE,
                recompute_granularity="selective",
                recompute_modules=["shared_experts"],
                cuda_graph_impl="local",
            ),
        ),
    ),
    "PB501": (
        full(CURRENT, H100, dict(DENSE, seq_length=1000), train={"micro_batch_size": 1}),
        full(CURRENT, H100, dict(DENSE, seq_length=1024), train={"micro_batch_size": 1}),
    ),
    "PB502": (
        full(CURRENT, H100, dict(DENSE, ffn_hidden_size=11000)),
        full(CURRENT, H100, dict(DENSE, ffn_hidden_size=11008)),
    ),
    "PB503": (
        run(
            BLOCKWISE,
            H100,
            model=dict(
                DENSE,
                ffn_hidden_size=11008,
                tensor_model_parallel_size=8,
                num_query_groups=8,
                hidden_size=16384,
                num_attention_heads=128,
            ),
        ),
        run(
            BLOCKWISE,
            H100,
            model=dict(
                DENSE, ffn_hidden_size=16384, tensor_model_parallel_size=8, hidden_size=16384, num_attention_heads=128
            ),
        ),
    ),
    "PB504": (
        full(CURRENT, H100, data={"packing": True, "pad_multiple": 8}),
        full(CURRENT, H100, data={"packing": True, "pad_multiple": 16}),
    ),
    "PB505": (
        full(CURRENT_ALL, H100, dict(HYBRID, mamba_num_heads=130)),
        full(CURRENT_ALL, H100, dict(HYBRID, mamba_num_heads=128)),
    ),
    "PB506": (
        full(CURRENT, H100, dict(DENSE, hidden_size=1024, num_attention_heads=8, ffn_hidden_size=4096)),
        full(CURRENT, H100, DENSE),
    ),
    "PB521": (
        run(
            {"bf16": True, "fp8": "hybrid", "fp8_recipe": "blockwise"},
            B200,
            environment={"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"},
        ),
        run({"bf16": True, "fp8": "hybrid", "fp8_recipe": "blockwise"}, B200, environment={}),
    ),
    "PB522": (
        run("bf16_mixed", model=dict(DENSE, apply_query_key_layer_scaling=True), environment={}),
        run(
            "bf16_mixed",
            model=dict(DENSE, apply_query_key_layer_scaling=True),
            environment={"NVTE_APPLY_QK_LAYER_SCALING": "1"},
        ),
    ),
    "PB523": (
        run("bf16_mixed", model=dict(DENSE, deterministic_mode=True), environment={}),
        run(
            "bf16_mixed",
            model=dict(DENSE, deterministic_mode=True),
            environment={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
        ),
    ),
    "PB524": (
        run("bf16_mixed", model=DENSE, environment={"ACCELERATE_MIXED_PRECISION": "fp16"}),
        run("bf16_mixed", model=DENSE, environment={"ACCELERATE_MIXED_PRECISION": "bf16"}),
    ),
    "PB525": (
        full(dict(CURRENT, fp8_dot_product_attention=True), B200, environment={"NVTE_DPA_FP8_RECIPE": "F16"}),
        full(CURRENT, B200, environment={"NVTE_DPA_FP8_RECIPE": "F16"}),
    ),
    "PB526": (
        full(DELAYED, H100, environment={"NVTE_BACKWARD_OVERRIDE": "dequantized"}),
        full(DELAYED, H100, environment={}),
    ),
    "PB527": (
        full(NVFP4, B200, environment={"NVTE_NVFP4_DISABLE_RHT": "1"}),
        full(NVFP4, B200, environment={"NVTE_NVFP4_DISABLE_RHT": "0"}),
    ),
    "PB541": (
        full(CURRENT, H100, checkpoint={"fp8": "hybrid", "fp8_recipe": "delayed", "bf16": True}),
        full(CURRENT, H100, checkpoint={"fp8": "hybrid", "fp8_recipe": "tensorwise", "bf16": True}),
    ),
    "PB542": (
        full(DELAYED, "h100x8,te2.20,cuda12.9,mcore0.19.2", checkpoint={}, environment={}),
        full(
            DELAYED,
            "h100x8,te2.20,cuda12.9,mcore0.19.2",
            checkpoint={},
            environment={"NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "1"},
        ),
    ),
    "PB543": (
        full(CURRENT, H100, train={"stream_ckpt_dequant": True}),
        full(MXFP8, B200, train={"stream_ckpt_dequant": True}),
    ),
    "PB544": (
        full(CURRENT | {"fp8_param_gather": False}, H100, peft={"dim": 8}),
        full(CURRENT | {"fp8_param_gather": False}, H100, peft={"dim": 16}),
    ),
    "PB545": (full(CURRENT, H100, peft={"dim": 16}), full(BF16, H100, peft={"dim": 16})),
    "PB601": (run(CURRENT), run(CURRENT, H100)),
    "PB602": (full(CURRENT, "a100x8,te2.9,cuda12.9,mcore0.19.2"), full(CURRENT, "l40x8,te2.9,cuda12.9,mcore0.19.2")),
    "PB603": (full(MXFP8, "rtxprox8,te2.14,cuda12.9,mcore0.19.2"), full(MXFP8, "b300x8,te2.14,cuda12.9,mcore0.19.2")),
    "PB604": (full(NVFP4, "rtxprox8,te2.14,cuda12.9,mcore0.19.2"), full(NVFP4, B200)),
    "PB605": (run(BLOCKWISE, "h100x8,te2.9,cuda12.4"), run(BLOCKWISE, "h100x8,te2.9,cuda12.9")),
    "PB606": (full(CURRENT, "h100x8,te2.1,cuda12.9,mcore0.19.2"), full(CURRENT, H100)),
    "PB607": (full(CURRENT, "h100x8,mcore0.19.2"), full(CURRENT, H100)),
    "PB608": (full(CURRENT, "h100x8,te-none,mcore0.19.2"), full(CURRENT, H100)),
    "PB609": (run(BLOCKWISE, B200), run(BLOCKWISE, H100)),
    "PB610": (run(BLOCKWISE, "b200x8,te2.8,cuda12.9"), run(BLOCKWISE, B200)),
    "PB611": (full(CURRENT, "cpu,mcore0.19.2"), full(BF16, "cpu,mcore0.19.2")),
    "PB612": (full(CURRENT, "cpu,mcore0.19.2", backend="te"), full(CURRENT, H100, backend="te")),
    "PB613": (run("bf16_mixed", "v100x8"), run("bf16_mixed", "a100x8")),
    "PB614": (full(CURRENT, "mi300xx8,mcore0.19.2"), full(CURRENT, H100)),
    "PB615": (
        full(dict(CURRENT, fp8_dot_product_attention=True), H100, backend="emulated"),
        full(CURRENT, H100, backend="emulated"),
    ),
    "PB616": (
        run(CUSTOM, H100, model=dict(DENSE, fp8_quantizer_factory="house.quantizers.make"), backend="emulated"),
        run(CURRENT, H100, model=DENSE, backend="emulated"),
    ),
    "PB617": (run(BLOCKWISE, "rtx50x8,te2.14,cuda12.9"), run(BLOCKWISE, B200)),
    "PB618": (
        full("bf16_mixed", "h100x8,mcore0.19.2", dict(DENSE, seq_length=16384)),
        full("bf16_mixed", "h200x8,mcore0.19.2", dict(DENSE, seq_length=16384)),
    ),
}
"""Rule -> (breaks, passes)."""
