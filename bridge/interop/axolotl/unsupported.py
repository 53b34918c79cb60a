"""Settings of Axolotl that bear on precision and have no field: all are reported.

Three kinds: settings of Axolotl itself, settings of its kernels plugin, which act only where `plugins` names it, and
names that look like precision and that nothing reads.
Source: Axolotl 0.19.0 utils/schemas, loaders/model.py, integrations/kernels/args.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bridge.interop.optimizers import report_optimizer
from bridge.interop.unsupported import BY_HAND, Row, report_row, report_rows, rows

if TYPE_CHECKING:
    from collections.abc import Collection

    from bridge.interop.builders import ImportBuilder
    from bridge.interop.settings import Settings

__all__ = ["LOOKS_LIKE_PRECISION", "report_unsupported"]

VERSION = "Axolotl 0.19.0"
LOOKS_LIKE_PRECISION = re.compile(
    r"(^|_)(bf16|fp16|fp8|fp4|fp32|tf32|amp|nvfp4|mxfp8)(_|$)|float\d|bfloat|precision|dtype|quantiz|loss_scale|autocast|\dbit"
)
OPTIMIZER_ARGUMENT = Row("an argument of the optimizer that decides how its state or the weights are rounded")
INFERENCE = Row("the dtype in which vLLM generates; a recipe is about training", harmless=())


def report_unsupported(builder: ImportBuilder, top: Settings, done: Collection[str]) -> None:
    """Report whatever else than `done` bears on precision, and what looks as if it did and is ignored."""
    report_rows(builder, top, "axolotl")
    report_rows(builder, top, "axolotl_compile")
    _kernels(builder, top)
    _attention(builder, top)
    report_optimizer(builder, "optimizer", top.values.get("optimizer"))
    arguments = top.values.get("optim_args")
    if isinstance(arguments, str) and LOOKS_LIKE_PRECISION.search(arguments):
        report_row(builder, "optim_args", arguments, OPTIMIZER_ARGUMENT)
    for name, row in (("optim_args", OPTIMIZER_ARGUMENT), ("vllm", INFERENCE)):
        block = top.values.get(name)
        for key, value in block.items() if isinstance(block, dict) else ():
            if LOOKS_LIKE_PRECISION.search(str(key)) and (value is not None or name == "optim_args"):
                report_row(builder, f"{name}.{key}", value, row)
    known = {*done, *rows("axolotl"), *rows("axolotl_compile"), *rows("axolotl_kernels")}
    for key in top.values:
        if key not in known and LOOKS_LIKE_PRECISION.search(key):
            detail = f"not a setting of {VERSION}, which ignores unknown names without a word"
            builder.report(key, top[key], "dead knob", detail, "Check its spelling, or drop it.")
        elif key != key.lower() and (key.lower() in known or LOOKS_LIKE_PRECISION.search(key.lower())):
            detail = "another letter case, which is not read"
            builder.report(key, top[key], "dead knob", detail, f"Write {key.lower()} if it is meant.")


def _kernels(builder: ImportBuilder, top: Settings) -> None:
    plugins = top.values.get("plugins")
    named = isinstance(plugins, list) and any("kernelsplugin" in str(plugin).lower() for plugin in plugins)
    for key, row in rows("axolotl_kernels").items():
        if top.given(key) and (named or top[key] is False):
            report_row(builder, key, top[key], row)
        elif top.given(key):
            detail = "a setting of the kernels plugin, which `plugins` does not name"
            builder.report(key, top[key], "dead knob", detail, "Drop it, or name the plugin.")


def _attention(builder: ImportBuilder, top: Settings) -> None:
    chosen = top.values.get("attn_implementation")
    if chosen == "sage":
        detail = rows("axolotl")["sage_attention"].detail
        builder.report("attn_implementation", chosen, "unsupported", detail, BY_HAND)
    elif chosen == "fp8":
        builder.map("attn_implementation", **({"fp8_dot_product_attention": True} if "fp8" in builder.fields else {}))
        detail = "attention through torchao's FP8 kernels (SM 9.0, PyTorch 2.11)"
        remedy = "Use fp8_dot_product_attention with an FP8 recipe."
        builder.report("attn_implementation", "fp8", "approximated", detail, remedy)
