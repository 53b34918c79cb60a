# ruff: noqa: A002  (Megatron's name of an argument)
"""Megatron's column- and row-parallel linear layers with emulated low-precision GEMMs.

Communication, initialisation, sharding and checkpoints stay Megatron's: a layer that is built is given one of the two
classes, which replace `_forward_impl`, the one place where those layers multiply. It then keeps:

- `weight_cache`: the weight's operands from the first micro-batch of a step to the last, as Transformer Engine does
  with `is_first_microbatch`, which Megatron's schedules set;
- `fp8_state`: scales and amax histories, under delayed scaling;
- the weight itself as codes and scales where the parameter is a `StoredWeight`.

Tensor parallelism: where Transformer Engine quantises a shard with an amax reduced over the tensor-parallel group and
gathers codes (inputs of column-parallel layers and gradients of row-parallel ones under sequence parallelism), the
layers here gather first and quantise the whole: the same amax, the same values.

Source: Transformer Engine 2.20 pytorch/module/linear.py; megatron-core 0.16.1 tensor_parallel/layers.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.ssm import mamba_block
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from bridge.precision.matchers import EVALUATION, TRAINING, Chosen, Effect
from bridge.runtime.megatron.emulation.delayed import DelayedUpdates, scales_of_this_pass
from bridge.runtime.megatron.emulation.stored_weight import StoredWeight
from bridge.runtime.numerics import (
    DelayedScaling,
    GemmPrecision,
    Observer,
    WeightCache,
    scaled_linear,
)

_OVERRIDE: ContextVar[str | None] = ContextVar("backward_override", default=None)
"""The `backward_override` of the run that is being built."""


@contextmanager
def backward_overridden(override: str | None) -> Iterator[None]:
    """Let layers that are built in a ``with`` block run their backward GEMMs as `backward_override` says."""
    before = _OVERRIDE.set(override)
    try:
        yield
    finally:
        _OVERRIDE.reset(before)


def scheme_of(config: Any) -> str | None:
    """Return the scaling scheme that the layers of a config's model run in, None for high precision.

    Layers of a hybrid model know FP8 alone before megatron-core 0.17 (ssm/mamba_block.py in 0.16.1).
    """
    knows_fp4 = not getattr(config, "is_hybrid_model", False) or hasattr(
        mamba_block, "get_fp4_context"
    )
    kinds = ("fp8", "fp4") if knows_fp4 else ("fp8",)
    for kind in kinds:
        if getattr(config, kind, None):
            recipe = getattr(config, f"{kind}_recipe", None)
            return str(getattr(recipe, "value", recipe))
    return None


def gemm_precision(config: Any) -> GemmPrecision | None:
    """Return the precision of the GEMMs that a `TransformerConfig` asks for; None for high precision."""
    scheme = scheme_of(config)
    if scheme is None:
        return None
    names = ("margin", "amax_history_len", "amax_compute_algo") if scheme == "delayed" else ()
    delayed = {name: getattr(config, f"fp8_{name}") for name in names}
    override = _OVERRIDE.get() if scheme != "delayed" else None
    return GemmPrecision(
        scheme=scheme, format=config.fp8 or config.fp4, backward_override=override, **delayed
    )


def is_low_layer(config: Any, number: int) -> bool:
    """Return whether a layer computes in FP8 or FP4, by its number in the whole model, from 0 on.

    Multi-token-prediction layers are numbered after the others. Megatron puts all of them into FP8, whatever
    `first_last_layers_bf16` is, and none of them into FP4 (multi_token_prediction.py:774-781 in 0.16.1).
    """
    if number >= config.num_layers:
        return bool(config.fp8)
    return scheme_of(config) is not None and not is_first_last_bf16_layer(config, number)


def _in_module(
    layer: GemmPrecision | None, payload: dict[str, Any] | None, part: str
) -> GemmPrecision | None:
    """Return what the payload of a per-module recipe, or None, makes of a layer's own precision; None is high.

    `part` is `TRAINING` or `EVALUATION`, which is that of training where the payload has none.
    """
    if payload is None:
        return layer
    stated = payload.get(part)
    found = Effect.of(payload[TRAINING] if stated is None else stated).computes(layer)
    if not isinstance(found, Chosen):
        return found
    return GemmPrecision(
        scheme=found.scheme, format=found.format, backward_override=_OVERRIDE.get()
    )


class EmulatedLinear:
    """Common part of both layers. Mixed in before Megatron's class, whose `_forward_impl` it replaces."""

    config: Any
    training: bool
    fp8_state: DelayedScaling | None
    weight: torch.nn.Parameter

    def prepare(self, payload: dict[str, Any] | None, *, is_low: bool) -> None:
        """Give the layer its precision, and its state where the scheme keeps one, once Megatron's part is there.

        In a transformer layer that is kept in BF16 (not `is_low`) the payload of a per-module recipe alone puts it into
        a low precision.
        """
        self.payload, self.is_low = payload, is_low
        self.weight_cache = WeightCache()
        self.observer: Observer | None = None
        self.updates: DelayedUpdates | None = None
        self.multiply_in(gemm_precision(self.config) if is_low else None)

    def multiply_in(self, precision: GemmPrecision | None) -> None:
        """Multiply in this precision from now on, or in what a per-module recipe makes of it.

        Scales of an earlier precision are dropped.
        """
        chosen = self.gemm_precision = _in_module(precision, self.payload, TRAINING)
        self.evaluation_precision = _in_module(precision, self.payload, EVALUATION)
        self.weight_cache.clear()
        self.is_first_microbatch = True
        self.fp8_state = None
        if chosen is not None and chosen.scheme == "delayed":
            self.fp8_state = DelayedScaling(chosen, self.weight.device)

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Multiply (sequence, batch, K) by this rank's (N, K) in low precision; Megatron's arguments and result.

        Under `sequence_parallel` the input is this rank's part of the sequence, and its gradient is scattered.
        """
        precision = self.gemm_precision if self.training else self.evaluation_precision
        if precision is None:  # Megatron's layer comes next
            result: Tensor = super()._forward_impl(input, weight, bias, **others)  # type: ignore[misc]
            return result
        x, group = input, others.get("tp_group")
        if others.get("sequence_parallel"):
            x = gather_from_sequence_parallel_region(
                x, tensor_parallel_output_grad=True, group=group
            )
        elif others.get("allreduce_dgrad"):
            x = copy_to_tensor_model_parallel_region(x, group=group)
        is_told = (
            scheme_of(self.config) is not None
        )  # Megatron 0.16.1 tells no step to a run without FP8 and FP4
        first = self.is_first_microbatch or not is_told or precision is not self.gemm_precision
        self.is_first_microbatch = False
        finished = None if self.updates is None else self.updates.after_backward_of(self)
        with scales_of_this_pass(self.fp8_state):
            return scaled_linear(
                x,
                weight,
                bias,
                precision=precision,
                state=self.fp8_state,
                cache=self.weight_cache,
                first_microbatch=first,
                stored_weight=weight.stored if isinstance(weight, StoredWeight) else None,
                observer=self.observer,
                after_backward=finished,
            )


class EmulatedColumnParallelLinear(EmulatedLinear, ColumnParallelLinear):  # type: ignore[misc]  # Megatron is untyped
    """`ColumnParallelLinear` with low-precision GEMMs: Y_i = X A_i, A split along its outputs."""


class EmulatedRowParallelLinear(EmulatedLinear, RowParallelLinear):  # type: ignore[misc]  # Megatron is untyped
    """`RowParallelLinear` with low-precision GEMMs: Y = sum of X_i A_i, A split along its inputs."""


EMULATED = {
    ColumnParallelLinear: EmulatedColumnParallelLinear,
    RowParallelLinear: EmulatedRowParallelLinear,
}
"""Megatron's class of a linear layer -> the emulated one."""


def emulated_linears(model: Sequence[torch.nn.Module]) -> list[Any]:
    """Return the emulated layers of this rank's model chunks."""
    return [
        module
        for chunk in model
        for module in chunk.modules()
        if isinstance(module, EmulatedLinear)
    ]
