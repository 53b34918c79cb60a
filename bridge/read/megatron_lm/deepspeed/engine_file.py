"""`load_engine_file`: the JSON of DeepSpeed's engine that a run of Megatron-DeepSpeed names.

    file = load_engine_file(written, "train.sh")
    parse_engine_settings(file.content).fields    # {"bf16": True, ...}

The JSON is read if the script writes it by `cat` and a here-document, or if it lies next to the
script.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bridge.errors import PayloadError
from bridge.read import deepspeed
from bridge.read.foreign.reports import ImportReport
from bridge.read.launch.shell_word import OPEN_PIECE_PATTERN, ShellWord
from bridge.read.megatron_lm.written_arguments import WrittenArguments
from bridge.read.text import strict_json
from bridge.read.text.document import Document
from bridge.target.fields import parse_integer

DEEPSPEED_FILE_ARGUMENT = "deepspeed_config"
"""Argument that names the file."""
ZERO_KEY = "zero_optimization"
PRECISION_KEYS = ("fp16", "bf16", "bfloat16", "data_types", "communication_data_type", ZERO_KEY)
"""Keys of the JSON that decide about formats and shards."""
OPEN_VALUE = "<open>"
"""A text in the place of a value that only the started run decides."""
OPEN_VALUE_PATTERN = re.compile(rf"(?<=[\s:\[,])(?:{OPEN_PIECE_PATTERN.pattern})(?=[\s,\]}}]|\Z)")
"""An unknown piece of a script that is a whole value of the JSON. It has no quotes, so that the text is no JSON yet."""
UNFOLLOWED_SETTINGS = re.compile(
    r"compression_training|quantize_training|weight_quantization|msamp|torch_autocast\.enabled|amp\Z"
    r"|\w+_master_weights_and_grads|bf16_optimizer_states"
)
"""Settings of the JSON that give layers or masters other formats than a plan of the mode shows."""
ACCUMULATED_AND_SENT = (
    "the engine accumulates gradients in {accumulated} and sends them between ranks in {sent}, "
    "and Megatron has one switch for both"
)
BY_THE_RELEASE = (
    "without ZeRO the engine accumulates gradients in fp32 before DeepSpeed 0.17.6 and in bf16 "
    "from it on, and sends them between ranks in {sent}"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFile:
    """The JSON of the engine."""

    name: str = ""
    """The path as the arguments have it; empty if they name no file."""
    location: str = ""
    """Where the JSON was read, for messages: the script, or the path of the file."""
    content: Mapping[str, object] | None = None
    """The content; None if the file is not read."""


def load_engine_file(written: WrittenArguments, path: str) -> EngineFile:
    """Return the engine's JSON of a run. It has no content if it cannot be read.

    Args:
        written: The arguments as they are written.
        path: Path of the script.
    """
    setting = written.settings.get(DEEPSPEED_FILE_ARGUMENT)
    if setting is None:
        return EngineFile()
    name = str(setting.shown)
    text = written.launch.files.get(name)
    location = "the script, which writes it"
    if text is None and not ShellWord(name).is_open:
        file = Path(path).parent / name
        location = str(file)
        text = _load_text(file)
    content = None
    if text is not None:
        content = _parse_content(text, name)
    if content is None:
        return EngineFile(name=name)
    return EngineFile(name=name, location=location, content=content)


def _load_text(file: Path) -> str | None:
    """Return the text of a file; None for a file that cannot be read."""
    try:
        return Document.load(file).text
    except (PayloadError, ValueError):
        return None


def _parse_content(text: str, name: str) -> Mapping[str, object] | None:
    """Return the content of the JSON.

    It is None for a text with an error, and for a text whose formats only the started run decides.
    """
    complete_text = OPEN_VALUE_PATTERN.sub(f'"{OPEN_VALUE}"', ShellWord.from_text(text))
    try:
        content = strict_json.loads(complete_text, name)
    except PayloadError:
        return None
    if not isinstance(content, Mapping):
        return None
    if any(_is_open(content.get(key)) for key in PRECISION_KEYS):
        return None
    return content


def _is_open(value: object) -> bool:
    """Return whether only the started run decides a value of the JSON, or a part of it."""
    if isinstance(value, Mapping):
        return any(map(_is_open, value.keys())) or any(map(_is_open, value.values()))
    if isinstance(value, list):
        return any(map(_is_open, value))
    if not isinstance(value, str):
        return False
    return OPEN_VALUE in value or OPEN_PIECE_PATTERN.search(value) is not None


class EngineFileSettings(NamedTuple):
    """The settings that the engine's JSON states."""

    fields: dict[str, object] | None = None
    """Fields of a precision; None if the JSON does not decide it."""
    stage: int | None = None
    """The stage of ZeRO; None if the JSON does not decide it."""
    unfollowed: tuple[str, ...] = ()
    """Settings that change formats and that no plan follows."""
    reduction: str | None = None
    """Why no switch of Megatron describes the engine's gradients, as a clause; None if a switch does."""


def parse_engine_settings(content: Mapping[str, object] | None) -> EngineFileSettings:
    """Return the settings that the JSON of an engine states; none for a file that is not read."""
    if content is None:
        return EngineFileSettings()
    stage = _parse_stage(content)
    try:
        report = deepspeed.import_(dict(content))
    except PayloadError:
        return EngineFileSettings(stage=stage)
    unfollowed = _list_unfollowed_settings(report)
    if report.decided_by is not None:
        return EngineFileSettings(stage=stage, unfollowed=unfollowed)
    fields = report.config.to_dict()
    reduction = None
    for mode in ("bf16", "fp16"):
        if fields.get(mode):
            reduction = _describe_other_reduction(content, mode, stage)
    if reduction is not None:
        del fields["grad_reduce_in_fp32"]
    return EngineFileSettings(fields, stage, unfollowed, reduction)


def _describe_other_reduction(
    content: Mapping[str, object], mode: str, stage: int | None
) -> str | None:
    """Return why no switch of Megatron describes the engine's gradients; None if a switch does.

    Source: DeepSpeed 0.9.2 to 0.19.8 runtime/engine.py, get_data_types and communication_data_type.
    """
    data_types = content.get("data_types")
    stated_dtype = None
    if isinstance(data_types, Mapping):
        stated_dtype = data_types.get("grad_accum_dtype")
    sent = str(content.get("communication_data_type") or mode).lower()
    if stated_dtype is None and mode == "bf16" and not stage:
        return BY_THE_RELEASE.format(sent=sent)
    accumulated = deepspeed.DTYPE_NAMES.get(str(stated_dtype), mode)
    if accumulated != sent:
        return ACCUMULATED_AND_SENT.format(accumulated=accumulated, sent=sent)
    return None


def _parse_stage(content: Mapping[str, object]) -> int | None:
    """Return the stage of ZeRO. It is 0 without a block of ZeRO, and None if it is no number."""
    block = content.get(ZERO_KEY)
    if not isinstance(block, Mapping):
        return 0
    return parse_integer(block.get("stage", 0))


def _list_unfollowed_settings(report: ImportReport) -> tuple[str, ...]:
    """Return the settings of the JSON that change formats and that no plan follows."""
    settings: list[str] = []
    for unmapped in report.unmapped:
        if UNFOLLOWED_SETTINGS.search(unmapped.field) and unmapped.value:
            settings.append(unmapped.field)
    return tuple(settings)
