"""`ModuleRow`: a row of `modules`, which selects modules of a model and states their precision.

    rows = parse_module_rows(normalise_rows([{"select": "*.linear_qkv", "precision": "bf16"}]))
    rows[0].patterns(num_layers=32)         # ('*.linear_qkv',)
    rows[0].precision                       # the ModulePrecision of the modules that match

`bridge.precision.row_normalisation` describes the list `modules`, and normalises its rows.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.precision.matchers import ModulePrecision
from bridge.precision.schemes import FP4_SCHEMES, FP8_SCHEMES

PER_MODULE_SCHEMES = {
    "fp8": tuple(name for name in FP8_SCHEMES if name != "delayed"),
    "fp4": tuple(FP4_SCHEMES),
}
"""Family -> its schemes that Transformer Engine accepts for a single module."""

LAYER_NUMBER = re.compile(r"layers\.(\d+)(?=\.|$)")
"""The number of a layer in a glob, or in the name of a module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleRow:
    """One row of `modules`."""

    select: str
    """A glob over module names. Empty: `module` selects."""
    layers: tuple[int, ...] | None = None
    """Numbers of layers, from 0; a negative number counts from the end. None: every layer."""
    module: str = ""
    """A glob for the end of module names. Empty: `select` selects."""
    precision: ModulePrecision
    evaluation: ModulePrecision | None = None
    """The precision in evaluation. None: the precision in training."""

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Numbers of the layers that the row names, as the user states them. Empty: it names none."""
        if self.layers is not None:
            return self.layers
        match = LAYER_NUMBER.search(self.select)
        if match is None or self.select.startswith("mtp."):
            return ()
        return (int(match[1]),)

    def patterns(self, num_layers: int) -> tuple[str, ...]:
        """Return globs that select the row's modules by their names in the whole model.

        Args:
            num_layers: The number of layers of the model. 0: it is not known.
        """
        if not self.module:
            if not self.layer_numbers:
                return (self.select,)
            # MTP layers are numbered from 0 too. With the decoder's name in front, ``*layers.0.*``
            # does not match the MTP layer 0.
            return (f"decoder.{self.select[self.select.index('layers.') :]}",)
        if self.layers is None:
            return (f"*.{self.module}",)
        numbers = [_resolve_layer_number(number, num_layers) for number in self.layers]
        patterns = []
        for number in dict.fromkeys(numbers):
            patterns.append(f"decoder.layers.{number}.{self.module}")
            patterns.append(f"decoder.layers.{number}.*.{self.module}")
        return tuple(patterns)

    def renumber_select(
        self, layers: Sequence[int], num_layers: int
    ) -> str | dict[str, Any] | None:
        """Return `select` for a smaller model that has some of the layers.

        Args:
            layers: Numbers of the layers that the smaller model has. It numbers them from 0.
            num_layers: The number of layers of this model.

        Returns:
            The selector with the new numbers. None: the row names none of these layers.
        """
        if not self.layer_numbers:
            return self.select or {"module": self.module}
        named = {_resolve_layer_number(number, num_layers) for number in self.layer_numbers}
        numbers = [index for index, number in enumerate(layers) if number in named]
        if not numbers:
            return None
        if self.module:
            return {"layers": numbers, "module": self.module}
        return LAYER_NUMBER.sub(f"layers.{numbers[0]}", self.select)

    def __str__(self) -> str:
        if self.select:
            return self.select
        if self.layers is None:
            return self.module
        return f"layers {', '.join(map(str, self.layers))}: {self.module}"


def _resolve_layer_number(number: int, num_layers: int) -> int:
    """Return the number of a layer from 0. A negative number counts from the end.

    A number that the model does not have stays outside of the model, and then selects no layer.
    Rule PB292 reports it.
    """
    if number < 0:
        return number + num_layers
    return number


def find_absent_layers(numbers: Sequence[int], num_layers: int) -> list[int]:
    """Return the numbers of layers that the model does not have, as the user states them."""
    return [number for number in numbers if not -num_layers <= number < num_layers]


def list_row_schemes(plain: Any) -> list[str]:
    """Return the scaling schemes that the rows of `modules` name, in order."""
    schemes = []
    for row in parse_module_rows(plain):
        for effect in (row.precision, row.evaluation):
            if effect is not None and effect.scheme is not None:
                schemes.append(effect.scheme)
    return schemes


def parse_module_rows(plain: Sequence[Mapping[str, Any]] | None) -> tuple[ModuleRow, ...]:
    """Return the rows of a list that `normalise_rows` made. None is an empty list."""
    return tuple(_parse_row(row) for row in plain or ())


def _parse_row(row: Mapping[str, Any]) -> ModuleRow:
    """Return the row of a mapping that `normalise_rows` made."""
    precision = parse_module_precision(row)
    evaluation = None
    stated = row.get("evaluation")
    if isinstance(stated, str):
        evaluation = parse_module_precision({"precision": stated})
    elif stated is not None:
        evaluation = parse_module_precision(stated)
    select = row["select"]
    if isinstance(select, str):
        return ModuleRow(select=select, precision=precision, evaluation=evaluation)
    layers = select.get("layers")
    if layers is not None:
        layers = tuple(layers)
    return ModuleRow(
        select="",
        layers=layers,
        module=select["module"],
        precision=precision,
        evaluation=evaluation,
    )


def parse_module_precision(row: Mapping[str, Any]) -> ModulePrecision:
    """Return the precision that a row, or its `evaluation`, states."""
    short = row.get("precision")
    for family, names in PER_MODULE_SCHEMES.items():
        scheme = row.get(f"{family}_recipe")
        if not scheme and short in names:
            scheme = short
        if not scheme:
            continue
        format_ = None
        if family == "fp8":
            format_ = row.get("fp8")
        return ModulePrecision(
            family=family,
            scheme=scheme,
            format=format_,
            factory=row.get(f"{family}_quantizer_factory"),
            stored=row.get(f"{family}_param"),
            tp_only_amax_red=row.get("tp_only_amax_red"),
        )
    return ModulePrecision()
