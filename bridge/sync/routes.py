"""THE table: where every field of a precision config lives in Megatron Core, and by which rule it gets there.

Read in megatron-core 0.16.1, 0.17.1, 0.18.2, 0.19.2 and Megatron-LM main of 2026-08-22. The plan, `explain`, the
reference page and the completeness test all read these rows.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from bridge.precision.config import FIELDS

OWNERS = {
    "model": "TransformerConfig",
    "optimizer": "OptimizerConfig",
    "ddp": "DistributedDataParallelConfig",
    "train": "TrainConfig",
    "process": "the process",
}
"""Role -> class that plays it."""

FIRST = "0.16.1"
"""The oldest megatron-core that was read."""
LAST = "0.19.2"
"""The newest release that was read."""
CLASS_DEFAULT = "<Megatron's own default>"


@dataclass(frozen=True, kw_only=True)
class Route:
    """One row: a field of the config, one home of it, and the rule that decides what is written there."""

    field: str
    owner: str
    attribute: str | None
    """Name in the owner; None: the field has no attribute of its own there, and `note` says why."""
    family: str | None
    """fp8, fp4 or low (either): the row acts only while that family is on, and is neutralised otherwise."""
    rule: str
    """switch: always written. value: written if stated, else the owner's own value stays, else the default is written.
    count: written if stated, else left where Megatron's class has a default. stated: written if stated, else left.
    dtype: stated or derived from the mode. none: nothing is written."""
    scheme: str | None = None
    """The row acts only under this scaling scheme, and is neutralised otherwise."""
    neutral: object = CLASS_DEFAULT
    """The value of the attribute while the row does not act."""
    is_harmless: bool = False
    """Stated, it is written even while the row does not act."""
    since: str = FIRST
    """First megatron-core known to have the attribute."""
    note: str = ""
    source: str = ""


def _route(owner: str, field: str, rule: str, attribute: str | None = "", *, at: str = "", **more: Any) -> Route:
    """Return a row; `at` is a file and line of the first release that was read and has the attribute."""
    if at:
        more["source"] = f"{at}, megatron-core {FIRST if more.get('since', FIRST) == FIRST else LAST}"
    named = field if attribute == "" else attribute
    return Route(field=field, owner=owner, attribute=named, family=FIELDS[field].family, rule=rule, **more)


_model, _optimizer, _ddp = (partial(_route, owner) for owner in ("model", "optimizer", "ddp"))

_SCALER = "Read only by the grad scaler of an FP16 run without a constant loss scale (optimizer/__init__.py)."
_PLACEMENT = "Counts whole layers over all pipeline stages (fp8_utils.is_first_last_bf16_layer)."
_STATES = "Read by the precision-aware optimizer alone; Megatron refuses another value than fp32 without it."
_SHARDED = "Read by Megatron-FSDP alone."
_EXPERT_WIRE = "Needs the flex dispatcher with ncclep, the op fuser and grouped GEMMs."
_EXPERT_SOURCE = "transformer/moe/token_dispatcher.py:1591, Megatron-LM main of 2026-08-22"
_FSDP_POLICY = "distributed/fsdp/mcore_fsdp_adapter.py:134"

ROUTES: tuple[Route, ...] = (
    _model(
        "fp32",
        "none",
        None,
        note="Megatron has no such field: fp32 means fp16 and bf16 off and FP32 dtypes, and that is what is written.",
    ),
    _model("fp16", "switch", note="Casts the weights (Float16Module) and makes the optimizer keep FP32 masters."),
    _optimizer("fp16", "switch", note="Chooses the mixed-precision optimizer and its grad scaler."),
    _model("bf16", "switch", note="Casts the weights (Float16Module) and makes the optimizer keep FP32 masters."),
    _optimizer("bf16", "switch", note="Chooses the mixed-precision optimizer."),
    _model("params_dtype", "dtype", note="Dtype the weights are created in; the cast to the mode's dtype comes later."),
    _optimizer("params_dtype", "dtype", note="No reader in Megatron's optimizer; kept equal to the model's."),
    _model("pipeline_dtype", "dtype", note="Dtype of the receive buffers between pipeline stages; required if PP > 1."),
    _model("autocast_enabled", "value", "enable_autocast", note="Megatron's own name is enable_autocast."),
    _model(
        "autocast_dtype",
        "autocast dtype",
        note="Computed once from params_dtype in __post_init__ and stale after later changes; recomputed here.",
    ),
    _ddp(
        "grad_reduce_in_fp32",
        "value",
        note="Decides the dtype of the gradient buffer, hence of accumulation and reduction. Megatron-FSDP of 0.19 and "
        "later ignores it; there megatron_fsdp_main_grads_dtype decides.",
        source="distributed_data_parallel.py, megatron-core 0.16.1; mcore_fsdp_adapter.py, 0.19.2",
    ),
    _model("fp8", "switch", note="The format; None is off. Megatron checks the value at the first FP8 GEMM only."),
    _model("fp8_recipe", "value", note="Megatron's default is delayed, the config's is tensorwise."),
    _optimizer(
        "fp8_recipe",
        "value",
        neutral=None,
        note="Anything but None or delayed sends the precision-aware optimizer down its FP8 branch, so it is None "
        "unless FP8 is on.",
        source="optimizer_config.py __post_init__, megatron-core 0.16.1 and 0.19.2",
    ),
    _model("first_last_layers_bf16", "value", neutral=False, is_harmless=True, note=_PLACEMENT),
    _model("num_layers_at_start_in_bf16", "count", note=f"{_PLACEMENT} Unstated, Megatron's own 1 stays."),
    _model("num_layers_at_end_in_bf16", "count", note=f"{_PLACEMENT} Unstated, Megatron's own 1 stays."),
    _model("fp8_margin", "value", note="Reaches Transformer Engine under delayed scaling only."),
    _model("fp8_amax_history_len", "value", note="Reaches Transformer Engine under delayed scaling only."),
    _model("fp8_amax_compute_algo", "value", note="Reaches Transformer Engine under delayed scaling only."),
    _model(
        "fp8_wgrad",
        "value",
        note="Without effect: Transformer Engine dropped the override in 2.0 and ignores the keyword.",
        source="Transformer Engine common/recipe, 2.20",
    ),
    _model(
        "fp8_dot_product_attention",
        "value",
        note="Under delayed and tensorwise; mxfp8 from megatron-core 0.18, nvfp4 from 0.17; never blockwise or custom.",
    ),
    _model("fp8_multi_head_attention", "value", note="Reaches Transformer Engine under delayed scaling only."),
    _model("fp8_param", "value", neutral=False, note="Must equal ddp.fp8_param_gather."),
    _ddp(
        "fp8_param_gather",
        "value",
        neutral=False,
        note="Must equal model.fp8_param: since 0.17.1 the distributed optimizer updates FP8 weights only with it.",
        source="distrib_optimizer.py, megatron-core 0.19.2",
    ),
    _model("fp4", "switch", note="The format; None is off."),
    _model("fp4_recipe", "value"),
    _model("fp4_param", "value", neutral=False, note="Must equal ddp.fp4_param_gather."),
    _ddp(
        "fp4_param_gather",
        "value",
        neutral=False,
        since="0.17.1",
        note="Before 0.17.1 neither DDP nor the distributed optimizer knows FP4 weights.",
    ),
    _optimizer("loss_scale", "value", note="Above 0: a constant scale in any mode. None: dynamic under FP16."),
    _optimizer("initial_loss_scale", "value", note=_SCALER),
    _optimizer("min_loss_scale", "value", note=_SCALER),
    _optimizer("loss_scale_window", "value", note=f"{_SCALER} Compared by == with a count of steps."),
    _optimizer("hysteresis", "value", note=f"{_SCALER} Refilled only when the scale grows."),
    _optimizer("reuse_grad_buf_for_mxfp8_param_ag", "value", scheme="mxfp8", neutral=False),
    _ddp(
        "reuse_grad_buf_for_mxfp8_param_ag",
        "value",
        scheme="mxfp8",
        neutral=False,
        note="Needs fp8_param_gather; must equal the optimizer's.",
    ),
    _model(
        "modules",
        "value",
        "quant_recipe",
        note="Rows become Megatron's configs and matchers; rows that name layers become those of each pipeline stage.",
        source="quantization/quant_config.py, megatron-core 0.16.1 and 0.19.2",
    ),
    _route(
        "process",
        "tf32",
        "none",
        "float32_matmul_precision",
        note="A switch of torch, not of an owner: set and reported when the run starts.",
    ),
    _model(
        "fp32_residual_connection",
        "stated",
        note="From 0.17 on it makes pipeline_dtype FP32 in __post_init__.",
        at="models/common/embeddings/language_model_embedding.py:131",
    ),
    _model(
        "disable_bf16_reduced_precision_matmul",
        "stated",
        note="Sets torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction when the config is made.",
        at="transformer/transformer_config.py:921",
    ),
    _model(
        "mamba_training_ssm_states_dtype",
        "stated",
        since="0.19",
        note="Needs a mamba_ssm that knows state_dtype.",
        at="ssm/mamba_mixer.py:227",
    ),
    _model("attention_softmax_in_fp32", "stated", at="transformer/dot_product_attention.py:106"),
    _model(
        "apply_query_key_layer_scaling",
        "stated",
        note="Under Transformer Engine it must equal the variable NVTE_APPLY_QK_LAYER_SCALING.",
        at="extensions/transformer_engine.py:1179",
    ),
    _model(
        "dsa_indexer_k_norm_fp32", "stated", since="0.19", at="transformer/experimental_attention_variant/dsa.py:1297"
    ),
    _optimizer(
        "use_precision_aware_optimizer",
        "stated",
        note="Needs Transformer Engine's FusedAdam and the distributed optimizer.",
        at="optimizer/optimizer_config.py:376",
    ),
    _optimizer(
        "main_grads_dtype",
        "stated",
        note="No reader outside Megatron's own checks: ddp.grad_reduce_in_fp32 decides.",
        at="optimizer/optimizer_config.py:416",
    ),
    _optimizer("main_params_dtype", "stated", note=_STATES, at="optimizer/__init__.py:382"),
    _optimizer("exp_avg_dtype", "stated", note=_STATES, at="optimizer/__init__.py:368"),
    _optimizer("exp_avg_sq_dtype", "stated", note=_STATES, at="optimizer/__init__.py:369"),
    _optimizer(
        "store_param_remainders",
        "stated",
        note="Acts on FP32 masters of BF16 weights that Transformer Engine's Adam holds.",
        at="optimizer/__init__.py:387",
    ),
    _optimizer("muon_fp32_matmul_prec", "stated", at="optimizer/muon.py:265"),
    _ddp(
        "reduce_scatter_with_fp32_accumulation",
        "stated",
        note="Needs the distributed optimizer; not with num_distributed_optimizer_instances > 1.",
        at="distributed/param_and_grad_buffer.py:159",
    ),
    _ddp(
        "param_name_patterns_for_fp32_local_accumulation",
        "stated",
        since="0.17",
        note="Megatron refuses it together with grad_reduce_in_fp32.",
        at="distributed/param_and_grad_buffer.py:1365",
    ),
    _ddp("megatron_fsdp_main_params_dtype", "stated", since="0.17", note=_SHARDED, at=_FSDP_POLICY),
    _ddp("megatron_fsdp_main_grads_dtype", "stated", since="0.17", note=_SHARDED, at=_FSDP_POLICY),
    _ddp("megatron_fsdp_grad_comm_dtype", "stated", since="0.17", note=_SHARDED, at=_FSDP_POLICY),
    _ddp(
        "megatron_fsdp_use_decoupled_grad",
        "stated",
        since="0.18",
        note=f"{_SHARDED} The precision-aware optimizer reads what it writes.",
        at="distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:3369",
    ),
    _ddp(
        "keep_fp8_transpose_cache",
        "stated",
        note=_SHARDED,
        at="distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py:2233",
    ),
    _model("moe_router_dtype", "stated", at="transformer/moe/router.py:96"),
    _model(
        "moe_router_padding_for_quantization", "stated", neutral=False, at="transformer/moe/token_dispatcher.py:617"
    ),
    _model("moe_dispatch_fwd_dtype", "stated", since="0.20", note=_EXPERT_WIRE, source=_EXPERT_SOURCE),
    _model("moe_combine_bwd_dtype", "stated", since="0.20", note=_EXPERT_WIRE, source=_EXPERT_SOURCE),
    _model(
        "fp8_output_proj",
        "stated",
        scheme="mxfp8",
        neutral=False,
        since="0.18",
        note="GPT models only.",
        at="transformer/transformer_config.py:1442",
    ),
    _model(
        "tp_only_amax_red",
        "stated",
        note="Reaches Transformer Engine under delayed scaling only.",
        at="fp8_utils.py:624",
    ),
    _model(
        "fp8_quantizer_factory",
        "stated",
        note="Read under the scheme custom only, which needs it.",
        at="fp8_utils.py:574",
    ),
    _model(
        "activation_func_fp8_input_store",
        "stated",
        note="SwiGLU only, and read by Megatron's fused activation alone.",
        at="transformer/mlp.py:179",
    ),
    _model(
        "fp4_quantizer_factory",
        "stated",
        note="Read under the scheme custom only, which needs it.",
        at="fp4_utils.py:107",
    ),
)

_KERNEL = "chooses a kernel; the formats stay as they are"
_KITCHEN = "another library of quantisers, with recipes of its own"
_INFERENCE = "read in inference alone"
_ORDER = "the order of additions, not their format"

NOT_ROUTED = {
    ("model", "fp8_interval"): "Transformer Engine ignores it since 1.8",
    ("model", "moe_router_padding_for_fp8"): "the old name of moe_router_padding_for_quantization",
    ("model", "disable_parameter_transpose_cache"): "a cached copy of the weights: memory, not values",
    ("model", "use_grouped_gemm_for_dense_mlp"): _KERNEL,
    ("model", "flash_attention_version"): _KERNEL,
    ("model", "use_kitchen"): _KITCHEN,
    ("model", "use_kitchen_attention"): _KITCHEN,
    ("model", "kitchen_attention_backend"): _KITCHEN,
    ("model", "batch_invariant_mode"): _ORDER,
    ("model", "batch_invariant_backend"): _ORDER,
    ("model", "inference_grouped_gemm_backend"): _INFERENCE,
    ("model", "inference_moe_disable_fused_quant_kernels"): _INFERENCE,
    ("optimizer", "overlap_param_gather"): "the time of a message, not its format",
    (
        "ddp",
        "preserve_fp32_weights",
    ): "Megatron-FSDP of 0.16 alone; later releases have megatron_fsdp_main_params_dtype",
    ("ddp", "megatron_fsdp_cuda_graph_mode"): "memory under CUDA graphs; the dtypes stay as they are",
    ("ddp", "megatron_fsdp_enable_fine_grained_param_gather"): "the time of a message, not its format",
}
"""Role and field of Megatron that speaks of a precision -> why no recipe states it."""


def routes_of(field: str) -> list[Route]:
    """Return every row of `field`."""
    return [route for route in ROUTES if route.field == field]
