"""`number_layers`: the layers of a model chunk by their number in the whole model."""

from typing import Any

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

LAYER_CLASSES = (TransformerLayer, MambaLayer, MultiTokenPredictionLayer)
"""Megatron's classes of layers with a `layer_number` in the whole model."""


def number_layers(model: torch.nn.Module) -> dict[Any, int]:
    """Return the layers of a model chunk, each with its number in the whole model from 1.

    Prediction layers are numbered after all other layers. The transformer layer inside a prediction
    layer has the number of the prediction layer. Megatron's number of it is not used: from 0.19 on
    it counts from 1.
    """
    number_of: dict[Any, int] = {}
    for module in model.modules():
        if isinstance(module, MultiTokenPredictionLayer):
            number = int(module.layer_number) + int(module.config.num_layers)
            for part in module.modules():
                if isinstance(part, LAYER_CLASSES):
                    number_of[part] = number
        elif isinstance(module, LAYER_CLASSES) and module not in number_of:
            number_of[module] = int(module.layer_number)
    return number_of
