"""Arguments of Lightning's strategies that bear on precision: DeepSpeed's loss scale, FSDP's own policy, DDP's hooks.

Source: Lightning 2.6.6 pytorch/strategies (deepspeed.py, fsdp.py, ddp.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.interop.lightning.instances import instance
from bridge.interop.settings import Settings

if TYPE_CHECKING:
    from bridge.interop.builders import ImportBuilder

__all__ = ["import_strategy", "policy_decides", "report_strategy"]

SCALE = {
    "initial_scale_power": "initial_loss_scale",
    "loss_scale_window": "loss_scale_window",
    "hysteresis": "hysteresis",
    "min_loss_scale": "min_loss_scale",
}
UNSUPPORTED = {
    "config": ("its precision blocks decide where it has any", "Convert it as well, from deepspeed."),
    "mixed_precision": ("this policy decides instead of the precision", "Convert it by itself, from fsdp."),
    "precision_plugin": ("a plugin decides instead of the precision", "Convert it by itself, from lightning."),
    "ddp_comm_hook": ("gradients may be compressed for the all-reduce", "Look at what the hook does."),
    "ddp_comm_wrapper": ("gradients may be compressed for the all-reduce", "Look at what the wrapper does."),
}


def policy_decides(top: Settings) -> bool:
    """Return whether a strategy that is written out brings a policy or a plugin that decides by itself."""
    made = instance(top.values.get("strategy"))
    given = Settings(made.arguments, top.system, top.name("strategy")) if made is not None else None
    return given is not None and (given.given("mixed_precision") or given.given("precision_plugin"))


def report_strategy(builder: ImportBuilder, top: Settings) -> None:
    """Report the arguments of a strategy that act whatever the precision is."""
    made = instance(top.values.get("strategy"))
    if made is None:
        return
    given = Settings(made.arguments, top.system, ".".join(filter(None, (top.name("strategy"), made.under))))
    for key, (detail, remedy) in UNSUPPORTED.items():
        if given.given(key):
            builder.report(given.name(key), given[key], "unsupported", detail, remedy)


def import_strategy(builder: ImportBuilder, top: Settings, plan: str, compute: str) -> None:
    """Map and report the arguments of a strategy that is written out."""
    made = instance(top.values.get("strategy"))
    if made is None:
        return
    given = Settings(made.arguments, top.system, ".".join(filter(None, (top.name("strategy"), made.under))))
    report_strategy(builder, top)
    constant = given.number("loss_scale", least=0) if given.given("loss_scale") else None
    acts = plan == "deepspeed" and compute == "fp16"
    if constant is not None and acts:
        builder.map(given.name("loss_scale"), loss_scale=constant or None)
    elif constant is not None:
        builder.report(given.name("loss_scale"), constant, "dead knob", "read in FP16 only", "Drop it.")
    for key, field in SCALE.items():
        value = given.whole(key, least=0 if key == "initial_scale_power" else 1)
        if value is None:
            continue
        if not acts or constant:
            why = "a constant loss scale does not read it" if acts else "read in FP16 only"
            builder.report(given.name(key), value, "dead knob", why, "Drop it.")
        elif key == "initial_scale_power" and value > 1000:
            raise given.wrong(key, "must be a power of two that a float can hold", value, "Use 16, the default")
        else:
            builder.map(given.name(key), **{field: float(2**value) if key == "initial_scale_power" else value})
