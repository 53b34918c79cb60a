"""Emulated layers, stored weights and delayed updates of a built model."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.quantization.utils import get_quant_config_or_none
from megatron.core.ssm.mamba_block import MambaStack
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from bridge.precision.matchers import quant_recipes
from bridge.runtime.megatron.emulation.delayed import DelayedUpdates
from bridge.runtime.megatron.emulation.linear import (
    EMULATED,
    emulated_linears,
    gemm_precision,
    is_low_layer,
)
from bridge.runtime.megatron.emulation.stored_weight import (
    StoredWeight,
    quantize_shards,
    store_weight,
)
from bridge.runtime.megatron.optimizer import parts
from bridge.runtime.numerics import GemmPrecision

LAYERS = (TransformerLayer, MambaLayer, MultiTokenPredictionLayer)
"""Megatron's classes of layers with a `layer_number` in the whole model."""


def emulate(model: torch.nn.Module, config: Any, phases: Sequence[Any] = ()) -> None:
    """Turn the linear layers of a model's low-precision layers into emulated layers.

    The model is not wrapped yet. Under a per-module recipe every linear layer is emulated, since the
    recipe may choose any of them.

    Args:
        model: A chunk.
        config: Its config.
        phases: Model configs of the phases of a precision schedule. A layer that is in BF16 in all
            phases is not emulated.
    """
    recipe = getattr(config, "quant_recipe", None)
    is_per_module = bool(quant_recipes(recipe))
    names = {module: name for name, module in model.named_modules()}
    for layer, number in numbered_layers(model).items():
        is_low = any(is_low_layer(phase, number - 1) for phase in phases or (config,))
        if not (is_low or is_per_module):
            continue
        linears = [linear for linear in layer.modules() if type(linear) in EMULATED]
        for linear in linears:
            chosen = get_quant_config_or_none(names[linear], recipe)
            payload = None
            if chosen is not None:
                payload = chosen.config
            linear.__class__ = EMULATED[type(linear)]
            linear.prepare(payload, is_low=is_low)


def prepare_emulation(model: torch.nn.Module, config: Any, ddp: Any) -> None:
    """Store the weights of emulated layers under `fp8_param` or `fp4_param`, and attach updates.

    The stored weights are those of the layers that Megatron builds in its FP8 or FP4 context. The
    model has the dtype of its training already, and is not wrapped yet for data parallelism, whose
    buffers take the codes.
    """
    run = gemm_precision(config)
    stores_fp8 = config.fp8 and config.fp8_param
    stores_fp4 = getattr(config, "fp4", None) and config.fp4_param
    if run is not None and (stores_fp8 or stores_fp4):
        _store_weights(model, run, ddp)
    _attach_updates(model, config)


def _store_weights(model: torch.nn.Module, run: GemmPrecision, ddp: Any) -> None:
    """Store the weights of the low layers in the precision of the run."""
    reuses_buffer = getattr(ddp, "reuse_grad_buf_for_mxfp8_param_ag", False)
    in_16_bits = reuses_buffer and ddp.use_distributed_optimizer and run.scheme == "mxfp8"
    gathered = None
    if in_16_bits and ddp.grad_reduce_in_fp32:
        gathered = torch.bfloat16
    for layer in emulated_linears([model]):
        if layer.is_low:
            store_weight(
                layer,
                run.spec("weight"),
                layer.fp8_state,
                in_16_bits=in_16_bits,
                gathered_dtype=gathered,
            )


def switch_precision(model: Sequence[torch.nn.Module], config: Any) -> None:
    """Change the precision of the emulated layers of this rank's chunks to that of the config.

    Their weights must not be stored.
    """
    for chunk in model:
        for updates in delayed_updates([chunk]):
            updates.detach()
        for layer, number in numbered_layers(chunk).items():
            precision = None
            if is_low_layer(config, number - 1):
                precision = gemm_precision(config)
            for linear in emulated_linears([layer]):
                linear.multiply_in(precision)
        _attach_updates(chunk, config)


def numbered_layers(model: torch.nn.Module) -> dict[Any, int]:
    """Return the layers of a model chunk, each with its number in the whole model from 1.

    Prediction layers are the last. The transformer layer inside a prediction layer has the number of
    the prediction layer, whatever Megatron's number of it is (from 0.19 on it counts from 1).
    """
    number_of: dict[Any, int] = {}
    for layer in model.modules():
        if isinstance(layer, MultiTokenPredictionLayer):
            number = int(layer.layer_number) + int(layer.config.num_layers)
            for part in layer.modules():
                if isinstance(part, LAYERS):
                    number_of[part] = number
        elif isinstance(layer, LAYERS) and layer not in number_of:
            number_of[layer] = int(layer.layer_number)
    return number_of


