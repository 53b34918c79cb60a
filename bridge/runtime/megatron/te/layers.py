"""Factories of quantizers for a Transformer Engine recipe, which choose BF16 or a scheme per layer.

Megatron runs its first and last layers in BF16 without autocast, which delayed scaling does not
allow. Transformer Engine's `CustomRecipe` calls a factory for the quantizer of each tensor, and
`IdentityQuantizer` does not quantise:

    # team_quantizers.py, named by fp8_quantizer_factory="team_quantizers.factory", with
    # fp8_recipe="custom"
    factory = layer_factory(te_quantizers("tensorwise"), bf16_layers={0, 31})

`module_factory` follows the rows of `modules` in any model of Transformer Engine's layers, without
Megatron's per-module recipe:

    factory = module_factory(bf16=True, fp8="e4m3", fp8_recipe="mxfp8", modules=rows)
    recipe = CustomRecipe(qfactory=factory)

A factory recognises a linear layer by its name. Megatron's layers have no names: call
`name_te_modules(model)` once after the model is built. Other models name their layers with
``te.Linear(name=...)``.

Source: Transformer Engine 2.20 pytorch/quantization.py:60-120 (`QuantizerRole`) and :1890-1945 (the
state of a `CustomRecipe`), pytorch/custom_recipes/quantizer_factories.py.
"""

import importlib
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from bridge.errors import Finding, PrecisionConfigError, WrongValueError
from bridge.precision.foreign_names import map_to_megatron_names
from bridge.precision.mode import get_scheme
from bridge.precision.module_schemes import ModuleSchemes
from bridge.precision.precision_config import PrecisionConfig
from bridge.precision.statements import get_field_value

QuantizerFactory = Callable[[Any], Any]

_LAYER_PATTERN = re.compile(r"layers\.(\d+)\.")
_TE_FACTORY_NAMES = {
    "tensorwise": "current_scaling_factory",
    "blockwise": "float8_block_scaling_factory",
    "mxfp8": "mxfp8_factory",
    "nvfp4": "nvfp4_factory",
}
"""Scheme -> Transformer Engine's factory with that scheme's default formats."""


def layer_factory(
    low_precision: QuantizerFactory, *, bf16_layers: Collection[int]
) -> QuantizerFactory:
    """Return a factory that keeps some layers in BF16.

    Args:
        low_precision: Factory for all other layers.
        bf16_layers: Numbers of layers in the whole model, from 0.

    Returns:
        A function from a `QuantizerRole`, or None, to a quantizer. It raises PrecisionConfigError
        for a linear layer without a name.
    """

    def factory(role: Any) -> Any:
        layer = _LAYER_PATTERN.match(_get_role_name(role))
        if layer is not None and int(layer[1]) in bf16_layers:
            return _make_identity_quantizer()
        return low_precision(role)

    return factory


def module_factory(*, num_layers: int | None = None, **precision: Any) -> QuantizerFactory:
    """Return a factory that gives each linear layer the scheme of a precision.

    A linear layer is recognised by Megatron's name, or by its name in Transformer Engine's
    `TransformerLayer`. A layer with another name, and attention, has the scheme of the run.

    Args:
        num_layers: Layers of the model; needed if the precision chooses layers by number.
        **precision: Fields of `MixedPrecisionConfig`: scheme, `modules`, `first_last_layers_bf16`.

    Returns:
        A function from a `QuantizerRole`, or None, to a quantizer.

    Raises:
        PrecisionConfigError: The number of layers is needed, or a scheme has no factory.
    """
    config = PrecisionConfig.from_dict(precision)
    try:
        schemes = ModuleSchemes.from_precision(config, num_layers)
    except WrongValueError as error:
        finding = Finding(path="num_layers", rule=error.rule, value=num_layers, remedy=error.remedy)
        raise PrecisionConfigError("A choice per module is not possible:", [finding]) from None
    used_schemes = [get_scheme(config)]
    used_schemes += [row.training.scheme for row in schemes.matchers.matchers if row.training]
    factories: dict[str, QuantizerFactory] = {}
    for scheme in dict.fromkeys(used_schemes):
        if scheme == "delayed":
            factories[scheme] = te_quantizers(
                scheme,
                margin=get_field_value(config, "fp8_margin"),
                amax_history_len=get_field_value(config, "fp8_amax_history_len"),
                amax_compute_algo=get_field_value(config, "fp8_amax_compute_algo"),
            )
        elif scheme is not None:
            factories[scheme] = te_quantizers(scheme)

    def factory(role: Any) -> Any:
        name = _get_role_name(role)
        location = map_to_megatron_names([name]).get(name)
        chosen = schemes.run
        if location is not None:
            chosen = schemes.chosen(*location)
        if chosen is None:
            return _make_identity_quantizer()
        return factories[chosen.scheme](role)

    return factory


