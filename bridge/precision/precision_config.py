"""`PrecisionConfig`: the fields of a precision, its mode and its scaling scheme.

`bridge.registry.mixed_precision_config.MixedPrecisionConfig`, the public class, adds `setup` and `finalize`. The
rules, the plan and the synchroniser need this base only.

The first 31 fields are the fields of Megatron Bridge's `MixedPrecisionConfig` (snapshot
2026-08-22), in its order, with its defaults. `tf32` follows. Then come the other fields of
Megatron's configs that decide a precision, under Megatron's names, and `modules`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from bridge.errors import PrecisionTypeError
from bridge.precision import subjects
from bridge.precision.coercion import LAZY_TORCH, DType
from bridge.precision.schemes import Scheme
from bridge.precision.stated_field import KEY, get_field_descriptors, precision_field
from bridge.precision.statements import (
    ORIGIN,
    Statements,
    get_field_value,
    is_reset_to_none,
    list_field_names,
)

if not TYPE_CHECKING:
    torch = LAZY_TORCH  # `typing.get_type_hints` evaluates the annotations below

MODE_SWITCHES = ("fp32", "fp16", "bf16", "fp8", "fp4")
"""The switches of the mode and the formats. An unstated switch is off."""

_megatron_field = partial(precision_field, unstates=True)
"""A field of Megatron's configs. Setting it to None removes its statement."""
_storage_switch = partial(precision_field, kind="bool", unstates=True, stores_weights=True)
"""A switch that stores weights in FP8 or FP4."""
_CUSTOM_SCHEME: dict[str, Any] = {"schemes": ("custom",), "optional": True, "is_live": True}
_STATE_DTYPES = ("fp32", "fp16", "bf16", "uint8")
_FP8_STATE_SPELLING = (("fp8", "uint8"),)
"""Megatron-LM's name for a one-byte optimizer state -> its dtype."""