def _attach_updates(model: torch.nn.Module, config: Any) -> None:
    """Renew delayed scales, if any, at the end of each region that Megatron enters FP8 for."""
    regions: list[torch.nn.Module] = []
    for module in model.modules():
        regions.extend(_regions(module))
    layers = emulated_linears(regions)
    if any(layer.fp8_state is not None for layer in layers):
        DelayedUpdates(regions, layers, tp_only=bool(getattr(config, "tp_only_amax_red", False)))


def _regions(module: Any) -> list[torch.nn.Module]:
    """Return the parts of a block or prediction layer that Megatron runs in an FP8 context each."""
    if isinstance(module, (TransformerBlock, MambaStack)):
        return [module]
    regions: list[torch.nn.Module] = []
    if isinstance(module, MultiTokenPredictionLayer):
        for name, part in module.named_children():
            if name == "eh_proj" or isinstance(part, TransformerLayer):
                regions.append(part)
    return regions


def delayed_updates(model: Sequence[torch.nn.Module]) -> list[DelayedUpdates]:
    """Return the updates of the delayed scales of this rank's model chunks."""
    updates: list[DelayedUpdates] = []
    for layer in emulated_linears(model):
        if layer.updates is not None and layer.updates not in updates:
            updates.append(layer.updates)
    return updates


def _requantise_as_after_a_step(part: Any) -> None:
    """Let a distributed optimizer write its masters into TE's weights, and gather those."""
    if part.config.reuse_grad_buf_for_mxfp8_param_ag:
        part._copy_main_params_to_param_buffer()
    else:
        part._copy_main_params_to_model_params()
    for chunk in part.model_chunks:
        chunk.start_param_sync(force_sync=True)


@contextmanager
def unrecorded(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Keep amaxes out of the delayed histories while a ``with`` block writes to weights."""
    with ExitStack() as stack:
        for updates in delayed_updates(model):
            for state in updates.states:
                stack.enter_context(state.using(state.stash()))
        yield


def round_masters_to_weights(optimizer: Any) -> None:
    """Round the optimizer's FP32 masters to the weights, as after a step; a collective call."""
    for part in parts(optimizer):
        if hasattr(part, "model_chunks"):
            _requantise_as_after_a_step(part)
        elif hasattr(part, "fp32_from_float16_groups"):
            part._copy_main_params_to_model_params()


def requantise_stored_weights(optimizer: Any) -> None:
    """Quantise stored weights from the optimizer's masters, as after the last step.

    A collective call. A checkpoint holds weights dequantised, so that any precision can read them.
    Quantising those again would not always give the codes they came from; the masters do, with the
    scales of that step under delayed scaling.
    """
    for part in parts(optimizer):
        if hasattr(part, "_get_fp8_params_and_shard_fp32_from_fp8"):
            _requantise_from_shards(part)
        else:
            _requantise_from_masters(part)


def _requantise_from_shards(part: Any) -> None:
    """Quantise the weights of a distributed optimizer, whose masters are sharded."""
    shards = [part._get_fp8_params_and_shard_fp32_from_fp8()]
    # from 0.17.1, which keeps them apart
    if hasattr(part, "_get_nvfp4_params_and_shard_fp32_from_nvfp4"):
        shards.append(part._get_nvfp4_params_and_shard_fp32_from_nvfp4())
    for weights, masters, starts in shards:
        if all(isinstance(weight, StoredWeight) for weight in weights):
            with _as_stored(weights):
                quantize_shards(weights, masters, starts, part.data_parallel_group)
        else:
            _requantise_as_after_a_step(part)


def _requantise_from_masters(part: Any) -> None:
    """Quantise the weights of an optimizer that has whole masters."""
    weight_groups = getattr(part, "float16_groups", ())
    master_groups = getattr(part, "fp32_from_float16_groups", ())
    for weights, masters in zip(weight_groups, master_groups, strict=True):
        for weight, master in zip(weights, masters, strict=True):
            if isinstance(weight, StoredWeight):
                with _as_stored([weight]):
                    weight.quantize_(master)


@contextmanager
def _as_stored(weights: Sequence[StoredWeight]) -> Iterator[None]:
    """Quantise weights with the delayed scales of their codes, in a ``with`` block."""
    with ExitStack() as stack:
        for weight in weights:
            if weight.store.state is not None:
                stack.enter_context(weight.store.state.as_stored())
        yield
