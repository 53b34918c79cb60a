# ruff: noqa: A002  (Megatron's name of an argument)
"""Megatron's column- and row-parallel linear layers with emulated low-precision GEMMs.

Communication, initialisation, sharding and checkpoints stay Megatron's. A layer that Megatron has
built is given one of two classes (`emulated_model.py`). They replace only `_forward_impl`, the
single method in which these layers multiply. It calls `bridge.runtime.numerics.scaled_linear`.

An emulated layer also has:

- `weight_cache`: the weight's operands, kept from the first micro-batch of a step to the last.
  Megatron's schedules set `is_first_microbatch`, as for layers of Transformer Engine.
- `fp8_state`: scales and amax histories, under delayed scaling.
- `weight`: a `StoredWeight` if the weight is kept as codes and scales.

Tensor parallelism: under sequence parallelism Transformer Engine quantises its shard of the input
of a column-parallel layer, and of the gradient of a row-parallel layer, with an amax that is
reduced over the tensor-parallel group, and gathers codes. The layers here gather first, and
quantise the whole tensor: with the same amax, and so to the same values.

Source: Transformer Engine 2.20 pytorch/module/linear.py; megatron-core 0.16.1
tensor_parallel/layers.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    LinearCall,
    Observer,
    WeightCache,
    scaled_linear,
)


def get_layer_scheme(config: Any) -> str | None:
    """Return the scaling scheme in which the layers of a model config run.

    The result is None for high precision.

    Before megatron-core 0.17 the layers of a hybrid model have no FP4 (ssm/mamba_block.py in
    0.16.1).
    """
    families = ["fp8"]
    is_hybrid = getattr(config, "is_hybrid_model", False)
    if not is_hybrid or hasattr(mamba_block, "get_fp4_context"):
        families.append("fp4")
    for family in families:
        if getattr(config, family, None):
            recipe = getattr(config, f"{family}_recipe", None)
            return str(getattr(recipe, "value", recipe))  # an enum of Megatron's, or a text
    return None


def make_gemm_precision(config: Any) -> GemmPrecision | None:
    """Return the precision of the GEMMs of a `TransformerConfig`, or None for high precision.

    It has no `backward_override`, for which a model config has no field.
    """
    scheme = get_layer_scheme(config)
    if scheme is None:
        return None
    number_format = config.fp8 or config.fp4
    if scheme != "delayed":
        return GemmPrecision(scheme=scheme, format=number_format)
    return GemmPrecision(
        scheme=scheme,
        format=number_format,
        margin=config.fp8_margin,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
    )


def is_low_layer(config: Any, number: int) -> bool:
    """Return whether a layer computes in FP8 or FP4.

    Megatron runs all prediction layers in FP8, whatever `first_last_layers_bf16` is, and none of
    them in FP4 (multi_token_prediction.py:774-781 in 0.16.1).

    Args:
        config: The model config.
        number: Number of the layer in the whole model, from 0; prediction layers come last.
    """
    if number >= config.num_layers:
        return bool(config.fp8)
    return get_layer_scheme(config) is not None and not is_first_last_bf16_layer(config, number)


def _resolve_module_precision(
    layer: GemmPrecision | None, quant_config: dict[str, Any] | None, part: str
) -> GemmPrecision | None:
    """Return the precision of a layer under a per-module recipe, or None for high precision.

    Args:
        layer: The precision without the recipe. None: high precision.
        quant_config: Megatron's config of the layer in the recipe, the precision by part. None:
            the recipe has none.
        part: `TRAINING` or `EVALUATION`. Without statements for evaluation, the statements for
            training count.
    """
    if quant_config is None:
        return layer
    stated = quant_config.get(part)
    if stated is None:
        stated = quant_config[TRAINING]
    precision = ModulePrecision.from_recipe(stated).computes(layer)
    if not isinstance(precision, SchemeChoice):
        return precision
    return GemmPrecision(scheme=precision.scheme, format=precision.format)


def _override_backward(
    precision: GemmPrecision | None, backward_override: str | None
) -> GemmPrecision | None:
    """Return a precision with a `backward_override`, which delayed scaling does not have."""
    if precision is None or precision.scheme == "delayed":
        return precision
    return replace(precision, backward_override=backward_override)


class EmulatedParallelLinear:
    """The common part of both layers, a mix-in that replaces Megatron's `_forward_impl`."""

    config: Any
    """Megatron's model config."""
    training: bool
    """Whether the module is in training mode; torch sets it."""
    fp8_state: DelayedScaling | None
    """Scales and amax histories. None: another scheme."""
    weight: torch.nn.Parameter
    """(N, K) of this rank, a plain or a stored weight."""

    def set_up_emulation(
        self,
        quant_config: dict[str, Any] | None,
        *,
        is_low: bool,
        backward_override: str | None,
    ) -> None:
        """Set the precision of a layer that Megatron has built, and the state of its scheme.

        It replaces a constructor, because Megatron's class has constructed the layer.

        Args:
            quant_config: Megatron's config of the layer in a per-module recipe, the precision by
                part. None: the recipe has none.
            is_low: Whether the transformer layer computes in FP8 or FP4. In any other layer only
                the recipe can choose a low precision.
            backward_override: As `GemmPrecision.backward_override`.
        """
        self.quant_config = quant_config
        self.is_low = is_low
        self.backward_override = backward_override
        self.weight_cache = WeightCache()
        self.observer: Observer | None = None
        self.updates: DelayedUpdates | None = None
        precision = None
        if is_low:
            precision = make_gemm_precision(self.config)
        self.set_precision(precision)

    def set_precision(self, precision: GemmPrecision | None) -> None:
        """Change the precision of the layer. Scales of an earlier precision are dropped.

        Args:
            precision: Precision without a per-module recipe, which may override it. None:
                high precision.
        """
        training = _resolve_module_precision(precision, self.quant_config, TRAINING)
        evaluation = _resolve_module_precision(precision, self.quant_config, EVALUATION)
        self.gemm_precision = _override_backward(training, self.backward_override)
        self.evaluation_precision = _override_backward(evaluation, self.backward_override)
        self.weight_cache.clear()
        self.is_first_microbatch = True
        self.fp8_state = None
        if self.gemm_precision is not None and self.gemm_precision.scheme == "delayed":
            self.fp8_state = DelayedScaling(self.gemm_precision, self.weight.device)

    def _forward_impl(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Return input w^T + bias in the precision of the layer. Megatron's `forward` calls it.

        Args:
            input: (sequence, batch, K). Under `sequence_parallel` it is this rank's part of the
                sequence, and its gradient is scattered.
            weight: (N, K) of this rank.
            bias: (N,). None: no bias.
            **others: Megatron's further arguments, of which `_gather_gemm_input` reads three.

        Returns:
            (sequence, batch, N) in the dtype of the input, or in autocast's.
        """
        precision = self.gemm_precision
        if not self.training:
            precision = self.evaluation_precision
        if precision is None:
            result: Tensor = super()._forward_impl(  # type: ignore[misc]  # Megatron's
                input, weight, bias, **others
            )
            return result
        after_backward = None
        if self.updates is not None:
            after_backward = self.updates.register_for_backward(self)
        stored = None
        if isinstance(weight, StoredWeight):
            stored = weight.stored
        call = LinearCall(
            precision=precision,
            state=self.fp8_state,
            cache=self.weight_cache,
            first_microbatch=self._consume_first_microbatch(precision),
            stored_weight=stored,
            observer=self.observer,
            after_backward=after_backward,
        )
        with use_pass_scales(self.fp8_state):
            return scaled_linear(_gather_gemm_input(input, others), weight, bias, call=call)

    def _consume_first_microbatch(self, precision: GemmPrecision) -> bool:
        """Remove Megatron's mark of a step's first micro-batch from the layer.

        Megatron's schedule sets the mark `is_first_microbatch` on each module that has the
        attribute (pipeline_parallel/schedules.py, transformer/module.py). Version 0.16.1 does so
        only in runs with FP8 or FP4. Without marks the weight is quantised in each micro-batch.
        This happens if the low precision is chosen per module, and in an evaluation in another
        precision than the training.

        Returns:
            Whether the weight is quantised for this micro-batch, and not read from the cache.
        """
        is_first = self.is_first_microbatch
        self.is_first_microbatch = False
        has_marks = get_layer_scheme(self.config) is not None
        return is_first or not has_marks or precision != self.gemm_precision


def _gather_gemm_input(x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Return the input of a layer's GEMM: the whole sequence, with the communication of its gradient.

    Args:
        x: (sequence, batch, K), the input of the layer.
        arguments: Megatron's `tp_group`, `sequence_parallel` and `allreduce_dgrad`.

    Returns:
        Under `sequence_parallel` the gathered sequence, whose gradient is scattered. Under
        `allreduce_dgrad` the input, whose gradient is summed over the group. Else the input.
    """
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
