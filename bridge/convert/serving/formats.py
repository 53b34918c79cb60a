"""Scaling schemes in the dialects of serving systems: rows of `rows/serving.yaml`, both ways.

Serving multiplies forward alone: of a hybrid recipe the E4M3 of inputs and weights counts. A scheme
without a row, a team's own quantizer factory, has no form in any dialect.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.read.row_files import rows

ROWS = rows("serving")
"""Schemes, families of models, fused modules and systems; the file describes their columns."""
COMPRESSED = "compressed-tensors"
"""`quant_method` of that dialect."""
MODELOPT = "modelopt"
"""`quant_method` of ModelOpt's dialect; those of its formats begin with it."""
VLLM = "vllm"
SGLANG = "sglang"
COMPARED: dict[str, object] = ROWS["compared"]
SERVED: dict[str, dict[str, Any]] = ROWS["schemes"]
"""Megatron's name of a scheme -> its form in each dialect."""
SYSTEMS: dict[str, dict[str, Any]] = ROWS["systems"]
"""Name of a system, as in `--for NAME` -> what it reads."""
FUSED: dict[str, list[str]] = ROWS["fused"]
"""vLLM's name of modules that it loads as one -> their names in the checkpoint, within one parent."""


def scheme_where(fits: Callable[[Mapping[str, Any]], object], words: str) -> str:
    """Return the scheme of the first row that fits, a key of `SERVED`; the words where no row fits."""
    for name, row in SERVED.items():
        if fits(row):
            return name
    return words


def title_of(scheme: str | None, mode: str = "") -> str:
    """Return a scheme in words: the title of its row, or the words in the place of a scheme without a row.

    Args:
        scheme: The scheme; None: high precision.
        mode: The dtype of high precision; empty: not known.
    """
    if scheme is None:
        return mode or "not quantised"
    if scheme not in SERVED:
        return scheme
    return str(SERVED[scheme]["title"])


def compared(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of compressed-tensors' arguments that decide the values; empty without arguments."""
    if not arguments:
        return {}
    values: dict[str, Any] = {}
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
