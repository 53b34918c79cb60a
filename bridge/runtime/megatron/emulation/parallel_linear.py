# ruff: noqa: A002  (Megatron's name of an argument)
"""Megatron's column- and row-parallel linear layers with emulated low-precision GEMMs.

Communication, initialisation, sharding and checkpoints stay Megatron's: a layer that is
built is given one of the two classes, which replace `_forward_impl`, the one place where
those layers multiply. It then keeps:

- `weight_cache`: the weight's operands from the first micro-batch of a step to the last, as
  Transformer Engine does with `is_first_microbatch`, which Megatron's schedules set;
- `fp8_state`: scales and amax histories, under delayed scaling;
- the weight itself as codes and scales where the parameter is a `StoredWeight`.

Tensor parallelism: where Transformer Engine quantises a shard with an amax reduced over the
tensor-parallel group and gathers codes (inputs of column-parallel layers and gradients of
row-parallel ones under sequence parallelism), the layers here gather first and quantise the whole:
the same amax, the same values.

Source: Transformer Engine 2.20 pytorch/module/linear.py; megatron-core
0.16.1 tensor_parallel/layers.py.
"""

from collections.abc import Iterator, Mapping, Sequence
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

from bridge.precision.matchers import EVALUATION, TRAINING, ModulePrecision, SchemeChoice
from bridge.runtime.megatron.emulation.scale_updates import DelayedUpdates, use_pass_scales
from bridge.runtime.megatron.emulation.stored_weight import StoredWeight
from bridge.runtime.numerics import (
    DelayedScaling,
    GemmPrecision,
    Observer,
    WeightCache,
    scaled_linear,
)

_BACKWARD_OVERRIDE: ContextVar[str | None] = ContextVar("backward_override", default=None)
"""The `backward_override` of the run that is being built."""


@contextmanager
def use_backward_override(override: str | None) -> Iterator[None]:
    """Build layers with a `backward_override` of Transformer Engine in a ``with`` block."""
    before = _BACKWARD_OVERRIDE.set(override)
    try:
        yield
    finally:
        _BACKWARD_OVERRIDE.reset(before)


def get_layer_scheme(config: Any) -> str | None:
    """Return the scaling scheme that the layers of a config's model run in.

    The scheme is None for high precision. Layers of a hybrid model know FP8 alone before
    megatron-core 0.17 (ssm/mamba_block.py in 0.16.1).
    """
    kinds = ["fp8"]
    is_hybrid = getattr(config, "is_hybrid_model", False)
    if not is_hybrid or hasattr(mamba_block, "get_fp4_context"):
        kinds.append("fp4")
    for kind in kinds:
        if getattr(config, kind, None):
            recipe = getattr(config, f"{kind}_recipe", None)
            return str(getattr(recipe, "value", recipe))
    return None


def make_gemm_precision(config: Any) -> GemmPrecision | None:
    """Return the precision of the GEMMs that a `TransformerConfig` asks for.

    The result is None for high precision.
    """
    scheme = get_layer_scheme(config)
    if scheme is None:
        return None
    number_format = config.fp8 or config.fp4
    if scheme != "delayed":
        return GemmPrecision(
            scheme=scheme, format=number_format, backward_override=_BACKWARD_OVERRIDE.get()
        )
    return GemmPrecision(
        scheme=scheme,
        format=number_format,
        backward_override=None,
        margin=config.fp8_margin,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
    )


def is_low_layer(config: Any, number: int) -> bool:
    """Return whether a layer computes in FP8 or FP4, by its number in the whole model, from 0 on.

    Multi-token-prediction layers are numbered after the others. Megatron puts all of them into FP8,
    whatever `first_last_layers_bf16` is, and none of them into FP4
    (multi_token_prediction.py:774-781 in 0.16.1).
    """
    if number >= config.num_layers:
        return bool(config.fp8)
    return get_layer_scheme(config) is not None and not is_first_last_bf16_layer(config, number)


def _resolve_module_precision(
    layer: GemmPrecision | None, payload: dict[str, Any] | None, part: str
) -> GemmPrecision | None:
    """Return the precision of a layer under a per-module recipe, None for high precision.

    Args:
        layer: The precision without the recipe, None for high precision.
        payload: What the recipe states for the layer, None where it states nothing.
        part: `TRAINING` or `EVALUATION`. Evaluation is as training where the payload has no part
            for it.
    """
    if payload is None:
        return layer
    stated = payload.get(part)
    if stated is None:
        stated = payload[TRAINING]
    precision = ModulePrecision.from_recipe(stated).computes(layer)
    if not isinstance(precision, SchemeChoice):
        return precision
    return GemmPrecision(
        scheme=precision.scheme, format=precision.format, backward_override=_BACKWARD_OVERRIDE.get()
    )


