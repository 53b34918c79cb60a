"""`load_engine_file`: the JSON of DeepSpeed's engine that a run of Megatron-DeepSpeed names.

    stated_by(engine_file(run, "train.sh").content).fields    # {"bf16": True, ...}

It is read where the script writes it by `cat` and a here-document, or where it lies next to the
script.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bridge.errors import PayloadError
from bridge.read import deepspeed
from bridge.read.launch.shell_word import UNKNOWN_PATTERN, ShellWord
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
"""A text in the place of a value that only the run decides."""
LATE_VALUE_PATTERN = re.compile(rf"(?<=[\s:\[,])(?:{UNKNOWN_PATTERN.pattern})(?=[\s,\]}}]|\Z)")
UNFOLLOWED_SETTINGS = re.compile(
    r"compression_training|quantize_training|weight_quantization|msamp|torch_autocast\.enabled|amp\Z"
    r"|\w+_master_weights_and_grads|bf16_optimizer_states"
)
"""Settings of the JSON by which layers or masters have other formats than a plan of the mode
shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFile:
    """The JSON of the engine."""

    name: str = ""
    """The path as the arguments have it; empty where they name no file."""
    place: str = ""
    """The place where it was read, in words."""
    content: Mapping[str, Any] | None = None
    """The content; None where the file is not read."""


def load_engine_file(run: WrittenArguments, path: str) -> EngineFile:
    """Return the engine's JSON of a run; without content where it is not read.

    Args:
        run: The arguments as they are written.
        path: Path of the script.
    """
    written = run.settings.get(DEEPSPEED_FILE_ARGUMENT)
    if written is None:
        return EngineFile()
    name = str(written.shown)
    text = run.launch.files.get(name)
    location = "the script, which writes it"
    if text is None and not ShellWord(name).is_unknown:
        file = Path(path).parent / name
        location = str(file)
        text = _load_text(file)
    content = None
    if text is not None:
        content = _parse_content(text, name)
    if content is None:
        return EngineFile(name=name)
    return EngineFile(name=name, place=location, content=content)


def _load_text(file: Path) -> str | None:
    """Return the text of a file; None for a file that cannot be read."""
    try:
        return Document.load(file).text
    except (PayloadError, ValueError):
        return None


def _parse_content(text: str, name: str) -> Mapping[str, Any] | None:
    """Return the content of the JSON; None where it has an error, or where only the run decides the formats."""
    try:
        content = strict_json.loads(
            LATE_VALUE_PATTERN.sub(f'"{OPEN_VALUE}"', ShellWord.from_text(text)), name
        )
    except PayloadError:
        return None
    if not isinstance(content, Mapping):
        return None
    decisive = str({key: content[key] for key in PRECISION_KEYS if key in content})
    if OPEN_VALUE in decisive or UNKNOWN_PATTERN.search(decisive):
        return None
    return content


ACCUMULATED_AND_SENT = (
    "the engine accumulates gradients in {accumulated} and sends them between ranks in {sent}, "
    "and Megatron has one switch for both"
)
BY_THE_RELEASE = (
    "without ZeRO the engine accumulates gradients in fp32 before DeepSpeed 0.17.6 and in bf16 "
    "from it on, and sends them between ranks in {sent}"
)


class EngineFileSettings(NamedTuple):
    """The settings that the engine's JSON states."""

    fields: dict[str, Any] | None = None
    """Fields of a precision; None where the JSON leaves it open."""
    stage: int | None = None
    """The stage of ZeRO; None where the JSON leaves it open."""
    unfollowed: tuple[str, ...] = ()
    """Settings that change formats and that no plan follows."""
    reduction: str | None = None
    """Why no switch of Megatron has the effect of the engine on gradients, a clause; None where one has."""


def parse_engine_settings(content: Mapping[str, Any] | None) -> EngineFileSettings:
    """Return the settings that the JSON of an engine states."""
    if content is None:
        return EngineFileSettings()
    block = content.get(ZERO_KEY)
    stage: int | None = 0
    if isinstance(block, Mapping):
        stage = parse_integer(block.get("stage", 0))
    try:
        report = deepspeed.import_(dict(content))
    except PayloadError:
        return EngineFileSettings(stage=stage)
    settings: list[str] = []
    for unmapped in report.unmapped:
        if UNFOLLOWED_SETTINGS.search(unmapped.field) and unmapped.value:
            settings.append(unmapped.field)
    unfollowed = tuple(settings)
    if report.decided_by is not None:
        return EngineFileSettings(stage=stage, unfollowed=unfollowed)
    fields = report.config.to_dict()
    reduction = None
    for mode in ("bf16", "fp16"):
        if fields.get(mode):
            reduction = _reduction(content, mode, stage)
    if reduction is not None:
        del fields["grad_reduce_in_fp32"]
    return EngineFileSettings(fields, stage, unfollowed, reduction)


def _reduction(content: Mapping[str, Any], mode: str, stage: int | None) -> str | None:
    """Return why no switch of Megatron has the engine's effect on gradients; None where one has.

    Source: DeepSpeed 0.9.2 to 0.19.8 runtime/engine.py, get_data_types and communication_data_type.
    """
    types = content.get("data_types")
    written = None
    if isinstance(types, Mapping):
        written = types.get("grad_accum_dtype")
    sent = str(content.get("communication_data_type") or mode).lower()
    if written is None and mode == "bf16" and not stage:
        return BY_THE_RELEASE.format(sent=sent)
    accumulated = deepspeed.DTYPE_NAMES.get(str(written), mode)
    if accumulated != sent:
        return ACCUMULATED_AND_SENT.format(accumulated=accumulated, sent=sent)
    return None
