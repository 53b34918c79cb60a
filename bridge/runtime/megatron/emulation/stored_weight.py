# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""A weight that is stored as codes and scales: `fp8_param` without Transformer Engine.

`StoredWeight` is a tensor with the dtype and shape of the weight, and without memory for its
values. GEMMs read the codes (`stored`), `copy_` quantises its argument, and every other operation
gets the dequantised weight. Megatron's DDP buffers and optimizers use Transformer Engine's
`QuantizedTensor` in the same way. After `register_stored_weights` they work on a `StoredWeight`
too.

As with Transformer Engine, the optimizer's masters begin with the weight before quantisation, and
the weight is quantised from the master rounded to the weight's dtype.

Source: Transformer Engine 2.20 pytorch/quantization.py:878-938, pytorch/tensor/utils.py:204-291;
megatron-core 0.16.1 fp8_utils.py.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from megatron.core import fp4_utils, fp8_utils
from megatron.core.distributed import distributed_data_parallel, param_and_grad_buffer
from megatron.core.optimizer import distrib_optimizer

from bridge.runtime.megatron.patching import (
    Patch,
    apply_patches,
    get_first_argument,
    keep_compatible,
)
from bridge.runtime.numerics import DelayedScaling, Quantised, QuantSpec, quantise


@dataclass(slots=True, eq=False)
class WeightStore:
    """The memory of a stored weight, which all tensors of the weight share."""

    quantised: Quantised
    """Codes and scales."""
    state: DelayedScaling | None
    """Scales and histories of delayed scaling. None: another scheme."""
    initial: torch.Tensor | None
    """The weight before its first quantisation. None: masters were already made of it."""
    gathered_dtype: torch.dtype
    """Dtype to which a master is rounded before it is quantised."""
    source_dtype: torch.dtype
    """Dtype of the values that were quantised last; before the first step it is the weight's dtype."""