@dataclass(kw_only=True, repr=False, eq=False)
class PrecisionConfig(Statements):
    """The precision of a training run, with a record of the fields that were stated.

    A field is *stated* if it is passed to the constructor, assigned, or overridden on a command
    line. `del` removes the statement. Copies, pickles and `dataclasses.replace` keep the statements.
    """

    _origin: InitVar[PrecisionConfig | None] = ORIGIN

    fp32: bool = precision_field(False, "bool", subjects.MODE, flag=None)
    """Train in FP32: no half-precision weights. Megatron has no such switch; it means `fp16` and
    `bf16` off.
    """
    fp16: bool = precision_field(False, "bool", subjects.MODE)
    """Train in FP16 with FP32 master weights and a loss scale."""
    bf16: bool = precision_field(False, "bool", subjects.MODE)
    """Train in BF16 with FP32 master weights."""
    params_dtype: DType | None = precision_field(
        None, "dtype", subjects.WEIGHTS, unstates=True, flag=KEY
    )
    """Dtype of the weights. None: the dtype of the mode."""
    pipeline_dtype: DType | None = precision_field(
        None, "dtype", subjects.WIRE, unstates=True, flag=KEY
    )
    """Dtype of the tensors that pipeline stages send. None: the dtype of the mode."""
    autocast_dtype: DType | None = precision_field(
        None, "dtype", subjects.COMPUTE, unstates=True, flag=KEY
    )
    """Dtype that torch.autocast casts to. None: `params_dtype`. It has an effect only with
    `autocast_enabled`.
    """
    autocast_enabled: bool = precision_field(False, "bool", subjects.COMPUTE)
    """Run the forward pass under torch.autocast. Megatron's name of it is `enable_autocast`."""
    grad_reduce_in_fp32: bool = precision_field(True, "bool", subjects.WEIGHTS)
    """Accumulate and reduce gradients in FP32 instead of the weights' dtype."""
    fp8: str | None = precision_field(
        None, "name", subjects.FP8, optional=True, examples=("hybrid", "e4m3"), is_live=True
    )
    """FP8 format: "e4m3", or "hybrid" for E4M3 forward and E5M2 gradients. None: no FP8."""
    fp8_recipe: str = precision_field(
        "tensorwise", "name", subjects.FP8, optional=True, family="fp8", is_live=True
    )
    """FP8 scaling scheme: tensorwise (current scaling), delayed, blockwise, mxfp8 or custom."""
    first_last_layers_bf16: bool = precision_field(
        False, "bool", subjects.LAYERS, family="low", is_live=True
    )
    """Keep the first and last layers in BF16 where the rest runs in FP8 or FP4."""
    fp8_margin: int = precision_field(
        0, "int", subjects.FP8, family="fp8", schemes=("delayed",), is_live=True
    )
    """Delayed scaling: scales are divided by 2 to this power."""
    fp8_amax_history_len: int = precision_field(
        1, "int", subjects.FP8, family="fp8", schemes=("delayed",), is_live=True
    )
    """Delayed scaling: steps of amax history kept per tensor."""
    fp8_amax_compute_algo: str = precision_field(
        "most_recent", "name", subjects.FP8, family="fp8", schemes=("delayed",), is_live=True
    )
    """Delayed scaling: "max" or "most_recent" of the history."""
    fp8_wgrad: bool = precision_field(True, "bool", subjects.FP8, family="fp8", is_live=True)
    """Run the weight-gradient GEMM in FP8. Transformer Engine 2.0 and later cannot turn it off."""
    fp8_dot_product_attention: bool = precision_field(
        False,
        "bool",
        subjects.ATTENTION,
        family="low",
        schemes=("delayed", "tensorwise", "mxfp8", "nvfp4"),
        flag=KEY,
    )
    """Run the attention core in FP8; not with blockwise scaling."""
    fp8_multi_head_attention: bool = precision_field(
        False, "bool", subjects.ATTENTION, family="fp8", schemes=("delayed",), flag=KEY
    )
    """Delayed scaling: keep FP8 between the attention core and its projections."""
    fp8_param: bool = _storage_switch(
        False, subject=subjects.FP8, twin="fp8_param_gather", family="fp8", flag=None
    )
    """Store the weights in FP8. The same setting as `fp8_param_gather`, by the model's name for it.
    """
    fp8_param_gather: bool = _storage_switch(
        False, subject=subjects.FP8, twin="fp8_param", leads=True, family="fp8"
    )
    """Store the weights in FP8 and gather them as FP8, by the DDP config's name for it."""
    fp4: str | None = precision_field(
        None, "name", subjects.FP4, optional=True, examples=("e2m1",), is_live=True
    )
    """FP4 format: "e2m1". None: no FP4."""
    fp4_recipe: str = precision_field(
        "nvfp4", "name", subjects.FP4, optional=True, family="fp4", is_live=True
    )
    """FP4 scaling scheme: nvfp4 or custom."""
    fp4_param: bool = _storage_switch(
        False, subject=subjects.FP4, twin="fp4_param_gather", family="fp4", flag=None
    )
    """Store the weights in FP4. The same setting as `fp4_param_gather`, by the model's name for it.
    """
    fp4_param_gather: bool = _storage_switch(
        False, subject=subjects.FP4, twin="fp4_param", leads=True, family="fp4"
    )
    """Store the weights in FP4 and gather them as FP4, by the DDP config's name for it."""
    loss_scale: float | None = precision_field(None, "float", subjects.SCALER, optional=True)
    """A constant loss scale. None: a dynamic scale in FP16, and no scale in another mode."""
    initial_loss_scale: float | None = precision_field(
        4294967296, "float", subjects.SCALER, optional=True
    )
    """FP16, dynamic: the scale with which the run begins."""
    min_loss_scale: float = precision_field(1.0, "float", subjects.SCALER)
    """FP16, dynamic: the scale never falls below this."""
    loss_scale_window: float = precision_field(1000, "float", subjects.SCALER)
    """FP16, dynamic: steps without overflow after which the scale doubles; a whole number."""
    hysteresis: int = precision_field(2, "int", subjects.SCALER)
    """FP16, dynamic: the number of overflows after which the scale halves."""
    num_layers_at_start_in_bf16: int = precision_field(0, "int", subjects.LAYERS, is_live=True)
    """Layers at the start kept in BF16 under `first_last_layers_bf16`; unstated: the count in the
    model config (1).
    """
    num_layers_at_end_in_bf16: int = precision_field(0, "int", subjects.LAYERS, is_live=True)
    """Layers at the end kept in BF16 under `first_last_layers_bf16`; unstated: the count in the
    model config (1).
    """
    reuse_grad_buf_for_mxfp8_param_ag: bool = precision_field(
        False,
        "bool",
        subjects.FP8,
        needs="fp8_param_gather",
        stores_weights=True,
        family="fp8",
        schemes=("mxfp8",),
    )
    """MXFP8 weights: gather the updated weights through the gradient buffer, to save memory."""
    tf32: bool | None = precision_field(None, "bool", subjects.COMPUTE, unstates=True, flag=None)
    """Let FP32 matmuls use TF32 (True) or not (False) from the start of the run. None: the
    setting of the process stays.
    """

    # -- Megatron's fields, by its names. An unstated field reads as Megatron's default, and the
    # owner keeps its value.

    fp32_residual_connection: bool = _megatron_field(False, "bool", subjects.COMPUTE)
    """Keep the residual stream in FP32; pipeline stages then send FP32."""
    disable_bf16_reduced_precision_matmul: bool = _megatron_field(False, "bool", subjects.COMPUTE)
    """Forbid BF16 partial sums in the BF16 GEMMs of cuBLAS; a switch of the whole process, never
    set back.
    """
    deterministic_mode: bool = _megatron_field(False, "bool", subjects.COMPUTE)
    """Choose kernels that repeat bit for bit, in Megatron and Transformer Engine; slower."""
    batch_invariant_mode: bool = _megatron_field(False, "bool", subjects.COMPUTE)
    """Compute a sample with the same bits in every batch, by special kernels; slower, and for BF16
    weights.
    """
    mamba_training_ssm_states_dtype: DType | None = precision_field(
        None, "dtype", subjects.COMPUTE, optional=True
    )
    """Dtype of the states that Mamba layers keep between chunks in training. None: the
    dtype of the weights.
    """
    attention_softmax_in_fp32: bool = _megatron_field(True, "bool", subjects.ATTENTION)
    """Run mask and softmax of Megatron's attention code in FP32. Transformer Engine's attention
    does not read it.
    """
    apply_query_key_layer_scaling: bool = _megatron_field(False, "bool", subjects.ATTENTION)
    """Divide attention scores by the layer's number, for FP16; turns `attention_softmax_in_fp32`
    on.
    """
    dsa_indexer_k_norm_fp32: bool = _megatron_field(False, "bool", subjects.ATTENTION)
    """Compute the norm of the indexer's keys in FP32, in DeepSeek's sparse attention."""
    use_precision_aware_optimizer: bool = _megatron_field(False, "bool", subjects.OPTIMIZER)
    """Let the four dtypes below differ from FP32; Adam of Transformer Engine, as a distributed
    optimizer.
    """
    main_grads_dtype: DType = _megatron_field(
        "fp32", "dtype", subjects.OPTIMIZER, choices=("fp32", "bf16")
    )
    """Dtype of the gradients that the optimizer reads; it must agree with `grad_reduce_in_fp32`,
    which decides.
    """
    main_params_dtype: DType = _megatron_field(
        "fp32", "dtype", subjects.OPTIMIZER, choices=("fp32", "fp16")
    )
    """Dtype of the master weights."""
    exp_avg_dtype: DType = _megatron_field(
        "fp32", "dtype", subjects.OPTIMIZER, choices=_STATE_DTYPES, spellings=_FP8_STATE_SPELLING
    )
    """Dtype of Adam's first moment; "fp8" is E4M3 in bytes (torch.uint8) with a scale per tensor.
    """
    exp_avg_sq_dtype: DType = _megatron_field(
        "fp32", "dtype", subjects.OPTIMIZER, choices=_STATE_DTYPES, spellings=_FP8_STATE_SPELLING
    )
    """Dtype of Adam's second moment, as `exp_avg_dtype`."""
    store_param_remainders: bool = _megatron_field(True, "bool", subjects.OPTIMIZER, flag=None)
    """Keep of FP32 master weights only the 16 bits that the BF16 weights lack."""
    muon_fp32_matmul_prec: str = _megatron_field(
        "medium", "name", subjects.OPTIMIZER, choices=("highest", "high", "medium", "low")
    )
    """Precision of the FP32 matmuls in Muon's Newton-Schulz steps, by torch's names: highest is
    FP32.
    """
    reduce_scatter_with_fp32_accumulation: bool = _megatron_field(False, "bool", subjects.WIRE)
    """Send gradients in the weights' dtype and sum them in FP32, by an all-to-all instead of a
    reduce-scatter.
    """
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = _megatron_field(
        (), "names", subjects.WEIGHTS, flag=None
    )
    """Parameters, as patterns of names, whose gradients are accumulated over micro-batches in FP32;
    "all": every parameter.
    """
    megatron_fsdp_main_params_dtype: DType | None = precision_field(
        "fp32", "dtype", subjects.FSDP, optional=True
    )
    """Megatron-FSDP: dtype of the master weights. None: the weights are the masters."""
    megatron_fsdp_main_grads_dtype: DType | None = precision_field(
        None, "dtype", subjects.FSDP, optional=True
    )
    """Megatron-FSDP: dtype in which gradients are accumulated. None: the weights' dtype."""
    megatron_fsdp_grad_comm_dtype: DType | None = precision_field(
        None, "dtype", subjects.FSDP, optional=True
    )
    """Megatron-FSDP: dtype in which gradients are sent. None: the dtype of their accumulation.
    """
    megatron_fsdp_use_decoupled_grad: bool = _megatron_field(
        False, "bool", subjects.FSDP, flag=None
    )
    """Megatron-FSDP: hand gradients to the precision-aware optimizer without a cast to the dtype of
    the weights.
    """
    keep_fp8_transpose_cache: bool = _megatron_field(False, "bool", subjects.FSDP)
    """Megatron-FSDP: keep the transposed copy of weights that are stored in FP8 between its uses.
    """
    moe_router_dtype: str | None = precision_field(
        None, "format", subjects.MOE, optional=True, choices=("fp32", "fp64")
    )
    """Dtype of the router and of the weighted sum of the experts' outputs. None: the
    dtype of the activations.
    """
    moe_router_padding_for_quantization: bool = _megatron_field(
        False, "bool", subjects.MOE, family="low"
    )
    """Pad the tokens of each expert to the multiple that FP8 and FP4 GEMMs need."""
    moe_dispatch_fwd_dtype: str = _megatron_field(
        "bf16", "format", subjects.MOE, choices=("bf16", "mxfp8")
    )
    """Format in which tokens are sent to their experts in the forward pass."""
    moe_combine_bwd_dtype: str = _megatron_field(
        "bf16", "format", subjects.MOE, choices=("bf16", "mxfp8")
    )
    """Format in which gradients are sent to the experts in the backward pass."""
    fp8_output_proj: bool = _megatron_field(
        False, "bool", subjects.FP8, family="fp8", schemes=("mxfp8",)
    )
    """MXFP8: run the output head in MXFP8 too."""
    tp_only_amax_red: bool = _megatron_field(
        False, "bool", subjects.FP8, family="fp8", schemes=("delayed",), flag=None
    )
    """Delayed scaling: reduce amax over the tensor-parallel and context-parallel ranks only, not
    over data-parallel.
    """
    fp8_quantizer_factory: str | None = precision_field(
        None, "name", subjects.FP8, family="fp8", **_CUSTOM_SCHEME
    )
    """FP8, custom scheme: dotted path of the function that makes the quantizers."""
    activation_func_fp8_input_store: bool = _megatron_field(False, "bool", subjects.FP8, flag=None)
    """Store the input of SwiGLU in FP8 for the backward pass, in a run of any precision."""
    fp4_quantizer_factory: str | None = precision_field(
        None, "name", subjects.FP4, family="fp4", **_CUSTOM_SCHEME
    )
    """FP4, custom scheme: dotted path of the function that makes the quantizers."""
    modules: list[dict[str, Any]] | None = precision_field(
        None, "rows", subjects.MODULES, unstates=True, flag=None
    )
    """Precision of single modules: rows of `select` and a precision. The first row that selects a
    module decides.
    """

    def to_dict(self, *, full: bool = False) -> dict[str, Any]:
        """Return the stated fields as plain values, dtypes as "bf16", ...

        With `full` the result has every field, with its default if it is unstated. The result
        always has a None that removes a statement (``params_dtype=None``), so that `from_dict`
        returns the same config.
        """
        values = {}
        for name in list_field_names(self):
            if full:
                values[name] = get_field_value(self, name)
            elif name in self._values:
                values[name] = self._values[name]
            elif is_reset_to_none(self, name):
                values[name] = None
        if values.get("modules") is not None:
            values["modules"] = copy.deepcopy(list(values["modules"]))
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, object], *, source: str | None = None) -> Self:
        """Return the config that `to_dict` describes. Every key counts as stated.

        Args:
            values: Fields by name. Numbers and switches may be strings, as YAML and command lines
                produce them.
            source: Their source, for reports. None: it is not known.

        Raises:
            PrecisionTypeError: A value does not have its field's type, or `values` is not a
                mapping.
            UnknownFieldError: A key is not a field.
        """
        if not isinstance(values, Mapping):
            raise PrecisionTypeError(
                f"mixed_precision: must be a mapping of fields, got {values!r}."
            )
        config = cls()
        by_name = {str(key): value for key, value in values.items()}
        config._state(by_name, source=source)
        return config


