"""FP8 regions of a model: the parts that Megatron runs in one FP8 context each.

The delayed scales of a region are renewed at its end.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.ssm.mamba_block import MambaStack
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from bridge.runtime.megatron.emulation.parallel_linear import list_emulated_linears
from bridge.runtime.megatron.emulation.scale_updates import DelayedUpdates


def attach_delayed_updates(model: torch.nn.Module, config: Any) -> None:
    """Let the end of each FP8 region renew the delayed scales of its layers, if it has any.

    Args:
        model: A chunk with emulated layers.
        config: The model config of the chunk.
    """
    regions: list[torch.nn.Module] = []
    for module in model.modules():
        regions.extend(_list_fp8_regions(module))
    layers = list_emulated_linears(regions)
    if any(layer.fp8_state is not None for layer in layers):
        DelayedUpdates(regions, layers, tp_only=bool(getattr(config, "tp_only_amax_red", False)))


def _list_fp8_regions(module: Any) -> list[torch.nn.Module]:
    """Return the FP8 regions of a block or a prediction layer. Any other module has none.

    A block is one region. A prediction layer has two: its projection and its transformer layer.
    """
    if isinstance(module, (TransformerBlock, MambaStack)):
        return [module]
    regions: list[torch.nn.Module] = []
    if isinstance(module, MultiTokenPredictionLayer):
        for name, part in module.named_children():
            if name == "eh_proj" or isinstance(part, TransformerLayer):
                regions.append(part)
    return regions


def list_delayed_updates(model: Sequence[torch.nn.Module]) -> list[DelayedUpdates]:
    """Return the updates of the delayed scales of this rank's model chunks."""
    updates: list[DelayedUpdates] = []
    for layer in list_emulated_linears(model):
        if layer.updates is not None and layer.updates not in updates:
            updates.append(layer.updates)
    return updates