class EmulatedParallelLinear:
    """The common part of both layers, a mix-in that replaces Megatron's `_forward_impl`."""

    config: Any
    training: bool
    fp8_state: DelayedScaling | None
    weight: torch.nn.Parameter

    def prepare(self, payload: dict[str, Any] | None, *, is_low: bool) -> None:
        """Set the precision of a layer that Megatron has built, and the state of its scheme.

        Args:
            payload: What a per-module recipe states for the layer, or None.
            is_low: Whether the transformer layer computes in FP8 or FP4. In any other layer the
                payload alone chooses a low precision.
        """
        self.payload = payload
        self.is_low = is_low
        self.weight_cache = WeightCache()
        self.observer: Observer | None = None
        self.updates: DelayedUpdates | None = None
        precision = None
        if is_low:
            precision = make_gemm_precision(self.config)
        self.set_precision(precision)

    def set_precision(self, precision: GemmPrecision | None) -> None:
        """Change the precision of the layer, which a per-module recipe may override.

        Scales of an earlier precision are dropped.
        """
        chosen = self.gemm_precision = _resolve_module_precision(precision, self.payload, TRAINING)
        self.evaluation_precision = _resolve_module_precision(precision, self.payload, EVALUATION)
        self.weight_cache.clear()
        self.is_first_microbatch = True
        self.fp8_state = None
        if chosen is not None and chosen.scheme == "delayed":
            self.fp8_state = DelayedScaling(chosen, self.weight.device)

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Multiply (sequence, batch, K) by this rank's (N, K) in low precision.

        Arguments and result are Megatron's. Under `sequence_parallel` the input is this rank's part
        of the sequence, and its gradient is scattered.
        """
        precision = self.gemm_precision
        if not self.training:
            precision = self.evaluation_precision
        if precision is None:
            high_precision: Tensor = super()._forward_impl(  # type: ignore[misc]  # Megatron's
                input, weight, bias, **others
            )
            return high_precision
        after_backward = None
        if self.updates is not None:
            after_backward = self.updates.register_for_backward(self)
        stored = None
        if isinstance(weight, StoredWeight):
            stored = weight.stored
        with use_pass_scales(self.fp8_state):
            return scaled_linear(
                _gather_gemm_input(input, others),
                weight,
                bias,
                precision=precision,
                state=self.fp8_state,
                cache=self.weight_cache,
                first_microbatch=self._consume_first_microbatch(precision),
                stored_weight=stored,
                observer=self.observer,
                after_backward=after_backward,
            )

    def _consume_first_microbatch(self, precision: GemmPrecision) -> bool:
        """Take Megatron's mark of a step's first micro-batch from the layer.

        Returns:
            Whether the weight is quantised for this micro-batch, and not read from the cache.

        Megatron 0.16.1 sets `is_first_microbatch` in runs with FP8 or FP4 alone, so that a run
        whose low precision is chosen per module quantises in each micro-batch. So does evaluation
        in another precision than that of training.
        """
        is_first = self.is_first_microbatch
        self.is_first_microbatch = False
        has_steps = get_layer_scheme(self.config) is not None
        return is_first or not has_steps or precision is not self.gemm_precision


def _gather_gemm_input(x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Return the input of a layer's GEMM, gathered over the sequence where it is split."""
    group = arguments.get("tp_group")
    if arguments.get("sequence_parallel"):
        gathered: Tensor = gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=True, group=group
        )
        return gathered
    if arguments.get("allreduce_dgrad"):
        copied: Tensor = copy_to_tensor_model_parallel_region(x, group=group)
        return copied
    return x


class EmulatedColumnParallelLinear(EmulatedParallelLinear, ColumnParallelLinear):  # type: ignore[misc]  # Megatron is untyped
    """`ColumnParallelLinear` with low-precision GEMMs: Y_i = X A_i, A split along its outputs."""


class EmulatedRowParallelLinear(EmulatedParallelLinear, RowParallelLinear):  # type: ignore[misc]  # Megatron is untyped
    """`RowParallelLinear` with low-precision GEMMs: Y = sum of X_i A_i, A split along inputs."""


EMULATED_CLASSES = {
    ColumnParallelLinear: EmulatedColumnParallelLinear,
    RowParallelLinear: EmulatedRowParallelLinear,
}
"""Megatron's class of a linear layer -> the emulated class."""


def list_emulated_linears(model: Sequence[torch.nn.Module]) -> list[Any]:
    """Return the emulated layers of this rank's model chunks."""
    layers: list[Any] = []
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, EmulatedParallelLinear):
                layers.append(module)
    return layers
