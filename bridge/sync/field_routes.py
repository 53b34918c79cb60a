"""The table of routes: the attributes in Megatron's configs that each field of a precision sets.

    get_routes("fp8_recipe")    # a route to the model, and one to the optimizer

The table was read in megatron-core 0.16.1, 0.17.1, 0.18.2, 0.19.2 and Megatron-LM main of
2026-08-22. The plan, `explain`, the reference page and the completeness test use its rows.
`route_notes.yaml` has a note and the source of each row.
"""

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from bridge.precision.package_yaml import load_package_yaml
from bridge.precision.precision_config import FIELDS

OWNER_CLASS_NAMES = {
    "model": "TransformerConfig",
    "optimizer": "OptimizerConfig",
    "ddp": "DistributedDataParallelConfig",
    "train": "TrainConfig",
    "process": "the process",
}
"""Owner name -> the class of Megatron."""

OLDEST_VERSION = "0.16.1"
"""The oldest megatron-core that the table covers."""
CLASS_DEFAULT = "<Megatron's own default>"
"""The neutral value of a row whose attribute gets Megatron's class default."""


@dataclass(frozen=True, kw_only=True)
class Route:
    """A field of the precision, an attribute of an owner, and the rule that decides its value."""

    field: str
    owner: str
    attribute: str | None
    """The name of the attribute. None: the field has no attribute, for the reason in its note."""
    family: str | None
    """The row acts only while this family is on: fp8, fp4, or low for either. None: always.

    Otherwise the attribute gets the neutral value.
    """
    rule: str
    """The rule that decides the value:

    - switch: always written;
    - value: written if stated, else a set value of the owner stays, else the default is written;
    - count: written if stated, else left as it is if Megatron's class has a default;
    - stated: written if stated, else left as it is;
    - dtype, autocast dtype: written as stated, or derived from the mode;
    - none: nothing is written.
    """
    scheme: str | None = None
    """The row acts only under this scaling scheme. None: under any scheme."""
    neutral: object = CLASS_DEFAULT
    """The value of the attribute while the row does not act."""
    is_harmless: bool = False
    """Whether a stated value is written even while the row does not act."""
    read_under: str | None = None
    """A switch of the owner. While it is on, Megatron reads the attribute even if the family is off.

    No value is neutral then, so the value of the owner stays.
    """
    since: str = OLDEST_VERSION
    """The first megatron-core that is known to have the attribute."""


def _make_route(
    owner: str, field: str, rule: str, attribute: str | None = "", **more: Any
) -> Route:
    """Return a row. The attribute has the field's name unless another name is stated."""
    if attribute == "":
        attribute = field
    family = FIELDS[field].family
    return Route(field=field, owner=owner, attribute=attribute, family=family, rule=rule, **more)


_model = partial(_make_route, "model")
_optimizer = partial(_make_route, "optimizer")
_ddp = partial(_make_route, "ddp")

ROUTES: tuple[Route, ...] = (
    _model("fp32", "none", None),
    _model("fp16", "switch"),
    _optimizer("fp16", "switch"),
    _model("bf16", "switch"),
    _optimizer("bf16", "switch"),
    _model("params_dtype", "dtype"),
    _optimizer("params_dtype", "dtype"),
    _model("pipeline_dtype", "dtype"),
    _model("autocast_enabled", "value", "enable_autocast"),
    _model("autocast_dtype", "autocast dtype"),
    _ddp("grad_reduce_in_fp32", "value"),
    _model("fp8", "switch"),
    _model("fp8_recipe", "value"),
    _optimizer("fp8_recipe", "value", neutral=None, read_under="use_precision_aware_optimizer"),
    _model("first_last_layers_bf16", "value", neutral=False, is_harmless=True),
    _model("num_layers_at_start_in_bf16", "count"),
    _model("num_layers_at_end_in_bf16", "count"),
    _model("fp8_margin", "value"),
    _model("fp8_amax_history_len", "value"),
    _model("fp8_amax_compute_algo", "value"),
    _model("fp8_wgrad", "value"),
    _model("fp8_dot_product_attention", "value"),
    _model("fp8_multi_head_attention", "value"),
    _model("fp8_param", "value", neutral=False),
    _ddp("fp8_param_gather", "value", neutral=False),
    _model("fp4", "switch"),
    _model("fp4_recipe", "value"),
    _model("fp4_param", "value", neutral=False),
    _ddp("fp4_param_gather", "value", neutral=False, since="0.17.1"),
    _optimizer("loss_scale", "value"),
    _optimizer("initial_loss_scale", "value"),
    _optimizer("min_loss_scale", "value"),
    _optimizer("loss_scale_window", "value"),
    _optimizer("hysteresis", "value"),
    _optimizer("reuse_grad_buf_for_mxfp8_param_ag", "value", scheme="mxfp8", neutral=False),
    _ddp("reuse_grad_buf_for_mxfp8_param_ag", "value", scheme="mxfp8", neutral=False),
    _model("modules", "value", "quant_recipe"),
    _make_route("process", "tf32", "none", "float32_matmul_precision"),
    _model("fp32_residual_connection", "stated"),
    _model("disable_bf16_reduced_precision_matmul", "stated"),
    _model("deterministic_mode", "stated"),
    _model("batch_invariant_mode", "stated"),
    _model("mamba_training_ssm_states_dtype", "stated", since="0.19"),
    _model("attention_softmax_in_fp32", "stated"),
    _model("apply_query_key_layer_scaling", "stated"),
    _model("dsa_indexer_k_norm_fp32", "stated", since="0.19"),
    _optimizer("use_precision_aware_optimizer", "stated"),
    _optimizer("main_grads_dtype", "stated"),
    _optimizer("main_params_dtype", "stated"),
    _optimizer("exp_avg_dtype", "stated"),
    _optimizer("exp_avg_sq_dtype", "stated"),
    _optimizer("store_param_remainders", "stated"),
    _optimizer("muon_fp32_matmul_prec", "stated"),
    _ddp("reduce_scatter_with_fp32_accumulation", "stated"),
    _ddp("param_name_patterns_for_fp32_local_accumulation", "stated", since="0.17"),
    _ddp("megatron_fsdp_main_params_dtype", "stated", since="0.17"),
    _ddp("megatron_fsdp_main_grads_dtype", "stated", since="0.17"),
    _ddp("megatron_fsdp_grad_comm_dtype", "stated", since="0.17"),
    _ddp("megatron_fsdp_use_decoupled_grad", "stated", since="0.18"),
    _ddp("keep_fp8_transpose_cache", "stated"),
    _model("moe_router_dtype", "stated"),
    _model("moe_router_padding_for_quantization", "stated", neutral=False),
    _model("moe_dispatch_fwd_dtype", "stated", since="0.20"),
    _model("moe_combine_bwd_dtype", "stated", since="0.20"),
    _model("fp8_output_proj", "stated", scheme="mxfp8", neutral=False, since="0.18"),
    _model("tp_only_amax_red", "stated"),
    _model("fp8_quantizer_factory", "stated"),
    _model("activation_func_fp8_input_store", "stated"),
    _model("fp4_quantizer_factory", "stated"),
)


def get_routes(field: str) -> list[Route]:
    """Return every row of `field`."""
    return [route for route in ROUTES if route.field == field]


@cache
def load_route_notes() -> dict[str, dict[str, Any]]:
    """Return owner name -> field -> note and source.

    The key "not_routed" has owner name -> field of Megatron -> the reason why no field of a
    precision sets it.
    """
    notes: dict[str, dict[str, Any]] = load_package_yaml(
        Path(__file__).with_name("route_notes.yaml")
    )
    return notes
