"""A choice per layer inside one Transformer Engine recipe: some layers in BF16, the others in a scheme.

Megatron keeps its first and last layers in BF16 by leaving autocast off for them, which delayed scaling cannot do.
Transformer Engine's `CustomRecipe` asks a factory for the quantizer of each tensor, and `IdentityQuantizer` leaves a
tensor as it is:

    # team_quantizers.py, named by fp8_quantizer_factory="team_quantizers.factory" under fp8_recipe="custom"
    factory = layer_factory(te_quantizers("tensorwise"), bf16_layers={0, 31})

`module_factory` follows the rows of `modules` in any model of Transformer Engine's layers, without Megatron's own
per-module recipe:

    recipe = CustomRecipe(qfactory=module_factory(bf16=True, fp8="e4m3", fp8_recipe="mxfp8", modules=rows))

A factory knows a linear by its name alone. Megatron gives no names, so `name_te_modules(model)` has to be called once
after the model was built; other models name their layers themselves (``te.Linear(name=...)``).

Source: Transformer Engine 2.20 pytorch/quantization.py:60-120 (`QuantizerRole`) and :1890-1945 (the state of a
`CustomRecipe`), pytorch/custom_recipes/quantizer_factories.py.
"""

import importlib
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from bridge.errors import Finding, PrecisionConfigError, WrongValueError
from bridge.precision.config import PrecisionConfig
from bridge.precision.foreign_names import megatron_names
from bridge.precision.mode import scheme_of
from bridge.precision.module_schemes import ModuleSchemes
from bridge.precision.statements import field_value

QuantizerFactory = Callable[[Any], Any]

_LAYER = re.compile(r"layers\.(\d+)\.")
_FACTORIES = {
    "tensorwise": "current_scaling_factory",
    "blockwise": "float8_block_scaling_factory",
    "mxfp8": "mxfp8_factory",
    "nvfp4": "nvfp4_factory",
}
"""Scheme -> Transformer Engine's factory with that scheme's default formats."""


def layer_factory(
    low_precision: QuantizerFactory, *, bf16_layers: Collection[int]
) -> QuantizerFactory:
    """Return a factory that leaves some layers in BF16, numbered from 0 over the whole model.

    It maps a `QuantizerRole` (or None) to a quantizer, that of `low_precision` in all other layers, and raises
    PrecisionConfigError for a linear without a name, because its layer is unknown.
    """

    def factory(role: Any) -> Any:
        layer = _LAYER.match(_name_of(role))
        is_left = layer is not None and int(layer[1]) in bf16_layers
        return _high_precision() if is_left else low_precision(role)

    return factory


def module_factory(*, num_layers: int | None = None, **precision: Any) -> QuantizerFactory:
    """Return a factory that gives each linear layer the scheme that a precision gives it.

    `precision` are fields of `MixedPrecisionConfig`: the scheme, `modules`, `first_last_layers_bf16`; where they choose
    single layers, `num_layers` are those of the model. A linear layer is known by Megatron's name, or by that of
    Transformer Engine's own `TransformerLayer`; any other name, and attention, have the scheme of the run.
    PrecisionConfigError: the number of layers is not known, or a scheme has no factory.
    """
    config = PrecisionConfig.from_dict(precision)
    try:
        schemes = ModuleSchemes.of(config, num_layers)
    except WrongValueError as error:
        finding = Finding(path="num_layers", rule=error.rule, value=num_layers, remedy=error.remedy)
        raise PrecisionConfigError("A choice per module is not possible:", [finding]) from None
    of_rows = [row.training.scheme for row in schemes.matchers.matchers if row.training]
    names = dict.fromkeys([scheme_of(config), *of_rows])
    history = {
        name: field_value(config, f"fp8_{name}")
        for name in ("margin", "amax_history_len", "amax_compute_algo")
    }
    made = {
        name: te_quantizers(name, **(history if name == "delayed" else {}))
        for name in names
        if name is not None
    }

    def factory(role: Any) -> Any:
        name = _name_of(role)
        place = megatron_names([name]).get(name)
        one = schemes.chosen(*place) if place is not None else schemes.run
        return made[one.scheme](role) if one is not None else _high_precision()

    return factory


def _name_of(role: Any) -> str:
    """Return the name of the module that asks for a quantizer; empty where it is none of a linear layer's."""
    name = "" if role is None else str(role.name)
    if role is not None and role.module_type in ("linear", "grouped_linear") and not name:
        finding = Finding(
            path="role.name",
            rule="a linear layer needs a name for its layer to be known",
            value=name,
            remedy="Call name_te_modules(model) once after the model was built.",
        )
        raise PrecisionConfigError("A choice per layer is not possible:", [finding])
    return name


def _high_precision() -> Any:
    return importlib.import_module("transformer_engine.pytorch").IdentityQuantizer()


def te_quantizers(scheme: str, **delayed: Any) -> QuantizerFactory:
    """Return Transformer Engine's own factory for a scheme, with the scheme's default formats; it imports when called.

    `delayed` are keywords of `DelayedScalingRequest` (margin, amax_history_len, ...), for that scheme alone.
    """
    if scheme != "delayed" and (scheme not in _FACTORIES or delayed):
        rule = f"must be delayed, {', '.join(_FACTORIES)}, and only delayed takes settings"
        finding = Finding(
            path="scheme", rule=rule, value=scheme, remedy="Write a factory of your own for more."
        )
        raise PrecisionConfigError("Transformer Engine has no such factory:", [finding])

    def factory(role: Any) -> Any:
        if scheme == "delayed":
            return importlib.import_module(
                "transformer_engine.pytorch.quantization"
            ).DelayedScalingRequest(**delayed)
        shipped = importlib.import_module(
            "transformer_engine.pytorch.custom_recipes.quantizer_factories"
        )
        return getattr(shipped, _FACTORIES[scheme])(role)

    return factory


def name_te_modules(model: Any) -> int:
    """Give each Transformer Engine module of a model its path as a name; return how many were named.

    A layer is what has Megatron's `layer_number`, which counts from 1 over all pipeline stages; its modules become
    ``layers.<number - 1>.<path>``, others keep their path in the model.
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