class StoredWeight(torch.Tensor):
    """(N, K) codes and scales under the nominal dtype and shape of a weight."""

    store: WeightStore

    @staticmethod
    def __new__(cls, store: WeightStore, requires_grad: bool = False) -> Self:
        """Make a tensor over a store."""
        quantised = store.quantised
        tensor: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            quantised.shape,
            dtype=quantised.dtype,
            device=quantised.amax.device,
            requires_grad=requires_grad,
        )
        tensor.store = store
        return tensor

    @property
    def stored(self) -> Quantised:
        """Codes and scales."""
        return self.store.quantised

    @property
    def stored_bytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(tensor.nbytes for tensor in _get_tensors(self.stored).values())

    def dequantize(self) -> torch.Tensor:
        """Return the weight in its nominal dtype."""
        return self.stored.dequantise()

    def quantize_(self, x_NK: torch.Tensor) -> Self:
        """Quantise new values into the present memory, and return the weight.

        Args:
            x_NK: The values. They are rounded to the nominal dtype, and then to codes.
        """
        stored = self.stored
        source_dtype = x_NK.dtype
        if source_dtype == torch.float32:
            source_dtype = stored.dtype
        self.store.source_dtype = source_dtype
        fresh = _quantise_weight(x_NK.to(stored.dtype), stored.spec, self.store.state)
        for name, tensor in _get_tensors(stored).items():
            tensor.copy_(getattr(fresh, name).view(tensor.shape))
        return self

    def place_codes(self, memory: torch.Tensor) -> None:
        """Move the row-wise codes into other memory, for example into a DDP buffer.

        Args:
            memory: uint8, a byte per element of the weight. FP4 codes fill its first half.
        """
        codes, _ = self.stored.get_copy(columnwise=False)
        placed = memory.view(-1)[: codes.numel()].view(codes.shape).copy_(codes)
        self.store.quantised = replace(self.stored, codes=placed)

    def get_high_precision_init_val(self) -> torch.Tensor:
        """Return the weight before its first quantisation, from which Megatron makes the master."""
        initial = self.store.initial
        if initial is None:
            return self.dequantize()
        return initial

    def clear_high_precision_init_val(self) -> None:
        """Free the weight before its first quantisation."""
        self.store.initial = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation is of the raw hook
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator of torch: `detach` shares the store, and `copy_` quantises its argument.

        Any other operator gets the dequantised weight.
        """

        def dequantise(x: Any) -> Any:
            if isinstance(x, StoredWeight):
                return x.dequantize()
            return x

        if func is torch.ops.aten.detach.default:
            return type(args[0])(args[0].store)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], StoredWeight):
            return args[0].quantize_(dequantise(args[1]))
        args, kwargs = torch.utils._pytree.tree_map(dequantise, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


class GatheredIn16Bits(StoredWeight):
    """A stored weight that ranks gather in 16 bits and quantise afterwards.

    Under `reuse_grad_buf_for_mxfp8_param_ag` weights are gathered through the gradient buffer.
    MXFP8 has two independently rounded copies of 8 bits, so that 16 bits cost no more. An FP32
    gradient buffer is used as BF16, whatever the weights' dtype is, so that FP16 weights lose three
    bits (megatron-core 0.16.1 distributed/param_and_grad_buffer.py:786-790).
    """


class PackedWeight(StoredWeight):
    """A stored FP4 weight, with two codes in a byte.

    megatron-core 0.19 replaces the codes of such a weight by assigning to `_rowwise_data`.
    """

    @property
    def _rowwise_data(self) -> torch.Tensor | None:
        return self.stored.codes

    @_rowwise_data.setter
    def _rowwise_data(self, codes: torch.Tensor) -> None:
        self.store.quantised = replace(self.stored, codes=codes)


def _get_tensors(quantised: Quantised) -> dict[str, torch.Tensor]:
    """Return field -> tensor of a quantised weight, without the fields that are None."""
    tensors = {}
    for name in ("codes", "scale_inv", "codes_t", "scale_inv_t", "amax", "amax_t"):
        tensor = getattr(quantised, name)
        if tensor is not None:
            tensors[name] = tensor
    return tensors


def _quantise_weight(
    x_NK: torch.Tensor, spec: QuantSpec, state: DelayedScaling | None
) -> Quantised:
    """Return codes and scales of a weight, and record its amax and scale for delayed scaling.

    Both copies are made if they have different values.

    Args:
        x_NK: The weight.
        spec: Quantisation of the weight.
        state: Scales and histories of delayed scaling. None: another scheme.
    """
    scale: torch.Tensor | float | None = None
    if state is not None:
        scale = state.get_scale("weight")
    elif spec.scheme == "delayed":
        # No GEMM in FP8 reads a weight without a state. Its scale stays 1.
        scale = torch.ones(1, device=x_NK.device)
    fresh = quantise(x_NK, spec, columnwise=not spec.copies_share_values, tensor_scale=scale)
    if state is not None:
        state.record("weight", fresh.amax.item())
        state.record_stored_scale()
    return fresh


def store_weight(
    module: Any,
    spec: QuantSpec,
    state: DelayedScaling | None,
    *,
    in_16_bits: bool = False,
    gathered_dtype: torch.dtype | None = None,
) -> None:
    """Replace a module's weight, (N, K), by codes and scales.

    The attributes that Megatron has set on the weight are kept.

    Args:
        module: A linear layer.
        spec: Quantisation of the weight.
        state: Scales and histories of delayed scaling. None: another scheme.
        in_16_bits: Whether the weight is a `GatheredIn16Bits`.
        gathered_dtype: Dtype to which masters are rounded before they are quantised. None:
            the dtype of the weight.
    """
    weight = module.weight
    x_NK = weight.detach()
    store = WeightStore(
        quantised=_quantise_weight(x_NK, spec, state),
        state=state,
        initial=x_NK,
        gathered_dtype=gathered_dtype or x_NK.dtype,
        source_dtype=x_NK.dtype,
    )
    weight_class = StoredWeight
    if in_16_bits:
        weight_class = GatheredIn16Bits
    elif spec.format == "e2m1":
        weight_class = PackedWeight
    parameter = torch.nn.Parameter(weight_class(store), requires_grad=weight.requires_grad)
    for name, value in vars(weight).items():
        setattr(parameter, name, value)
    module.weight = parameter


def _gather_full_matrix(
    weight: StoredWeight, master: torch.Tensor | None, start: int, group: Any
) -> torch.Tensor:
    """Return a whole weight in the dtype in which it is gathered.

    This is a collective call of a group.

    Args:
        master: This rank's part of the master. None: this rank has none.
        start: Index of the part's first element.
        group: The ranks that have the parts.
    """
    count, dtype = weight.numel(), weight.store.gathered_dtype
    if master is not None and group.size() == 1:
        return master.to(dtype).view(weight.shape)
    # The parts do not overlap, so that a sum of their bits as integers joins them without a rounding.
    # An even number of elements makes a 16-bit tensor a whole number of 32-bit integers.
    flat = torch.zeros(-(-count // 2) * 2, dtype=dtype, device=weight.device)
    if master is not None:
        flat[start : start + master.numel()] = master.to(dtype)
    torch.distributed.all_reduce(flat.view(torch.int32), group=group)
    return flat[:count].view(weight.shape)


def quantize_shards(
    model_params: Sequence[StoredWeight],
    main_params: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    data_parallel_group: Any,
    *_others: Any,
    **_named: Any,
) -> None:
    """Quantise weights from masters that are sharded over data-parallel ranks.

    This is a collective call.
    The arguments are the same as for Megatron's `quantize_param_shard`. Transformer Engine
    quantises each shard with an amax that is reduced over the group. Here the gathered weight is
    quantised. That gives the same codes, and also works if the border of a shard is inside a tile.

    Args:
        main_params: This rank's part of each master. None: this rank has none.
        start_offsets: Index of the first element of each part. None: no part.
        data_parallel_group: The ranks that have the parts.
    """
    for weight, master, start in zip(model_params, main_params, start_offsets, strict=True):
        weight.quantize_(_gather_full_matrix(weight, master, start or 0, data_parallel_group))


def register_stored_weights() -> AbstractContextManager[None]:
    """Let Megatron's DDP and distributed optimizer treat a `StoredWeight` as an FP8 parameter."""
    fp8 = _add_class(fp8_utils.FP8_TENSOR_CLASS, StoredWeight)
    mxfp8 = _add_class(getattr(fp8_utils, "MXFP8Tensor", None), GatheredIn16Bits)
    changes: list[Patch] = [
        (fp8_utils, "FP8_TENSOR_CLASS", fp8),
        (fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True),
        (fp8_utils, "MXFP8Tensor", mxfp8),
        (fp8_utils, "HAVE_TE_MXFP8TENSOR", True),
    ]
    if hasattr(fp4_utils, "HAVE_TE_FP4_TENSOR_CLASS"):  # from 0.17.1
        packed = _add_class(fp4_utils.FP4_TENSOR_CLASS, PackedWeight)
        changes.append((fp4_utils, "FP4_TENSOR_CLASS", packed))
        changes.append((fp4_utils, "HAVE_TE_FP4_TENSOR_CLASS", True))
    for module in (fp8_utils, distrib_optimizer, distributed_data_parallel, param_and_grad_buffer):
        for name, function in _STORED_WEIGHT_FUNCTIONS.items():
            if hasattr(module, name):
                changes.append(
                    (module, name, _dispatch_stored_weights(function, getattr(module, name)))
                )
    return apply_patches(keep_compatible(changes))


_STORED_WEIGHT_FUNCTIONS: dict[str, Any] = {
    "dequantize_fp8_tensor": StoredWeight.dequantize,
    "modify_underlying_storage": StoredWeight.place_codes,
    "quantize_param_shard": quantize_shards,
    "quantize_nvfp4_param_shard": quantize_shards,
}
"""Megatron's function for parameters of Transformer Engine -> the function for stored weights."""


def _add_class(theirs: Any, ours: type[StoredWeight]) -> Any:
    """Return our class and Transformer Engine's, if there is one, for `isinstance`."""
    if theirs is None:
        return ours
    return theirs, ours


def _dispatch_stored_weights(ours: Any, theirs: Any) -> Any:
    """Return a function that calls `ours` for stored weights and `theirs` for other parameters."""

    def dispatch(*args: Any, **named: Any) -> Any:
        if _is_stored_weight(get_first_argument(args, named)):
            return ours(*args, **named)
        return theirs(*args, **named)

    return dispatch


def _is_stored_weight(value: Any) -> bool:
    """Return whether a tensor, or the first of a list of them, is a stored weight."""
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, StoredWeight)
