"""Megatron-LM under DeepSpeed, whose engine scales the loss and reduces gradients as its own file says.

Source: Megatron-DeepSpeed megatron/optimizer/__init__.py, which returns the bare optimizer to the engine and leaves the
arguments of its own scaler unread.
"""

import re
from pathlib import PurePosixPath
from typing import Any

from bridge.errors import BridgeError, PayloadError
from bridge.interop import deepspeed
from bridge.interop.builders import ImportBuilder
from bridge.interop.contract import ImportReport
from bridge.interop.launch.launches import WrittenFile
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
FIELDS = {"initial_scale_power": "initial_loss_scale"}
"""Settings of DeepSpeed's that have another name here."""
STRING = re.compile(r'"(?:[^"\\]|\\.)*"|(__\d+__)')
"""A string of JSON, or the stand-in of a piece that only the run decides."""
BLOCKS = ("fp16", "bf16", "bfloat16", "torch_autocast", "data_types", "amp")


def is_engine(run: Arguments) -> bool:
    """Return whether a run trains with DeepSpeed's engine."""
    return "deepspeed" in run or FILE in run.settings


def cross(run: Arguments, mode: str, builder: ImportBuilder) -> tuple[str, str | None]:
    """Map what the engine's file says where the script writes it, and leave open what it decides where not.

    Return the mode and the semantics that the file decides; None for the semantics where it is not read.
    """
    _owned(run, builder)
    option = run.settings.get(FILE)
    if option is None:
        builder.record("megatron_deepspeed.the-engine-scales-the-loss", "--deepspeed", True)
        return mode, None
    name = str(option.shown)
    file = run.launch.files.get(str(PurePosixPath(name)))
    found = _read(file, name) if file is not None else None
    if file is None or found is None:
        builder.report(option.name, option.shown, *OTHER_SETTINGS[FILE].record)
        return mode, None
    imported, open_ = found
    builder.map(option.name)
    if mode == "fp32":
        imported = imported.assume_default()  # no layer above adds a block
    elif imported.decided_by is not None:
        builder.leave_mode(f"{imported.decided_by.rstrip(',')}, as {name} has it, or --{mode}")
    elif mode != imported.config.mode:
        facts = {"file": name, "line": file.line, "mode": imported.config.mode}
        builder.record("megatron_deepspeed.two-modes", f"--{mode}", True, **facts)
    if mode != imported.config.mode:
        for field in ("bf16", "fp16", "fp32", "params_dtype", "pipeline_dtype"):
            builder.fields.pop(field, None)
    _carry(imported, open_, name, builder)
    return "fp32" if imported.decided_by else imported.config.mode, imported.semantics


def _read(file: WrittenFile, name: str) -> tuple[ImportReport, dict[str, str]] | None:
    """Return what a file asks for, and its settings that only the run decides; None where these switch a mode.

    None too where the script does not write all of it, and for what DeepSpeed refuses.
    """
    found = settings_of(file, name)
    if found is None:
        return None
    values, late = found
    open_ = {key: value for key, value in late.items() if key.partition(".")[0] in BLOCKS or bears_on_precision(key)}
    if any(key.endswith("enabled") for key in open_):
        return None
    try:
        return deepspeed.import_(values), open_
    except BridgeError:
        return None


def _owned(run: Arguments, builder: ImportBuilder) -> None:
    """Report the arguments that have no effect under the engine."""
    for key in (*SCALER, *REDUCTION):
        written = run.settings.get(key)
        if written is not None and written.value is not False:
            does = "scales the loss" if key in SCALER else "reduces gradients"
            builder.record("megatron_deepspeed.under-deepspeed-the-engine", written.name, written.shown, does=does)


def _carry(imported: ImportReport, open_: dict[str, str], name: str, builder: ImportBuilder) -> None:
    """Put what the file says over what the arguments say; leave out what only the run decides."""
    unknown = {FIELDS.get(name, name) for name in (key.rpartition(".")[2] for key in open_)}
    stated = {field: value for field, value in imported.config.to_dict().items() if field not in unknown}
    for setting, fields in imported.mapped.items():
        builder.map(f"{name}: {setting}", **{field: stated[field] for field in fields if field in stated})
    builder.fields.update(stated)
    for loss in imported.unmapped:
        if loss.field not in (*open_, "mode"):
            builder.report(f"{name}: {loss.field}", loss.value, loss.reason, loss.detail, loss.remedy)
    for key, value in open_.items():
        builder.record("megatron_deepspeed.only-the-run-decides", f"{name}: {key}", value)


def settings_of(file: WrittenFile, path: str) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Return the settings of a JSON file that a script writes, and those whose values only the run knows.

    The second are texts by their dotted names; None where the script does not write all of it, or it is no JSON.
    """
    if file.text is None:
        return None
    whole = Word.of(file.text)
    texts = {f"__{found.start()}__": found[0] for found in UNKNOWN.finditer(whole)}
    text = UNKNOWN.sub(lambda found: f"__{found.start()}__", whole)
    try:
        content = strict_json.loads(STRING.sub(lambda found: f'"{found[1]}"' if found[1] else found[0], text), path)
    except PayloadError:
        return None
    late: dict[str, str] = {}
    return (_known(content, late, "", texts), late) if isinstance(content, dict) else None


def _known(content: dict[str, Any], late: dict[str, str], above: str, texts: dict[str, str]) -> dict[str, Any]:
    """Return the settings that are known, and note the others; `texts` are those of the parts that are not."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            found[key] = _known(value, late, f"{above}{key}.", texts)
        elif any(one in f"{key} {value}" for one in texts):
            late[f"{above}{key}"] = re.sub(r"__\d+__", lambda match: texts.get(match[0], match[0]), str(value))
        else:
            found[key] = value
    return found
