"""`linear_schemes`: the scaling scheme of each linear layer of a PyTorch model under a recipe.

It follows from the rows of `modules`, and from the layers that the recipe keeps in high precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.errors import PrecisionTypeError, WrongValueError, close_matches, did_you_mean
from bridge.precision.foreign_names import map_to_megatron_names
from bridge.precision.module_schemes import ModuleSchemes
from bridge.runtime.pytorch.loop import require_config

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from bridge.precision.matchers import SchemeChoice
    from bridge.registry.mixed_precision_config import MixedPrecisionConfig


def linear_schemes(
    model: torch.nn.Module, config: MixedPrecisionConfig
) -> dict[str, SchemeChoice | None]:
    """Return name -> scheme and format of each `nn.Linear` of a model, or None for high precision.

    Some layers are always in high precision: the layers that Megatron never runs in FP8 or FP4,
    such as the output layer and a router, and every layer whose name is not in
    `bridge.precision.foreign_names`.

    Args:
        model: A model of transformers, torchtitan or another whose linear layers have such names.
        config: The recipe. Its rows select these modules by Megatron's names, for example
            `linear_qkv` for `q_proj`.

    Raises:
        PrecisionTypeError: No name is known, a row selects no layer, or the model lacks a layer
            that a row names.
    """
    import torch

    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    places = map_to_megatron_names(names)
    if not places:
        rule = (
            "must have linear layers with names such as those of a Llama, GPT-NeoX or torchtitan "
            "model"
        )
        examples = ", ".join(names[:3]) or "none"
        remedy = "Use emulate_linears with skip."
        raise PrecisionTypeError(f"model: {rule}, got {examples}. {remedy}")
    schemes = resolve_module_schemes(places.values(), require_config(config))
    chosen: dict[str, SchemeChoice | None] = dict.fromkeys(names)
    for name, place in places.items():
        chosen[name] = schemes.chosen(*place)
    return chosen


def resolve_module_schemes(
    places: Collection[tuple[int, str]], config: MixedPrecisionConfig
) -> ModuleSchemes:
    """Return the schemes of a recipe for a model with some linear layers.

    Args:
        places: Number of the transformer layer, from 0, and Megatron's name of each linear layer.
        config: The recipe.

    Raises:
        PrecisionTypeError: The recipe needs more layers, or a row selects no linear layer.
    """
    num_layers = 1 + max(layer for layer, _ in places)
    try:
        schemes = ModuleSchemes.from_precision(config, num_layers=num_layers)
    except WrongValueError as error:
        message = f"modules: {error.rule}, and the model has {error.value} layers. {error.remedy}"
        raise PrecisionTypeError(message) from None
    for row in schemes.find_empty_rows(places):
        names = dict.fromkeys(name.rpartition(".")[2] for _, name in places)
        matches = close_matches(row.select.rpartition(".")[2], names)
        near = did_you_mean(matches) or f"There are {', '.join(names)}."
        rule = "a row must take a linear layer of the model"
        raise PrecisionTypeError(f"modules: {rule}, got {row.select}. {near}")
    return schemes
