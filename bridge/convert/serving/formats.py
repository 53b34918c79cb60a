"""Scaling schemes in the dialects of serving systems: rows of `rows/serving.yaml`, both ways.

Serving multiplies forward alone: of a hybrid recipe the E4M3 of inputs and weights counts. A scheme
without a row, a team's own quantizer factory, has no form in any dialect.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.read.foreign.row_files import load_rows

SERVING_ROWS = load_rows("serving")
"""Schemes, families of models, fused modules and systems; the file describes their columns."""
COMPRESSED_TENSORS = "compressed-tensors"
"""`quant_method` of that dialect."""
MODELOPT = "modelopt"
"""`quant_method` of ModelOpt's dialect; those of its formats begin with it."""
VLLM = "vllm"
SGLANG = "sglang"
COMPARED_DEFAULTS: dict[str, object] = SERVING_ROWS["compared"]
SERVED_SCHEMES: dict[str, dict[str, Any]] = SERVING_ROWS["schemes"]
"""Megatron's name of a scheme -> its form in each dialect."""
SERVING_SYSTEMS: dict[str, dict[str, Any]] = SERVING_ROWS["systems"]
"""Name of a system, as in `--for NAME` -> what it reads."""
FUSED_MODULES: dict[str, list[str]] = SERVING_ROWS["fused"]
"""vLLM's name of modules that it loads as one -> their names in the checkpoint, within one parent."""


def find_scheme(fits: Callable[[Mapping[str, Any]], object], words: str) -> str:
    """Return the scheme of the first row that fits, a key of `SERVED_SCHEMES`; the words where no row fits."""
    for name, row in SERVED_SCHEMES.items():
        if fits(row):
            return name
    return words


def format_scheme(scheme: str | None, mode: str = "") -> str:
    """Return a scheme in words: the title of its row, or the words in the place of a scheme without a row.

    Args:
        scheme: The scheme; None: high precision.
        mode: The dtype of high precision; empty: not known.
    """
    if scheme is None:
        return mode or "not quantised"
    if scheme not in SERVED_SCHEMES:
        return scheme
    return str(SERVED_SCHEMES[scheme]["title"])


def select_compared_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of compressed-tensors' arguments that decide the values; empty without arguments."""
    if not arguments:
        return {}
    values: dict[str, Any] = {}
    for name, default in COMPARED_DEFAULTS.items():
        value = arguments.get(name)
        values[name] = value
        if value is None:
            values[name] = default
    return values


def format_arguments(arguments: Mapping[str, Any]) -> str:
    """Return compressed-tensors' arguments in words: "dynamic 8-bit float per token"."""
    values = select_compared_arguments(arguments)
    per = values["strategy"] or "tensor"
    size = values["group_size"] or values["block_structure"]
    if size:
        per = f"{per} {size}"
    words = f"{values['num_bits']}-bit {values['type']} per {per}"
    if values["dynamic"]:
        words = f"dynamic {words}"
    return words
