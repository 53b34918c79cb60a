"""`fp8` in a Trainer's file: an argument of LLaMA-Factory, which hands FP8 on to accelerate past the Trainer.

How it does so stopped working: the Trainer reads ACCELERATE_MIXED_PRECISION before LLaMA-Factory sets it, and gives
its own answer to the Accelerator, from transformers 5.0 on. The requested FP8 is mapped, and this is reported.
Source: LLaMA-Factory 0.9.5 train/fp8_utils.py, transformers 4.57.6, 5.0.0, 5.6.0 and 5.23.0 trainer.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.interop.builders import ImportBuilder
    from bridge.interop.settings import Settings

__all__ = ["SETTINGS", "float8"]

FACTORY = "LLaMA-Factory 0.9.5"
SETTINGS = ("fp8", "fp8_backend", "fp8_enable_fsdp_float8_all_gather")
BACKENDS = ("auto", "torchao", "te", "msamp")
GATHER = SETTINGS[2]
CHECK = "Look for `enabled: True` in its log line on FP8, and state no fp8 in the recipe if it is not there."


def float8(builder: ImportBuilder, top: Settings, compute: str, *, on: bool) -> str:
    """Map FP8, and return the compute that it runs under; `compute` where it is off."""
    if not on:
        for name in SETTINGS:
            value = top.values.get(name)
            if value is False or (name == "fp8_backend" and value == "auto"):
                builder.map(name)
            elif name == GATHER and value is not None:
                detail = f"{FACTORY} says that it turns fp8 on, and sets it where nothing reads it"
                builder.report(name, value, "dead knob", detail, "Write fp8: true, or drop it.")
            elif value is not None:
                builder.report(name, value, "dead knob", "nothing is FP8 without fp8: true", "Drop it.")
        return compute
    backend = top.word("fp8_backend", BACKENDS) or "auto"
    if top.values.get("quantization_bit") is not None:
        raise top.wrong("fp8", f"must be off where quantization_bit is set ({FACTORY})", top["fp8"], "Keep one of them")
    if compute == "fp16":
        builder.report("fp16", True, "semantics", "FP8 runs under BF16 autocast in accelerate", "Write bf16: true.")
    if backend == "te":
        _transformer_engine(builder, top)
    else:
        _torchao(builder, top, backend, compute)
    return "bf16"


def _transformer_engine(builder: ImportBuilder, top: Settings) -> None:
    builder.map("fp8", fp8="hybrid", fp8_amax_history_len=16, fp8_amax_compute_algo="max")
    builder.map("fp8_backend", fp8_recipe="delayed")
    detail = f"{FACTORY} asks Transformer Engine for HYBRID, a history of 16 and max"
    builder.report("fp8", "te", "implied default", detail, "State fp8_amax_history_len to have another history.")
    detail = "from transformers 5.6 on the Trainer hands over handlers of its own, and this one never arrives"
    builder.report("fp8_backend", "te", "semantics", detail, CHECK)
    if top.given(GATHER):
        if top[GATHER] is False:
            builder.map(GATHER)
        else:
            builder.report(GATHER, top[GATHER], "dead knob", "a setting of torchao", "Drop it.")


def _torchao(builder: ImportBuilder, top: Settings, backend: str, compute: str) -> None:
    builder.map("fp8", fp8="hybrid", fp8_recipe="tensorwise")
    detail = (
        f"from transformers 5.0 on the Trainer tells the Accelerator {'no' if compute == 'fp32' else compute} all the "
        "same; before, accelerate's own tensorwise recipe runs, not the rowwise one that is built for the log"
    )
    builder.report("fp8", True, "semantics", f"{detail} ({FACTORY})", CHECK)
    unread = f"{FACTORY} hands it on under a name that accelerate does not read"
    if backend == "msamp":
        builder.report("fp8_backend", backend, "dead knob", f"{unread}, which takes torchao first", "Write torchao.")
    elif top.given("fp8_backend"):
        builder.map("fp8_backend", fp8_recipe="tensorwise")
    remedy = "State fp8_param_gather as it is meant."
    if top.given(GATHER):
        gather = bool(top.switch(GATHER))
        builder.map(GATHER, fp8_param_gather=gather)
        builder.report(GATHER, gather, "semantics", f"{unread}, whose default, on, decides under FSDP2", remedy)
    else:
        detail = f"off in {FACTORY}; accelerate's own default, on, decides under FSDP2"
        builder.report(GATHER, None, "implied default", detail, remedy)
