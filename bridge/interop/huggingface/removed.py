"""Arguments that transformers 5 removed and 4 reads: whether NVIDIA's Apex casts instead of torch, and at what level.

    fp16_opt_level   O0 FP32   O1 FP32 weights, cast per function   O2 FP16 weights, FP32 masters   O3 FP16 throughout

Source: transformers 4.57.6 training_args.py, trainer.py; 5.23.0 training_args.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.interop.builders import ImportBuilder
    from bridge.interop.settings import Settings

__all__ = ["REMOVED", "report_removed"]

BACKENDS = ("fp16_backend", "half_precision_backend")
"""The first is the older name, and wins where both are written."""
LEVEL = "fp16_opt_level"
REMOVED = (*BACKENDS, LEVEL)
LEVELS = {
    "O0": "keeps FP32 throughout",
    "O1": "casts per function over FP32 weights, which is what was read",
    "O2": "makes the weights FP16, over FP32 masters",
    "O3": "makes everything FP16",
}
REFUSED = "5 has no such argument and refuses it"
DROP = "Drop it; bf16 and fp16 are what is left."


def report_removed(builder: ImportBuilder, top: Settings, compute: str) -> None:
    """Report the removed arguments, by what they do in the release that reads them."""
    backend = next((top[name] for name in BACKENDS if top.values.get(name) not in (None, "auto")), None)
    casts = backend == "apex" and compute == "fp16"
    for name in BACKENDS:
        if not top.given(name):
            continue
        reason, detail = "dead knob", f"torch's autocast casts all the same in transformers 4, and {REFUSED}"
        if top[name] == "apex" and compute == "fp16":
            reason = "semantics"
            detail = (
                f"in transformers 4 NVIDIA's Apex casts instead of torch's autocast, at {LEVEL} (O1 unless it is "
                f"written); {REFUSED}"
            )
        elif top[name] == "apex":
            detail = f"transformers 4 reads it in FP16 only, and refuses it in BF16; {REFUSED}"
        builder.report(name, top[name], reason, detail, DROP)
    if not top.given(LEVEL):
        return
    reason, detail = "dead knob", f"read where half_precision_backend is apex (transformers 4), and {REFUSED}"
    if casts:
        reason = "semantics"
        what = LEVELS.get(str(top[LEVEL]), "is no level of Apex")
        detail = f"in transformers 4 Apex {what}; {REFUSED}"
    builder.report(LEVEL, top[LEVEL], reason, detail, DROP)
