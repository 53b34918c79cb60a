# ruff: noqa: N803, N806  (shape suffixes are capitals)
"""A weight that is held as codes and scales: `fp8_param` without Transformer Engine.

`StoredWeight` is a tensor with the dtype and shape of the weight it stands for and none of its memory. GEMMs read the
codes (`stored`); any other operation gets the weight dequantised; `copy_` quantises what is copied in. That is the
interface that Megatron's DDP buffers and optimizers have with Transformer Engine's `QuantizedTensor`, so both work on
it once Megatron knows the class (`megatron_stores`).

The optimizer's masters start from the weight before it was quantised, as Transformer Engine's do, and the weight is
quantised from the master rounded to the weight's dtype.

Source: Transformer Engine 2.20 pytorch/quantization.py:878-938, pytorch/tensor/utils.py:204-291; megatron-core 0.16.1
fp8_utils.py.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from megatron.core import fp4_utils, fp8_utils
from megatron.core.distributed import distributed_data_parallel, param_and_grad_buffer
from megatron.core.optimizer import distrib_optimizer

from bridge.runtime.megatron.replacement import first_of, fitting, replaced
from bridge.runtime.numerics import DelayedScaling, Quantised, QuantSpec, quantise


@dataclass(slots=True, eq=False)
class Store:
    """The memory of a stored weight, shared by all tensors that stand for it."""

    quantised: Quantised
    state: DelayedScaling | None
    """Scales and histories, under delayed scaling."""
    initial: torch.Tensor | None
    """The weight as it was before it was first quantised."""
    gathered_dtype: torch.dtype
    """Dtype that a master is rounded to before it is quantised."""
    source_dtype: torch.dtype
    """Dtype that was quantised last: before the first step it is the weight's own."""


