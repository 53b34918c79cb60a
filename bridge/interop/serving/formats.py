"""Scaling schemes in the dialects of the systems that serve a model: rows of `rows/serving.yaml`, read both ways.

Serving multiplies forward alone: of a hybrid recipe the E4M3 of inputs and weights counts. A scheme without a row, a
team's own quantizer factory, has no form in any dialect.
"""

from collections.abc import Mapping
from typing import Any

from bridge.interop.table import rows

ROWS = rows("serving")
"""Schemes, families of models, fused modules and systems; the file describes their columns."""
COMPRESSED = "compressed-tensors"
"""`quant_method` of that dialect."""
COMPARED: dict[str, object] = ROWS["compared"]
SERVED: dict[str, dict[str, Any]] = ROWS["schemes"]
"""Megatron's name of a scheme -> its form in each dialect."""
SYSTEMS: dict[str, dict[str, Any]] = ROWS["systems"]
"""Name of a system, as in `--for NAME` -> what it reads."""


def scheme_of_group(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> str | None:
    """Return the scheme of a config group of compressed-tensors, a key of `SERVED` or a few words; None: no weights."""
    if not weights:
        return None
    found = _compared(weights), _compared(inputs)
    for name, row in SERVED.items():
        if found == (_compared(row["weights"]), _compared(row["inputs"])):
            return name
    return f"{words_of(weights)} weights, {words_of(inputs) if inputs else 'unquantised'} inputs"


def scheme_of_fp8(config: Mapping[str, Any]) -> str:
    """Return the scheme of a config of the fp8 dialect: a key of `SERVED`, or a few words."""
    method, inputs = str(config.get("quant_method")), str(config.get("activation_scheme", "dynamic"))
    block = [1, 32] if method == "mxfp8" else config.get("weight_block_size")  # SGLang and MXFP8 allow no other
    stated: dict[str, Any] = {"quant_method": method, "activation_scheme": inputs}
    stated |= {} if block is None else {"weight_block_size": block}
    blocks = f" in blocks of {block}" if block else ""
    known = (name for name, row in SERVED.items() if row.get("fp8") == stated)
    return next(known, f"{method} weights{blocks}, {inputs} inputs")


def scheme_of_algorithm(name: str) -> str | None:
    """Return the scheme of an algorithm of ModelOpt: a key of `SERVED`, or ModelOpt's name; None for an empty name."""
    known = (scheme for scheme, row in SERVED.items() if name.upper() in row.get("algorithms", ()))
    return next(known, f"ModelOpt's {name}") if name else None


def title_of(scheme: str | None, mode: str = "") -> str:
    """Return a scheme in words: the title of its row, the words that stand for it, or the dtype of high precision."""
    if scheme is None:
        return mode or "not quantised"
    return str(SERVED[scheme]["title"]) if scheme in SERVED else scheme


def words_of(arguments: Mapping[str, Any]) -> str:
    """Return compressed-tensors' arguments in words: "dynamic 8-bit float per token"."""
    found = _compared(arguments)
    size = found["group_size"] or found["block_structure"]
    per = f"{found['strategy'] or 'tensor'}{f' {size}' if size else ''}"
    return f"{'dynamic ' if found['dynamic'] else ''}{found['num_bits']}-bit {found['type']} per {per}"


def _compared(arguments: Mapping[str, Any]) -> dict[str, Any]:
    if not arguments:
        return {}
    given = {name: arguments.get(name) for name in COMPARED}
    return {name: COMPARED[name] if value is None else value for name, value in given.items()}
