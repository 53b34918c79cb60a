"""Scaling schemes in the dialects of the systems that serve a model: rows of `rows/serving.yaml`, read both ways.

Serving multiplies forward alone: of a hybrid recipe the E4M3 of inputs and weights counts. A scheme without a row, a
team's own quantizer factory, has no form in any dialect.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.read.table import rows

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
    """Return the scheme whose row fits, a key of `SERVED`, or a few words for one that has no row."""
    return next((name for name, row in SERVED.items() if fits(row)), words)


def title_of(scheme: str | None, mode: str = "") -> str:
    """Return a scheme in words: the title of its row, the words that stand for it, or the dtype of high precision."""
    if scheme is None:
        return mode or "not quantised"
    return str(SERVED[scheme]["title"]) if scheme in SERVED else scheme


def compared(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the values in compressed-tensors' arguments; nothing where there are none."""
    given = {
        name: value for name, value in arguments.items() if name in COMPARED and value is not None
    }
    return COMPARED | given if arguments else {}


def words_of(arguments: Mapping[str, Any]) -> str:
    """Return compressed-tensors' arguments in words: "dynamic 8-bit float per token"."""
    found = compared(arguments)
    size = found["group_size"] or found["block_structure"]
    per = f"{found['strategy'] or 'tensor'}{f' {size}' if size else ''}"
    return (
        f"{'dynamic ' if found['dynamic'] else ''}{found['num_bits']}-bit {found['type']} per {per}"
    )