class StoredWeight(torch.Tensor):
    """(N, K) codes and scales under the nominal dtype and shape of a weight."""

    store: Store

    @staticmethod
    def __new__(cls, store: Store, requires_grad: bool = False) -> Self:
        """Make a tensor that stands for a store."""
        held = store.quantised
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, dtype=held.dtype, device=held.amax.device, requires_grad=requires_grad
        )
        made.store = store
        return made

    @property
    def stored(self) -> Quantised:
        """Codes and scales."""
        return self.store.quantised

    @property
    def stored_bytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(tensor.nbytes for tensor in _tensors(self.stored).values())

    def dequantize(self) -> torch.Tensor:
        """Return the weight in its nominal dtype."""
        return self.stored.dequantise()

    def quantize_(self, x_NK: torch.Tensor) -> Self:
        """Take on new values: rounded to the nominal dtype, then to codes, in the memory of the old ones."""
        held, state = self.stored, self.store.state
        self.store.source_dtype = held.dtype if x_NK.dtype == torch.float32 else x_NK.dtype
        fresh = _quantised(x_NK.to(held.dtype), held.spec, state)
        for name, tensor in _tensors(held).items():
            tensor.copy_(getattr(fresh, name).view(tensor.shape))
        return self

    def place_codes(self, memory: torch.Tensor) -> None:
        """Move the row-wise codes into other memory, one byte per element; FP4 codes fill the first half of it."""
        codes, _ = self.stored.copy(columnwise=False)
        placed = memory.view(-1)[: codes.numel()].view(codes.shape).copy_(codes)
        self.store.quantised = replace(self.stored, codes=placed)

    def get_high_precision_init_val(self) -> torch.Tensor:
        """Return the weight as it was before it was first quantised; Megatron's masters begin there."""
        return self.dequantize() if self.store.initial is None else self.store.initial

    def clear_high_precision_init_val(self) -> None:
        """Forget the weight as it was before it was first quantised."""
        self.store.initial = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation is of the raw hook
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Share the store on detach, quantise on copy_, and let everything else work on the dequantised weight."""

        def plain(x: Any) -> Any:
            return x.dequantize() if isinstance(x, StoredWeight) else x

        if func is torch.ops.aten.detach.default:
            return type(args[0])(args[0].store)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], StoredWeight):
            return args[0].quantize_(plain(args[1]))
        args, kwargs = torch.utils._pytree.tree_map(plain, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


class GatheredAsIs(StoredWeight):
    """A stored weight that ranks gather in 16 bits, through the gradient buffer, and quantise afterwards.

    `reuse_grad_buf_for_mxfp8_param_ag` asks for it: MXFP8 has two independently rounded copies, and gathering both
    would cost as much. An FP32 gradient buffer is used as BF16 then, whatever the weights' dtype, so FP16 weights
    are rounded to three bits less (megatron-core 0.16.1 distributed/param_and_grad_buffer.py:786-790).
    """


class PackedWeight(StoredWeight):
    """A stored FP4 weight, two codes to a byte, under the attribute by which megatron-core 0.19 moves such codes."""

    @property
    def _rowwise_data(self) -> torch.Tensor | None:
        return self.stored.codes

    @_rowwise_data.setter
    def _rowwise_data(self, codes: torch.Tensor) -> None:
        self.store.quantised = replace(self.stored, codes=codes)


def _tensors(held: Quantised) -> dict[str, torch.Tensor]:
    names = ("codes", "scale_inv", "codes_t", "scale_inv_t", "amax", "amax_t")
    return {name: getattr(held, name) for name in names if getattr(held, name) is not None}


def _quantised(x_NK: torch.Tensor, spec: QuantSpec, state: DelayedScaling | None) -> Quantised:
    """Quantise a weight, both copies where they differ, and note its amax where scales are delayed."""
    # Under delayed scaling the factor of a weight that no GEMM in FP8 reads stays 1.
    unread = torch.ones(1, device=x_NK.device) if spec.scheme == "delayed" else None
    scale = unread if state is None else state.scale_of("weight")
    fresh = quantise(x_NK, spec, col=not spec.copies_share_values, scale=scale)
    if state is not None:
        state.record("weight", fresh.amax.item())
        state.note_stored()
    return fresh


def store_weight(
    module: Any,
    spec: QuantSpec,
    state: DelayedScaling | None,
    *,
    as_is: bool = False,
    gathered_dtype: torch.dtype | None = None,
) -> None:
    """Replace a module's weight, (N, K), by codes and scales, with the attributes Megatron has put on it.

    With `as_is` it is a `GatheredAsIs`. Masters are rounded to `gathered_dtype`, None: the weight's, before they are
    quantised.
    """
    weight = module.weight
    x_NK = weight.detach()
    store = Store(
        _quantised(x_NK, spec, state), state, x_NK, gathered_dtype or x_NK.dtype, x_NK.dtype
    )
    kind: type[StoredWeight] = PackedWeight if spec.format == "e2m1" else StoredWeight
    if as_is:
        kind = GatheredAsIs
    parameter = torch.nn.Parameter(kind(store), requires_grad=weight.requires_grad)
    for name, value in vars(weight).items():
        setattr(parameter, name, value)
    module.weight = parameter


def _full_matrix(
    weight: StoredWeight, master: torch.Tensor | None, start: int, group: Any
) -> torch.Tensor:
    """Return a weight in the dtype it is gathered in, from the parts of its master that the ranks of a group hold."""
    count, dtype = weight.numel(), weight.store.gathered_dtype
    if master is not None and group.size() == 1:
        return master.to(dtype).view(weight.shape)
    whole = torch.zeros(-(-count // 2) * 2, dtype=dtype, device=weight.device)
    if master is not None:
        whole[start : start + master.numel()] = master.to(dtype)
    torch.distributed.all_reduce(
        whole.view(torch.int32), group=group
    )  # sums bits: every element has one owner
    return whole[:count].view(weight.shape)


def quantize_shards(
    model_params: Sequence[StoredWeight],
    main_params: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    data_parallel_group: Any,
    *_others: Any,
    **_named: Any,
) -> None:
    """Quantise weights from masters that are sharded over data-parallel ranks; a collective call.

    The arguments are those of Megatron's `quantize_param_shard`. Transformer Engine quantises each shard with an amax
    reduced over the group; quantising the assembled weight gives the same codes, and works for tiles that a shard's
    border cuts through.
    """
    for weight, master, start in zip(model_params, main_params, start_offsets, strict=True):
        weight.quantize_(_full_matrix(weight, master, start or 0, data_parallel_group))


def megatron_stores() -> AbstractContextManager[None]:
    """Let Megatron's DDP and distributed optimizer treat a `StoredWeight` as the FP8 parameter it is."""

    def also(ours: Any, theirs: Any) -> Any:
        return lambda *args, **named: (ours if _is_ours(first_of(args, named)) else theirs)(
            *args, **named
        )

    known = fp8_utils.FP8_TENSOR_CLASS
    as_is = getattr(fp8_utils, "MXFP8Tensor", None)
    changes: list[tuple[Any, str, Any]] = [
        (fp8_utils, "FP8_TENSOR_CLASS", StoredWeight if known is None else (known, StoredWeight)),
        (fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True),
        (fp8_utils, "MXFP8Tensor", GatheredAsIs if as_is is None else (as_is, GatheredAsIs)),
        (fp8_utils, "HAVE_TE_MXFP8TENSOR", True),
    ]
    if hasattr(fp4_utils, "HAVE_TE_FP4_TENSOR_CLASS"):  # from 0.17.1
        packed = fp4_utils.FP4_TENSOR_CLASS
        changes += [
            (
                fp4_utils,
                "FP4_TENSOR_CLASS",
                PackedWeight if packed is None else (packed, PackedWeight),
            ),
            (fp4_utils, "HAVE_TE_FP4_TENSOR_CLASS", True),
        ]
    functions = {
        "dequantize_fp8_tensor": StoredWeight.dequantize,
        "modify_underlying_storage": StoredWeight.place_codes,
        "quantize_param_shard": quantize_shards,
        "quantize_nvfp4_param_shard": quantize_shards,
    }
    for module in (fp8_utils, distrib_optimizer, distributed_data_parallel, param_and_grad_buffer):
        held = ((name, ours) for name, ours in functions.items() if hasattr(module, name))
        changes += [(module, name, also(ours, getattr(module, name))) for name, ours in held]
    return replaced(fitting(changes))


def _is_ours(value: Any) -> bool:
    """Return whether a tensor, or the first of a list of them, is a stored weight."""
    return isinstance(
        value[0] if isinstance(value, (list, tuple)) and value else value, StoredWeight
    )
