"""Settings of torchtitan that bear on precision, other than the mode and the converters; none has a field.

A name that torchtitan does not know belongs to a fork, or to a module named in `job.custom_config_module`: 0.1 ignores
it without a word, 0.2 refuses the file unless that module declares it, and 0.3 reads no files.
Source: torchtitan 0.1.0 config_manager.py, 0.2.1 config/job_config.py and config/manager.py, 0.3.0 config/configs.py,
components/optimizer/optimizer.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge.interop.megatron_lm.flags import bears_on_precision
from bridge.interop.optimizers import report_optimizer
from bridge.interop.unsupported import report_row, rows

if TYPE_CHECKING:
    from bridge.interop.builders import ImportBuilder
    from bridge.interop.settings import Settings

__all__ = ["report_unsupported"]

UNKNOWN = (
    "no setting of torchtitan: 0.1 ignores it, 0.2 refuses the file unless job.custom_config_module declares it, "
    "and a fork may read it"
)
MAPPED = ("training.dtype", "training.mixed_precision_param", "training.mixed_precision_reduce")
BLOCKS = ("float8", "mx")
CONVERTED = ("quantize.linear.float8", "quantize.linear.mx", "quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
"""Blocks that are read as converters."""
QUANTISER = re.compile(r"quantize\.\w+\.[\w-]+")
DEEPEST = 8
TEXT = ("description", "name", "flavor")


def report_unsupported(builder: ImportBuilder, top: Settings) -> None:
    """Report whatever else bears on precision, and what looks as if it did and torchtitan does not know."""
    for name, value in _leaves(top.values):
        if name in rows("torchtitan") and value is not None:
            report_row(builder, name, value, rows("torchtitan")[name])
        elif name in MAPPED or value is None or name.rpartition(".")[2] in TEXT:
            continue
        elif bears_on_precision(name.rpartition(".")[2]) or QUANTISER.fullmatch(name):
            builder.report(name, value, "unsupported", UNKNOWN, "Look it up in the fork that reads it, or drop it.")
    optimizer = top.values.get("optimizer")
    report_optimizer(builder, "optimizer.name", optimizer.get("name") if isinstance(optimizer, Mapping) else None)


def _leaves(block: Mapping[Any, Any], under: str = "") -> list[tuple[str, Any]]:
    """Return settings by their dotted names, without what is read as converters; unknown blocks are whole."""
    found: list[tuple[str, Any]] = []
    for key, value in block.items():
        name = f"{under}{key}"
        if name in (*BLOCKS, *CONVERTED) or name == "converters":
            continue
        is_open = name == "quantize" or not (bears_on_precision(str(key)) or QUANTISER.fullmatch(name))
        if isinstance(value, Mapping) and is_open and under.count(".") < DEEPEST:
            found += _leaves(value, f"{name}.")
        else:
            found.append((name, value))
    return found
