"""`Engine`: what DeepSpeed's engine makes of a run of Megatron-DeepSpeed, as its own JSON says.

The engine casts the weights, keeps masters and states, and reduces gradients in the dtype of the weights; Megatron's
own optimizer and its reduction in FP32 do not run. Its JSON is read where the script writes it by `cat` and a
here-document, or where it lies next to the script. The engine's own buffers are not counted.

Source: DeepSpeed 0.17 runtime/engine.py, `get_data_types`, and runtime/bf16_optimizer.py; Megatron-DeepSpeed of
2025-07-16 megatron/arguments.py and megatron/model/gpt_model.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bridge.errors import PayloadError
from bridge.interop import deepspeed
from bridge.interop.launch.word import UNKNOWN, Word
from bridge.interop.megatron_lm.arguments import Arguments
from bridge.interop.megatron_lm.effects import DEEPSPEED_FILE
from bridge.interop.reading import strict_json
from bridge.interop.reading.document import Document
from bridge.rules.fields import whole_number

NAME = "--deepspeed"
ZERO = "zero_optimization"
OF_PRECISION = ("fp16", "bf16", "bfloat16", "data_types", "communication_data_type", ZERO)
"""Keys of the JSON that decide about formats and shards."""
OPEN = "<open>"
"""Stands for a value that only the run decides."""
VALUE = re.compile(rf"(?<=[\s:\[,])(?:{UNKNOWN.pattern})(?=[\s,\]}}]|\Z)")
RECOMPUTED = ("checkpoint_activations", "deepspeed_activation_checkpointing", "checkpoint_num_layers")
"""Arguments about recomputation that are read here."""
ENGINE = "DeepSpeed's engine"
REDUCED = "ddp.grad_reduce_in_fp32"
SHARDED = ("optimizer.use_distributed_optimizer", "ddp.use_distributed_optimizer")
NOT_COUNTED = f"{NAME}: the engine keeps weights, gradients and states in buffers of its own, which are not counted."
UNFOLLOWED = re.compile(
    r"compression_training|quantize_training|weight_quantization|msamp|torch_autocast\.enabled|amp\Z"
    r"|\w+_master_weights_and_grads|bf16_optimizer_states"
)
"""Settings of the JSON by which layers or masters have other formats than a plan of the mode shows."""
NO_PLAN = "--deepspeed_config {file}: {settings} changes formats, and the plan does not follow it."
NOT_READ = f"{NAME}: the engine does what its JSON says about formats and shards; {{file}} is not read."


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What the engine decides."""

    precision: Mapping[str, Any] | None = None
    """Fields of a precision; None: its JSON states none, or is not read."""
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Section -> fields that it sets."""
    read: tuple[str, ...] = ()
    """Arguments that are read here."""
    opened: Mapping[str, str] = field(default_factory=dict)
    """Setting that the engine decides, and that is not known -> what decides it, as a noun."""
    read_too: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    """What is left open, as sentences."""
    unplanned: str | None = None
    """Why the run has no plan, as a sentence."""


def engine_of(run: Arguments, arguments: Mapping[str, Any], mode: str, path: str) -> Engine:
    """Return what DeepSpeed's engine makes of a run.

    Args:
        run: The arguments as they are written.
        arguments: Name of an argument -> its value.
        mode: bf16, fp16 or fp32, as the arguments say.
        path: Path of the script.
    """
    written = run.settings.get(DEEPSPEED_FILE)
    name = "" if written is None else str(written.shown)
    place, content = _content(run, name, path) if name else ("", None)
    fields, stage, unfollowed = _stated(content)
    if fields is None and mode == "fp16":
        fields = {"fp16": True, "params_dtype": "fp16", "pipeline_dtype": "fp16", "grad_reduce_in_fp32": False}
    if stage is None:
        stage = whole_number(_number(arguments.get("zero_stage")))
    opened = {} if stage is not None else dict.fromkeys(SHARDED, ENGINE)
    if content is None or fields is None:
        opened[REDUCED] = ENGINE
    is_bf16 = mode == "bf16" if fields is None else bool(fields.get("bf16"))
    read_too, unplanned = list[str](), None
    if content is not None:
        read_too.append(f"--deepspeed_config {name}: read from {place}.")
    if unfollowed:
        unplanned = NO_PLAN.format(file=name, settings=" and ".join(unfollowed))
    return Engine(
        precision=fields,
        sections={"model": _recomputed(arguments), **_sharded(stage, is_bf16=is_bf16)},
        read=(*RECOMPUTED, "zero_stage"),
        opened=opened,
        read_too=tuple(read_too),
        unknown=tuple(_open(stage, name, is_read=content is not None)),
        unplanned=unplanned,
    )


def _sharded(stage: int | None, *, is_bf16: bool) -> dict[str, dict[str, Any]]:
    """Return the switches of the distributed optimizer at a stage of ZeRO; none where it is not known."""
    if stage is None:
        return {}
    is_sharded = stage > 0 or is_bf16  # BF16_Optimizer shards without ZeRO
    return {section: {switch: is_sharded} for section, _, switch in (one.partition(".") for one in SHARDED)}


def _open(stage: int | None, name: str, *, is_read: bool) -> Iterator[str]:
    """Yield what the engine leaves open, as sentences."""
    yield NOT_COUNTED
    if not is_read:
        yield NOT_READ.format(file=name or "its name is not stated, and it")
    if stage is not None and stage > 1:
        sharded = "gradients" if stage == 2 else "gradients and weights"
        yield f"{NAME}: ZeRO stage {stage} shards {sharded} too, and is counted as stage 1."


def _content(run: Arguments, name: str, path: str) -> tuple[str, Mapping[str, Any] | None]:
    """Return where the engine's JSON was found, and what it says of formats and shards; None where it is not read."""
    text, place = run.launch.files.get(name), "the script, which writes it"
    if text is None and not Word(name).is_unknown:
        file = Path(path).parent / name
        place = str(file)
        try:
            text = Document.load(file).text
        except (PayloadError, ValueError):
            text = None
    if text is None:
        return "", None
    try:
        content = strict_json.loads(VALUE.sub(f'"{OPEN}"', Word.of(text)), name)
    except PayloadError:
        return "", None
    if not isinstance(content, Mapping):
        return "", None
    decisive = str({key: content[key] for key in OF_PRECISION if key in content})
    if OPEN in decisive or UNKNOWN.search(decisive):
        return "", None
    return place, content


