"""NVIDIA's Apex in Lightning 1: `amp_backend: apex` has it cast instead of torch, at the level `amp_level`.

    O0 FP32    O1 FP32 weights, cast per function    O2 FP16 weights, FP32 masters    O3 FP16 throughout

Lightning 1.2 ignores a level without the back end, 1.9 refuses it, and 2.0 has neither argument.
Source: Lightning 1.2, 1.9 and 2.0 trainer/connectors/accelerator_connector.py; Apex amp/frontend.py, amp/scaler.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.interop.amp import amp_fields
from bridge.interop.scaler import TORCH_SCALER

if TYPE_CHECKING:
    from bridge.interop.builders import ImportBuilder
    from bridge.interop.contract import ImportReport
    from bridge.interop.settings import Settings

__all__ = ["casts_by_apex", "import_apex", "report_apex"]

LEVELS = ("O0", "O1", "O2", "O3")
USUAL = "O2"
"""The level of Lightning 1 where `amp_level` is not written."""
GONE = "Lightning refuses it from 2.0 on"


def casts_by_apex(top: Settings, word: str) -> bool:
    """Return whether Apex does the casting at this precision."""
    return top.values.get("amp_backend") == "apex" and word in ("16", "16-mixed")


def report_apex(builder: ImportBuilder, top: Settings) -> None:
    """Report settings of Apex where it does not cast."""
    if top.given("amp_level"):
        detail = "read where amp_backend is apex and the precision 16; Lightning 1.2 ignores it, 1.9 and 2.0 refuse it"
        builder.report(top.name("amp_level"), top["amp_level"], "dead knob", detail, "Drop it.")
    if top.values.get("amp_backend") == "native":
        builder.map(top.name("amp_backend"))
    elif top.given("amp_backend"):
        detail = f"read where the precision is 16 and no plugin decides; {GONE}"
        builder.report(top.name("amp_backend"), top["amp_backend"], "dead knob", detail, "Drop it.")


def import_apex(builder: ImportBuilder, top: Settings) -> ImportReport:
    """Return the import of precision 16 by Apex."""
    name = top.name("amp_level")
    level = top.word("amp_level", LEVELS) or USUAL
    compute = "fp32" if level == "O0" else "fp16"
    fields: dict[str, Any] = {"fp16": True, "params_dtype": "fp16", "grad_reduce_in_fp32": False}
    semantics = {"O0": "fp32", "O1": "amp_o1", "O2": "megatron_o2"}.get(level, "true")
    if level in ("O0", "O1"):
        fields = amp_fields(compute)
    for key in ("precision", "amp_level"):
        if top.given(key):
            builder.map(top.name(key), **fields)
    builder.fields |= fields
    if not top.given("amp_level"):
        builder.implied(name, level, "in Lightning 1")
    detail = f"Apex casts instead of torch, at its level {level}; {GONE}"
    remedy = "Drop it, and torch casts: 16-mixed is AMP there."
    builder.report(top.name("amp_backend"), "apex", "semantics", detail, remedy)
    if level in ("O1", "O2"):
        detail = (
            "Apex begins at 65536, doubles after 2000 steps, halves at the first overflow and has no smallest scale"
        )
        builder.implied(f"{name}.loss_scale", "dynamic", detail, **TORCH_SCALER)
    elif level == "O3":
        builder.fields["loss_scale"] = 1.0
        detail = "weights and gradients are FP16 and the optimizer steps on them, with the loss scaled by 1"
        builder.without_masters(name, level, detail)
    return builder.finish(semantics)
