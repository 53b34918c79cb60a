"""The scaling schemes in the dialects of serving systems, rows of `foreign/tables/serving.yaml`.

The same rows are used to write and to read a config. Serving has only forward GEMMs. So only E4M3,
the format of inputs and weights, counts in a hybrid recipe. A scheme without a row, such as the
quantizer factory of a team, cannot be written in any dialect.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bridge.read.foreign.row_files import load_rows

SERVING_ROWS = load_rows("serving")
"""Schemes, families of models, fused modules and systems. The file describes their columns."""
COMPRESSED_TENSORS = "compressed-tensors"
"""`quant_method` of the dialect compressed-tensors."""
MODELOPT = "modelopt"
"""`quant_method` of ModelOpt's dialect. The methods of its formats begin with this text."""
VLLM = "vllm"
SGLANG = "sglang"
COMPARED_DEFAULTS: dict[str, object] = SERVING_ROWS["compared"]
"""Argument of compressed-tensors that decides the quantised values -> its default."""
SERVED_SCHEMES: dict[str, dict[str, Any]] = SERVING_ROWS["schemes"]
"""Megatron's name of a scheme -> its form in each dialect."""
SERVING_SYSTEMS: dict[str, dict[str, Any]] = SERVING_ROWS["systems"]
"""Name of a system, as in `--for NAME` -> its row, with the schemes that it reads."""
FUSED_MODULES: dict[str, list[str]] = SERVING_ROWS["fused"]
"""vLLM's name of a module that it loads from several modules -> their names in the checkpoint."""


def find_scheme(fits: Callable[[Mapping[str, Any]], bool], description: str) -> str:
    """Return the scheme of the first row that fits, a key of `SERVED_SCHEMES`.

    Args:
        fits: Whether a row fits.
        description: A description of the scheme, which is returned if no row fits.
    """
    for name, row in SERVED_SCHEMES.items():
        if fits(row):
            return name
    return description


def format_scheme(scheme: str | None, mode: str = "") -> str:
    """Return the title of a scheme. A scheme without a row is itself a description.

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
    """Return the arguments of compressed-tensors that decide the quantised values, with defaults.

    Empty if there are no arguments: nothing is quantised.
    """
    if not arguments:
        return {}
    selected: dict[str, Any] = {}
    for name, default in COMPARED_DEFAULTS.items():
        selected[name] = arguments.get(name)
        if selected[name] is None:
            selected[name] = default
    return selected


def format_arguments(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of compressed-tensors as text: "dynamic 8-bit float per token"."""
    selected = select_compared_arguments(arguments)
    scaled_part = selected["strategy"] or "tensor"
    size = selected["group_size"] or selected["block_structure"]
    if size:
        scaled_part = f"{scaled_part} {size}"
    description = f"{selected['num_bits']}-bit {selected['type']} per {scaled_part}"
    if selected["dynamic"]:
        description = f"dynamic {description}"
    return description
