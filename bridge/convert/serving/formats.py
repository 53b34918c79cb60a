"""Scaling schemes in the dialects of serving systems: rows of `rows/serving.yaml`, both ways.

Serving multiplies forward alone: of a hybrid recipe the E4M3 of inputs and weights counts. A scheme
without a row, a team's own quantizer factory, has no form in any dialect.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.read.foreign.row_files import rows

ROWS = rows("serving")
"""Schemes, families of models, fused modules and systems; the file describes their columns."""
COMPRESSED = "compressed-tensors"
"""`quant_method` of that dialect."""
COMPARED: dict[str, object] = ROWS["compared"]
SERVED: dict[str, dict[str, Any]] = ROWS["schemes"]
"""Megatron's name of a scheme -> its form in each dialect."""
SYSTEMS: dict[str, dict[str, Any]] = ROWS["systems"]
"""Name of a system, as in `--for NAME` -> what it reads."""


def scheme_where(fits: Callable[[Mapping[str, Any]], object], words: str) -> str:
    """Return the scheme whose row fits, a key of `SERVED`, or the words for one without a row."""
    for name, row in SERVED.items():
        if fits(row):
            return name
    return words


def title_of(scheme: str | None, mode: str = "") -> str:
    """Return a scheme in words.

    The words are the title of its row, words that stand for it, or the dtype of high precision.
    """
    if scheme is None:
        return mode or "not quantised"
    if scheme not in SERVED:
        return scheme
    return str(SERVED[scheme]["title"])


def compared(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the values in compressed-tensors' arguments.

    Nothing where there are none.
    """
    if not arguments:
        return {}
    values = {}
    for name, default in COMPARED.items():
        value = arguments.get(name)
        values[name] = value
        if value is None:
            values[name] = default
    return values


def words_of(arguments: Mapping[str, Any]) -> str:
    """Return compressed-tensors' arguments in words: "dynamic 8-bit float per token"."""
    values = compared(arguments)
    per = values["strategy"] or "tensor"
    size = values["group_size"] or values["block_structure"]
    if size:
        per = f"{per} {size}"
    words = f"{values['num_bits']}-bit {values['type']} per {per}"
    if values["dynamic"]:
        words = f"dynamic {words}"
    return words
