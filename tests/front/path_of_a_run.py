"""Run the training script up to the assignment of `model.bf16`, and print the way that the precision took, as JSON.

`travelled` are the files of the package in which a function held the precision, or an object with it; `entered` are
all files of which a function ran, but for the predicates of rules and for imports; `every` are all files that ran,
those too. `calls` counts the functions that
make something.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import bridge
from bridge.front.container import build_container
from bridge.front.train import main_train
from bridge.precision.precision_config import PrecisionConfig
from bridge.precision.statements import Statements
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.sync.sync_plan import plan_sync

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = f"{Path(bridge.__file__).parent}{os.sep}"
COUNTED: dict[Any, str] = {
    inspect.unwrap(function).__code__: name
    for name, function in {
        "constructed": Statements.__init__,
        "finalized": MixedPrecisionConfig.finalize,
        "contained": build_container,
        "planned": plan_sync,
    }.items()
    if isinstance(function, FunctionType)
}
HOLDERS = ("recipe", "precision", "mixed_precision")
"""Fields of objects that hold a precision on its way."""

entered: dict[str, None] = {}
every: dict[str, None] = {}
travelled: dict[str, None] = {}
calls: Counter[str] = Counter()


def place(frame: FrameType) -> str | None:
    """Return the file of a function of the package; None for other code, and within a rule's predicate or an import."""
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE) or not code.co_flags & inspect.CO_OPTIMIZED:
        return None
    caller = frame.f_back
    while caller is not None:
        if caller.f_code.co_name == "<module>" and caller.f_globals["__name__"] != "__main__":
            return None
        if caller.f_code.co_name == "evaluate_rule" and caller.f_code.co_filename == f"{PACKAGE}rules/rule.py":
            return None
        caller = caller.f_back
    return code.co_filename.removeprefix(PACKAGE)


def holds_precision(value: object) -> bool:
    """Return whether a value is a precision, or an object with one."""
    names = getattr(type(value), "__dataclass_fields__", {})
    return isinstance(value, PrecisionConfig) or any(
        isinstance(getattr(value, name, None), PrecisionConfig) for name in HOLDERS if name in names
    )


def watch(frame: FrameType, event: str, argument: object) -> None:
    """Note a call or a return; end at the assignment."""
    if event == "call":
        calls[COUNTED.get(frame.f_code, "")] += 1
        if frame.f_code.co_filename.startswith(PACKAGE):
            every.setdefault(frame.f_code.co_filename.removeprefix(PACKAGE))
        name = place(frame)
        if name is not None:
            entered.setdefault(name)
    elif event == "return" and any(map(holds_precision, list(frame.f_locals.values()))):
        name = place(frame)
        if name is not None:
            travelled.setdefault(name)
    elif event == "c_call" and argument is setattr and frame.f_locals.get("attribute") == "bf16":
        sys.setprofile(None)
        end(frame)


def end(frame: FrameType | None) -> None:
    """Print what was noted, with the functions that still run, and end the process."""
    while frame is not None:
        name = place(frame)
        if name is not None:
            travelled.setdefault(name)
        frame = frame.f_back
    found = {"entered": list(entered), "travelled": list(travelled), "every": list(every), "calls": calls}
    print(json.dumps(found), flush=True)  # noqa: T201
    os._exit(0)


if __name__ == "__main__":
    sys.setprofile(watch)
    main_train(config_path=ROOT / "conf")