class _Stated(NamedTuple):
    """What the engine's JSON states; None for what it leaves open."""

    fields: dict[str, Any] | None = None
    """Fields of a precision."""
    stage: int | None = None
    """The stage of ZeRO."""
    unfollowed: tuple[str, ...] = ()
    """Settings that change formats and that no plan follows."""


def _stated(content: Mapping[str, Any] | None) -> _Stated:
    if content is None:
        return _Stated()
    block = content.get(ZERO)
    stage = whole_number(block.get("stage", 0)) if isinstance(block, Mapping) else 0
    try:
        report = deepspeed.import_(dict(content))
    except PayloadError:
        return _Stated(stage=stage)
    unfollowed = tuple(one.field for one in report.unmapped if UNFOLLOWED.search(one.field) and one.value)
    if report.decided_by is not None:
        return _Stated(stage=stage, unfollowed=unfollowed)
    fields = report.config.to_dict()
    types = content.get("data_types")
    has_dtype = isinstance(types, Mapping) and types.get("grad_accum_dtype") is not None
    if fields.get("bf16") and not stage and not has_dtype:
        fields["grad_reduce_in_fp32"] = True
    return _Stated(fields, stage, unfollowed)


def _recomputed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of recomputation that the arguments of Megatron-DeepSpeed stand for."""
    if not arguments.get("checkpoint_activations"):
        return {}
    each = whole_number(_number(arguments.get("checkpoint_num_layers"))) or 1
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": each}


def _number(value: Any) -> Any:
    """Return a number that is written as text."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 5 else None
