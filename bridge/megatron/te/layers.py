"""A choice per layer inside one Transformer Engine recipe: some layers in BF16, the others in a scheme.

Megatron keeps its first and last layers in BF16 by leaving autocast off for them, which delayed scaling cannot do, and
which chooses nothing finer than a whole layer. Transformer Engine's `CustomRecipe` asks a factory for the quantizer of
each tensor, and `IdentityQuantizer` leaves a tensor as it is:

    # team_quantizers.py, named by fp8_quantizer_factory="team_quantizers.factory" under fp8_recipe="custom"
    factory = layer_factory(te_quantizers("tensorwise"), bf16_layers={0, 31})

A factory knows a linear by its name alone, and Megatron gives no names, so `name_te_modules(model)` has to be called
once after the model was built.

Source: Transformer Engine 2.20 pytorch/quantization.py:60-120 (`QuantizerRole`) and :1890-1945 (the state of a
`CustomRecipe`), pytorch/custom_recipes/quantizer_factories.py.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

from bridge.errors import Finding, PrecisionConfigError
from bridge.megatron.te.recipe import TERecipe

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    QuantizerFactory = Callable[[Any], Any]

__all__ = ["bf16_layer_numbers", "custom_recipe", "layer_factory", "layer_number", "name_te_modules", "te_quantizers"]

_LAYER = re.compile(r"layers\.(\d+)\.")
_LINEARS = ("linear", "grouped_linear")
_FACTORIES = {
    "tensorwise": "current_scaling_factory",
    "blockwise": "float8_block_scaling_factory",
    "mxfp8": "mxfp8_factory",
    "nvfp4": "nvfp4_factory",
}
"""Scheme -> Transformer Engine's factory with that scheme's default formats."""


def bf16_layer_numbers(config: Any) -> frozenset[int]:
    """Return the layers that a config keeps in BF16, counted from 0 over the whole model.

    Args:
        config: Megatron's `TransformerConfig`, or anything with `num_layers` and its first/last fields.
    """
    if not getattr(config, "first_last_layers_bf16", False):
        return frozenset()
    first, last = config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16
    count = config.num_layers
    return frozenset(range(min(first, count))) | frozenset(range(max(count - last, 0), count))


def layer_number(name: str) -> int | None:
    """Return the layer a name of `name_te_modules` is in, counted from 0; None outside the decoder's layers."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def layer_factory(
    low_precision: QuantizerFactory,
    *,
    bf16_layers: Collection[int],
    high_precision: QuantizerFactory | None = None,
) -> QuantizerFactory:
    """Return a factory that leaves some layers in BF16.

    Args:
        low_precision: makes the quantizers of all other layers, `te_quantizers` for one.
        bf16_layers: numbers of the layers to leave, counted from 0 over the whole model.
        high_precision: makes the quantizer of those layers; None takes Transformer Engine's `IdentityQuantizer`.

    Returns:
        A function from a `QuantizerRole` (or None) to a quantizer. It raises PrecisionConfigError for a linear
        without a name, because its layer is unknown.
    """
    chosen = frozenset(bf16_layers)

    def factory(role: Any) -> Any:
        name = "" if role is None else role.name
        if role is not None and role.module_type in _LINEARS and not name:
            finding = Finding(
                path="role.name",
                rule="a linear layer needs a name for its layer to be known",
                value=name,
                remedy="Call name_te_modules(model) once after the model was built.",
            )
            raise PrecisionConfigError("A choice per layer is not possible:", [finding])
        if layer_number(name) in chosen:
            return (high_precision or _identity)(role)
        return low_precision(role)

    return factory


def te_quantizers(scheme: str, **delayed: Any) -> QuantizerFactory:
    """Return Transformer Engine's own factory for a scheme, with the scheme's default formats.

    Args:
        scheme: delayed, tensorwise, blockwise, mxfp8 or nvfp4.
        **delayed: keywords of `DelayedScalingRequest` (margin, amax_history_len, ...), for delayed alone.

    Returns:
        A function that imports Transformer Engine when it is first called.
    """
    if scheme != "delayed" and (scheme not in _FACTORIES or delayed):
        rule = f"must be delayed, {', '.join(_FACTORIES)}, and only delayed takes settings"
        finding = Finding(path="scheme", rule=rule, value=scheme, remedy="Write a factory of your own for more.")
        raise PrecisionConfigError("Transformer Engine has no such factory:", [finding])

    def factory(role: Any) -> Any:
        if scheme == "delayed":
            return importlib.import_module("transformer_engine.pytorch.quantization").DelayedScalingRequest(**delayed)
        shipped = importlib.import_module("transformer_engine.pytorch.custom_recipes.quantizer_factories")
        return getattr(shipped, _FACTORIES[scheme])(role)

    return factory


def custom_recipe(factory: QuantizerFactory) -> TERecipe:
    """Return the recipe that asks a factory."""
    return TERecipe(name="CustomRecipe", scheme="custom", keywords={"qfactory": factory})


def name_te_modules(model: Any) -> int:
    """Give each Transformer Engine module of a model its path as a name; return how many were named.

    Args:
        model: a `torch.nn.Module`. A layer is what has Megatron's `layer_number`, which counts from 1 over all pipeline
            stages; its modules become ``layers.<number - 1>.<path>``, others keep their path in the model.
    """
    named = 0
    for name, module in _named(model):
        if hasattr(module, "get_quantizer_roles"):
            module.name = name
            named += 1
    return named


def _named(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield modules with their names, a Megatron layer's under its number in the whole model."""
    for child, part in module.named_children():
        own = f"{path}.{child}" if path else child
        number = getattr(part, "layer_number", None)
        if number is not None and path.endswith("decoder.layers"):
            own = f"layers.{number - 1}"
        yield own, part
        yield from _named(part, own)


def _identity(_role: Any) -> Any:
    return importlib.import_module("transformer_engine.pytorch").IdentityQuantizer()
