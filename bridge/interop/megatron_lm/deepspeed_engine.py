"""Megatron-LM under DeepSpeed, whose configuration decides: the engine scales the loss and reduces gradients itself.

Source: Megatron-DeepSpeed megatron/optimizer/__init__.py, which returns the bare optimizer under --deepspeed and leaves
the arguments of its own scaler unread.
"""

import json
import re
from typing import Any

from bridge.errors import BridgeError
from bridge.interop import deepspeed
from bridge.interop.builders import ImportBuilder
from bridge.interop.contract import ImportReport
from bridge.interop.launch.launches import path_of
from bridge.interop.launch.word import UNKNOWN, Word
from bridge.interop.megatron_lm.arguments import Arguments
from bridge.interop.megatron_lm.flags import OTHER_SETTINGS, bears_on_precision
from bridge.interop.reading import strict_json
from bridge.rules.inert import SCALER_SCHEDULE

FILE = "deepspeed_config"
SCALER = ("loss_scale", *SCALER_SCHEDULE)
REDUCTION = ("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16")
OWNED = (FILE, *SCALER, *REDUCTION)
"""Settings of Megatron-LM's that the engine decides instead."""
MODE = ("bf16", "fp16", "fp32", "params_dtype", "pipeline_dtype")
LATE = "$"
"""Stands in a file for what only the run decides."""
STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\$')


def is_engine(run: Arguments) -> bool:
    """Return whether a run hands training to DeepSpeed."""
    return "deepspeed" in run or FILE in run.settings


def cross(run: Arguments, mode: str, builder: ImportBuilder) -> tuple[str, ImportReport | None]:
    """Report the arguments that have no effect under the engine, and map what its file says instead.

    Return the mode that decides, and the reading of the file; None where the script does not write it.
    """
    for key in (*SCALER, *REDUCTION):
        written = run.settings.get(key)
        if written is not None and written.value is not False:
            does = "scales the loss" if key in SCALER else "reduces gradients"
            builder.record("megatron_deepspeed.under-deepspeed-the-engine", written.name, written.shown, does=does)
    option = run.settings.get(FILE)
    if option is None:
        builder.record("megatron_deepspeed.the-engine-scales-the-loss", "--deepspeed", True)
        return mode, None
    name = str(option.shown)
    file = run.launch.files.get(path_of(name))
    found = _read(file.text, name) if file is not None else None
    if file is None or found is None:
        builder.report(option.name, option.shown, *OTHER_SETTINGS[FILE].record)
        return mode, None
    builder.map(option.name)
    found = found.assume_default() if mode == "fp32" else found  # no layer above adds a block
    if found.decided_by is not None:
        builder.leave_mode(f"{found.decided_by.rstrip(',')}, as {name} has it, or --{mode}")
    elif mode != found.config.mode:
        facts = {"file": name, "line": file.line, "mode": found.config.mode}
        builder.record("megatron_deepspeed.two-modes", f"--{mode}", True, **facts)
    if mode != found.config.mode:
        builder.fields = {field: value for field, value in builder.fields.items() if field not in MODE}
    builder.take(found, f"{name}: ")
    return "fp32" if found.decided_by else found.config.mode, found


def _read(text: str, name: str) -> ImportReport | None:
    """Return what a file asks for; None for no JSON, where only the run decides, and for what DeepSpeed refuses."""
    late = UNKNOWN.sub(LATE, Word.of(text))
    try:
        content = strict_json.loads(STRING.sub(lambda one: f'"{LATE}"' if one[0] == LATE else one[0], late), name)
        return deepspeed.import_(_known(content)) if isinstance(content, dict) and not _is_open(content) else None
    except BridgeError:
        return None


def _is_open(content: dict[str, Any]) -> bool:
    """Return whether only the run decides a setting that bears on precision."""
    return any(bears_on_precision(key) and LATE in json.dumps(value) for key, value in content.items())


def _known(content: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are known."""
    inner = {key: _known(value) if isinstance(value, dict) else value for key, value in content.items()}
    return {key: value for key, value in inner.items() if not (isinstance(value, str) and LATE in value)}