def _get_role_name(role: Any) -> str:
    """Return the name of the module of a `QuantizerRole`, empty for a role without a name or None.

    Raises:
        PrecisionConfigError: A linear layer has no name.
    """
    if role is None:
        return ""
    name = str(role.name)
    if role.module_type in ("linear", "grouped_linear") and not name:
        finding = Finding(
            path="role.name",
            rule="a linear layer needs a name for its layer to be known",
            value=name,
            remedy="Call name_te_modules(model) once after the model was built.",
        )
        raise PrecisionConfigError("A choice per layer is not possible:", [finding])
    return name


def _make_identity_quantizer() -> Any:
    """Return the quantizer that does not quantise."""
    return importlib.import_module("transformer_engine.pytorch").IdentityQuantizer()


def te_quantizers(scheme: str, **delayed: Any) -> QuantizerFactory:
    """Return Transformer Engine's factory for a scheme, with the default formats of the scheme.

    Transformer Engine is imported when the factory is called.

    Args:
        scheme: Megatron's name of the scheme.
        **delayed: Keywords of `DelayedScalingRequest` (margin, amax_history_len, ...), only for
            delayed scaling.

    Raises:
        PrecisionConfigError: There is no such factory.
    """
    if scheme != "delayed" and (scheme not in _TE_FACTORY_NAMES or delayed):
        rule = f"must be delayed, {', '.join(_TE_FACTORY_NAMES)}, and only delayed takes settings"
        finding = Finding(
            path="scheme", rule=rule, value=scheme, remedy="Write a factory of your own for more."
        )
        raise PrecisionConfigError("Transformer Engine has no such factory:", [finding])

    def factory(role: Any) -> Any:
        if scheme == "delayed":
            quantization = importlib.import_module("transformer_engine.pytorch.quantization")
            return quantization.DelayedScalingRequest(**delayed)
        shipped = importlib.import_module(
            "transformer_engine.pytorch.custom_recipes.quantizer_factories"
        )
        return getattr(shipped, _TE_FACTORY_NAMES[scheme])(role)

    return factory


def name_te_modules(model: Any) -> int:
    """Set the name of each Transformer Engine module of a model to its path.

    The modules of a Megatron layer are named ``layers.<number - 1>.<path>``, by the `layer_number`
    that counts from 1 over all pipeline stages. Other modules are named by their path in the model.

    Returns:
        The number of named modules.
    """
    named = 0
    for name, module in _iterate_named_modules(model):
        if hasattr(module, "get_quantizer_roles"):
            module.name = name
            named += 1
    return named


def _iterate_named_modules(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and modules inside a module, and inside its children.

    The name of a Megatron layer is made of its number in the whole model.
    """
    for child, part in module.named_children():
        name = child
        if path:
            name = f"{path}.{child}"
        number = getattr(part, "layer_number", None)
        if number is not None and path.endswith("decoder.layers"):
            name = f"layers.{number - 1}"
        yield name, part
        yield from _iterate_named_modules(part, name)