FIELDS = dict(get_field_descriptors(PrecisionConfig))
"""Field -> its row, in order of declaration."""

FIELD_DEFAULTS = {name: field.default for name, field in FIELDS.items()}
"""Field -> its value while it is unstated."""


def _list_subject_fields(subject: subjects.Subject) -> tuple[str, ...]:
    return tuple(name for name, field in FIELDS.items() if field.subject is subject)


FIELDS_BY_SUBJECT = {subject.title: _list_subject_fields(subject) for subject in subjects.SUBJECTS}
"""Subject -> its fields; each field is in one."""

FIELD_CHOICES = {name: field.choices for name, field in FIELDS.items() if field.choices}
"""Field -> the only values that Megatron accepts, for fields that Megatron restricts."""

_FIELD_NAMES = tuple(FIELD_DEFAULTS)
MEGATRON_BRIDGE_FIELDS = _FIELD_NAMES[: _FIELD_NAMES.index("tf32")]
"""The fields of Megatron Bridge's `MixedPrecisionConfig`, in its order. They come before `tf32`."""
_ADDED_FIELDS = ("tf32", "modules")
"""Fields that neither Megatron Bridge's class nor Megatron's configs have under these names."""


def _list_megatron_fields() -> tuple[str, ...]:
    known = (*MEGATRON_BRIDGE_FIELDS, *_ADDED_FIELDS)
    return tuple(name for name in _FIELD_NAMES if name not in known)


MEGATRON_FIELDS = _list_megatron_fields()
"""Fields that Megatron's configs have and Megatron Bridge's class does not."""


def list_scheme_fields(row: Scheme) -> tuple[str, ...]:
    """Return the fields that reach Transformer Engine under a scaling scheme."""
    settings = []
    for name, field in FIELDS.items():
        if field.family in (row.family, "low") and row.name in field.schemes:
            settings.append(name)
    return tuple(settings)
