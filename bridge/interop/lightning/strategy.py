"""Arguments of Lightning's strategies that bear on precision: DeepSpeed's loss scale, FSDP's own policy, DDP's hooks.

Source: Lightning 2.6.6 pytorch/strategies (deepspeed.py, fsdp.py, ddp.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.interop.lightning.instances import instance
from bridge.interop.settings import Settings
from bridge.interop.unsupported import report_rows

if TYPE_CHECKING:
    from bridge.interop.builders import ImportBuilder

__all__ = ["import_strategy", "policy_decides", "report_strategy"]

SCALE = {
    "initial_scale_power": "initial_loss_scale",
    "loss_scale_window": "loss_scale_window",
    "hysteresis": "hysteresis",
    "min_loss_scale": "min_loss_scale",
}


def policy_decides(top: Settings) -> bool:
    """Return whether a strategy that is written out brings a policy or a plugin that decides by itself."""
    given = _arguments(top)
    return given.given("mixed_precision") or given.given("precision_plugin")


def report_strategy(builder: ImportBuilder, top: Settings) -> None:
    """Report the arguments of a strategy that act whatever the precision is."""
    report_rows(builder, _arguments(top), "lightning_strategy")


def import_strategy(builder: ImportBuilder, top: Settings, plan: str, compute: str) -> None:
    """Map and report the arguments of a strategy that is written out."""
    given = _arguments(top)
    report_strategy(builder, top)
    constant = given.number("loss_scale", least=0)
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


def _arguments(top: Settings) -> Settings:
    """Return the arguments of a strategy that is written out, empty for one that is named."""
    made = instance(top.values.get("strategy"))
    if made is None:
        return Settings({}, top.system)
    return Settings(made.arguments, top.system, ".".join(filter(None, (top.name("strategy"), made.under))))
