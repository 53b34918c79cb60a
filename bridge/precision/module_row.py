"""`ModuleRow`: a row of `modules`, which selects modules of a model and states their precision.

    rows = module_rows(plain_rows([{"select": "*.linear_qkv", "precision": "bf16"}]))
    rows[0].patterns(num_layers=32)         # ('*.linear_qkv',)
    rows[0].precision                       # the Effect on the modules that match

`bridge.precision.row_normalisation` describes the list, and brings its rows into their one form.
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
"""Family -> its schemes that Transformer Engine takes for a single module."""


LAYER_NUMBER = re.compile(r"layers\.(\d+)(?=\.|$)")
"""The number of a layer in a glob, or in the name of a module."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleRow:
    """One row of `modules`."""

    select: str
    """The glob; empty where `module` selects."""
    layers: tuple[int, ...] | None = None
    module: str = ""
    """The end of the names of the modules, a glob too; empty where `select` selects."""
    precision: ModulePrecision
    evaluation: ModulePrecision | None = None
    """The precision outside of training; None: that of training."""

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Numbers of the layers that the row names, as they are stated; empty without any."""
        if self.layers is not None:
            return self.layers
        match = LAYER_NUMBER.search(self.select)
        if match is None or self.select.startswith("mtp."):
            return ()
        return (int(match[1]),)

    def patterns(self, num_layers: int) -> tuple[str, ...]:
        """Return the globs that select the row's modules by their names in the whole model."""
        if not self.module:
            if not self.layer_numbers:
                return (self.select,)
            # With the decoder's name before a layer's number, ``*layers.0.*`` takes no MTP layer.
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
        """Return `select` for a model of some layers of this one, numbered from 0.

        None where the row names none of them. Negative numbers count from the `num_layers` of this
        model.
        """
        if not self.layer_numbers:
            return self.select or {"module": self.module}
        named = {number % num_layers for number in self.layer_numbers}
        numbers = [place for place, number in enumerate(layers) if number in named]
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
    """Return the number of a layer; a negative one counts from the end."""
    if number < 0:
        return number + num_layers
    return number


def find_absent_layers(numbers: Sequence[int], num_layers: int) -> list[int]:
    """Return the numbers, as a row states them, of layers that the model does not have."""
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
    """Return the rows of the form that `normalise_rows` makes; none for None."""
    return tuple(_parse_row(row) for row in plain or ())


def _parse_row(row: Mapping[str, Any]) -> ModuleRow:
    """Return the row of a mapping in the form that `normalise_rows` makes."""
    precision = parse_module_precision(row)
    evaluation = None
    outside = row.get("evaluation")
    if isinstance(outside, str):
        evaluation = parse_module_precision({"precision": outside})
    elif outside is not None:
        evaluation = parse_module_precision(outside)
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
    """Return the effect of a row, or of its `evaluation`, on the modules that it selects."""
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
