"""The scaling schemes as serving systems write them: rows of `rows/serving.yaml`, read in both directions.

Serving multiplies forward alone: of a hybrid recipe the E4M3 of inputs and weights counts. A scheme without a row, a
team's own quantizer factory, has no form in any dialect.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.interop.table import rows

ROWS = rows("serving")
"""Schemes, families of models, fused modules and systems."""
COMPRESSED = "compressed-tensors"
"""`quant_method` of that dialect."""
COMPARED = ("num_bits", "type", "strategy", "group_size", "block_structure", "dynamic")
"""Keys of compressed-tensors that decide the values; of others, an observer say, a checkpoint has the result."""
_DEFAULTS = {"num_bits": 8, "type": "int", "dynamic": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedScheme:
    """A scaling scheme in the dialects of serving systems."""

    title: str
    weights: Mapping[str, object]
    """compressed-tensors' arguments of the weight."""
    inputs: Mapping[str, object]
    """Those of the input; empty where it stays in high precision."""
    format: str
    """compressed-tensors' format of the stored weight."""
    fp8: Mapping[str, object] = field(default_factory=dict)
    """Keys of the fp8 dialect; empty where it has none for this scheme."""
    algorithms: list[str] = field(default_factory=list)
    """ModelOpt's names."""


SERVED: dict[str, ServedScheme] = {name: ServedScheme(**row) for name, row in ROWS["schemes"].items()}
"""Megatron's name of a scheme -> its row."""


def scheme_of_arguments(weights: Mapping[str, Any] | None, inputs: Mapping[str, Any] | None) -> str | None:
    """Return the scheme of a config group of compressed-tensors: a key of `SERVED`, or a few words.

    None: it has no weights.
    """
    if not weights:
        return None
    found = _compared(weights), _compared(inputs)
    for name, row in SERVED.items():
        if found == (_compared(row.weights), _compared(row.inputs)):
            return name
    return f"{words_of(weights)} weights, {words_of(inputs) if inputs else 'unquantised'} inputs"


def scheme_of_fp8(config: Mapping[str, Any]) -> str:
    """Return the scheme of a config of the fp8 dialect: a key of `SERVED`, or a few words."""
    method, block = str(config.get("quant_method")), config.get("weight_block_size")
    stated: dict[str, Any] = {
        "quant_method": method,
        "activation_scheme": str(config.get("activation_scheme", "dynamic")),
    }
    if method == "mxfp8":
        block = [1, 32]  # SGLang and the format itself allow no other
    if block is not None:
        stated["weight_block_size"] = list(block) if isinstance(block, list | tuple) else block
    known = next((name for name, row in SERVED.items() if row.fp8 == stated), None)
    blocks = f" in blocks of {block}" if block else ""
    return known or f"{method} weights{blocks}, {stated['activation_scheme']} inputs"


def scheme_of_algorithm(name: str) -> str:
    """Return the scheme of an algorithm of ModelOpt: a key of `SERVED`, or ModelOpt's name."""
    return next((scheme for scheme, row in SERVED.items() if name.upper() in row.algorithms), f"ModelOpt's {name}")


def title_of(scheme: str | None, mode: str = "") -> str:
    """Return a scheme in words: the title of its row, the words that stand for it, or the dtype of high precision."""
    if scheme is None:
        return mode or "not quantised"
    return SERVED[scheme].title if scheme in SERVED else scheme


def _compared(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    if not arguments:
        return {}
    known = {**_DEFAULTS, **{name: value for name, value in arguments.items() if value is not None}}
    return {name: known[name] for name in COMPARED if name in known}


def words_of(arguments: Mapping[str, Any]) -> str:
    """Return compressed-tensors' arguments in words: "dynamic 8-bit float per token"."""
    found = _compared(arguments)
    size = found.get("group_size") or found.get("block_structure")
    per = f"{found.get('strategy', 'tensor')}{f' {size}' if size else ''}"
    return f"{'dynamic ' if found['dynamic'] else ''}{found['num_bits']}-bit {found['type']} per {per}"
