"""Layers of a model chunk by their number in the whole model."""

from typing import Any

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

LAYER_CLASSES = (TransformerLayer, MambaLayer, MultiTokenPredictionLayer)
"""Megatron's classes of layers with a `layer_number` in the whole model."""


def number_layers(model: torch.nn.Module) -> dict[Any, int]:
    """Return the layers of a model chunk, each with its number in the whole model from 1.

    Prediction layers are the last. The transformer layer inside a prediction layer has the number of
    the prediction layer, whatever Megatron's number of it is (from 0.19 on it counts from 1).
    """
    number_of: dict[Any, int] = {}
    for layer in model.modules():
        if isinstance(layer, MultiTokenPredictionLayer):
            number = int(layer.layer_number) + int(layer.config.num_layers)
            for part in layer.modules():
                if isinstance(part, LAYER_CLASSES):
                    number_of[part] = number
        elif isinstance(layer, LAYER_CLASSES) and layer not in number_of:
            number_of[layer] = int(layer.layer_number)
    return number_of
