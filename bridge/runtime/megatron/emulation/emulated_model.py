"""Functions that turn the low-precision layers of a built model into emulated layers."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.quantization.utils import get_quant_config_or_none

from bridge.precision.matchers import parse_quant_recipes
from bridge.runtime.megatron.emulation.fp8_regions import (
    attach_delayed_updates,
    list_delayed_updates,
)
from bridge.runtime.megatron.emulation.layer_numbers import number_layers
from bridge.runtime.megatron.emulation.parallel_linear import (
    EMULATED_CLASSES,
    is_low_layer,
    list_emulated_linears,
    make_gemm_precision,
)
from bridge.runtime.megatron.emulation.stored_weight import store_weight


def emulate_low_layers(
    model: torch.nn.Module,
    config: Any,
    phases: Sequence[Any] = (),
    backward_override: str | None = None,
) -> None:
    """Turn the linear layers of a model's low-precision layers into emulated layers.

    Under a per-module recipe every linear layer is emulated, since the recipe may choose any of
    them.

    Args:
        model: A chunk, before Megatron's wrappers.
        config: The model config of the chunk.
        phases: Model configs of the phases of a precision schedule. A layer that is in high
            precision in all phases is not emulated. Empty: `config` is the only phase.
        backward_override: As `GemmPrecision.backward_override`. An environment variable of
            Transformer Engine states it.
    """
    recipe = getattr(config, "quant_recipe", None)
    is_per_module = bool(parse_quant_recipes(recipe))
    names = {module: name for name, module in model.named_modules()}
    for layer, number in number_layers(model).items():
        is_low = any(is_low_layer(phase, number - 1) for phase in phases or (config,))
        if not (is_low or is_per_module):
            continue
        linears = [linear for linear in layer.modules() if type(linear) in EMULATED_CLASSES]
        for linear in linears:
            chosen = get_quant_config_or_none(names[linear], recipe)
            quant_config = None
            if chosen is not None:
                quant_config = chosen.config
            # The emulated class has Megatron's class as a base and the same attributes, so that the
            # layer keeps its weights, its sharding and its place in checkpoints.
            linear.__class__ = EMULATED_CLASSES[type(linear)]
            linear.set_up_emulation(
                quant_config, is_low=is_low, backward_override=backward_override
            )


def store_low_weights(model: torch.nn.Module, config: Any, ddp: Any) -> None:
    """Store the weights of low-precision layers as codes and scales, if the config asks for it.

    `fp8_param` or `fp4_param` asks for it. Without it the weights are left as they are.

    Args:
        model: A chunk with drawn weights in the dtype of its training, before the wrapper of data
            parallelism: the wrapper's buffers take the codes.
        config: The model config of the chunk.
        ddp: The DDP config.
    """
    precision = make_gemm_precision(config)
    stores_fp8 = config.fp8 and config.fp8_param
    stores_fp4 = getattr(config, "fp4", None) and config.fp4_param
    if precision is None or not (stores_fp8 or stores_fp4):
        return
    reuses_buffer = getattr(ddp, "reuse_grad_buf_for_mxfp8_param_ag", False)
    in_16_bits = reuses_buffer and ddp.use_distributed_optimizer and precision.scheme == "mxfp8"
    gathered_dtype = None
    if in_16_bits and ddp.grad_reduce_in_fp32:
        gathered_dtype = torch.bfloat16
    for layer in list_emulated_linears([model]):
        if layer.is_low:
            store_weight(
                layer,
                precision.spec("weight"),
                layer.fp8_state,
                in_16_bits=in_16_bits,
                gathered_dtype=gathered_dtype,
            )


def switch_precision(model: Sequence[torch.nn.Module], config: Any) -> None:
    """Change the precision of the emulated layers to the precision of a phase.

    Args:
        model: Chunks of this rank, whose weights must not be stored.
        config: Model config of the phase.
    """
    for chunk in model:
        for updates in list_delayed_updates([chunk]):
            updates.detach()
        for layer, number in number_layers(chunk).items():
            precision = None
            if is_low_layer(config, number - 1):
                precision = make_gemm_precision(config)
            for linear in list_emulated_linears([layer]):
                linear.set_precision(precision)
        attach_delayed_updates(chunk, config)
