"""`EngineSettings`: the settings of a run of Megatron-DeepSpeed that DeepSpeed's engine decides by its JSON.

The engine casts the weights, keeps masters and states, and accumulates and sends gradients in the
dtypes of its JSON; Megatron's own optimizer and its reduction in FP32 do not run. Its JSON is read where the
script writes it by `cat` and a here-document, or where it lies next to the script. The engine's own
buffers are not counted.

Source: DeepSpeed 0.17 runtime/engine.py, `get_data_types`, and runtime/bf16_optimizer.py;
Megatron-DeepSpeed of 2025-07-16 megatron/arguments.py and megatron/model/gpt_model.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridge.read.foreign.import_builder import MODES, ImportBuilder
from bridge.read.megatron_lm.written_arguments import WrittenArguments, WrittenSetting
from bridge.read.megatron_lm.deepspeed_file import (
    DEEPSPEED_FILE_ARGUMENT,
    EngineFile,
    EngineFileSettings,
    load_engine_file,
    parse_engine_settings,
)
from bridge.read.megatron_lm.flags import OTHER_SETTINGS
from bridge.read.megatron_lm.gradient_reduction import REDUCTION_ARGUMENTS
from bridge.rules.inert import LOSS_SCALER_FIELDS
from bridge.target.fields import parse_integer

DEEPSPEED_OPTION = "--deepspeed"
SCALER_ARGUMENTS = ("loss_scale", *LOSS_SCALER_FIELDS)
ENGINE_ARGUMENTS = (DEEPSPEED_FILE_ARGUMENT, *SCALER_ARGUMENTS, *REDUCTION_ARGUMENTS)
"""Arguments of which the engine decides by its JSON, whatever they say."""
RECOMPUTE_ARGUMENTS = (
    "checkpoint_activations",
    "deepspeed_activation_checkpointing",
    "checkpoint_num_layers",
)
"""Arguments about recomputation that are read here."""
ENGINE_FIELDS = (*MODES, "params_dtype", "pipeline_dtype", "grad_reduce_in_fp32", *SCALER_ARGUMENTS)
"""Fields that the engine decides by its JSON, whatever the arguments say."""
FP16_FIELDS = {
    "fp16": True,
    "params_dtype": "fp16",
    "pipeline_dtype": "fp16",
    "grad_reduce_in_fp32": False,
}
"""Fields of the engine's precision under `--fp16`, where its JSON is not read."""
ENGINE_NOUN = "DeepSpeed's engine"
REDUCTION_SETTING = "ddp.grad_reduce_in_fp32"
REDUCED_BY_THE_PRECISION = "mixed_precision.grad_reduce_in_fp32"
SHARDING_SETTINGS = ("optimizer.use_distributed_optimizer", "ddp.use_distributed_optimizer")
BUFFERS_NOT_COUNTED = (
    f"{DEEPSPEED_OPTION}: the engine keeps weights, gradients and states in buffers of its own, "
    "which are not counted."
)
FORK_NOUN = "the fork of Megatron-LM for DeepSpeed"
EXPERTS_DECIDED_BY_FORK = (
    "--num-experts: which layers have experts, and how many experts a token goes to, is decided by the fork "
    "(--expert-interval, --topk); Megatron-LM's defaults count here."
)
"""Source: Microsoft's Megatron-DeepSpeed of 2025-07-16 megatron/arguments.py: 2 and 1 by default;
others differ."""
ARGUMENTS_WITHOUT_EFFECT = (
    f"{{options}}: without effect under {DEEPSPEED_OPTION}, whose engine scales the loss and reduces gradients "
    "by its JSON."
)
NO_PLAN_REASON = (
    "--deepspeed_config {file}: {settings} changes formats, and the plan does not follow it."
)
REDUCED_OTHERWISE = f"{REDUCTION_SETTING}: {{clause}}."
FILE_IS_NOT_READ = f"{DEEPSPEED_OPTION}: the engine does what its JSON says about formats and shards; {{file}} is not read."


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """The settings of a run that the engine decides."""

    precision: Mapping[str, Any] | None = None
    """Fields of a precision; None where the JSON states none or is not read."""
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Section -> fields that it sets."""
    read: tuple[str, ...] = ()
    """Arguments that the reader of the engine reads."""
    opened: Mapping[str, str] = field(default_factory=dict)
    """Setting whose value is not known -> what decides it, as a noun."""
    read_too: tuple[str, ...] = ()
    """Files that were read, as sentences."""
    unknown: tuple[str, ...] = ()
    """What the engine leaves open, as sentences."""
    no_plan_reason: str | None = None
    """Why the run has no plan, as a sentence."""


def uses_deepspeed_engine(run: WrittenArguments) -> bool:
    """Return whether a run hands training to DeepSpeed's engine."""
    return "deepspeed" in run or DEEPSPEED_FILE_ARGUMENT in run.settings


def report_engine(
    run: WrittenArguments,
    builder: ImportBuilder,
    file: EngineFile,
    stated: EngineFileSettings,
) -> None:
    """Report the arguments that have no effect under the engine, and map its JSON, which decides instead.

    Args:
        run: The arguments as they are written.
        builder: The report.
        file: The JSON.
        stated: The settings that the JSON states.

    Source: Megatron-DeepSpeed megatron/optimizer/__init__.py, which returns the bare optimizer
    under --deepspeed and leaves the arguments of its own scaler unread.
    """
    for key, written in _iterate_ineffective_arguments(run):
        does = "reduces gradients"
        if key in SCALER_ARGUMENTS:
            does = "scales the loss"
        row = "megatron_deepspeed.under-deepspeed-the-engine"
        builder.record(row, written.name, written.shown, does=does)
    written_file = run.settings.get(DEEPSPEED_FILE_ARGUMENT)
    if written_file is None:
        builder.record("megatron_deepspeed.the-engine-scales-the-loss", DEEPSPEED_OPTION, True)
        return
    name, shown = written_file.name, written_file.shown
    if stated.fields is None:
        builder.report(name, shown, *OTHER_SETTINGS[DEEPSPEED_FILE_ARGUMENT].sentence)
        return
    for field_name in (*MODES, "params_dtype", "pipeline_dtype"):
        builder.fields.pop(field_name, None)
    builder.map(name, **stated.fields)
    if stated.reduction is not None:
        row = "megatron_deepspeed.gradients-of-the-engine"
        builder.record(row, name, shown, clause=stated.reduction)
    builder.record("megatron_deepspeed.read", name, shown, place=file.place)


def _iterate_ineffective_arguments(run: WrittenArguments) -> Iterator[tuple[str, WrittenSetting]]:
    """Yield the arguments that the engine leaves unread, unless they are switched off."""
    for key in (*SCALER_ARGUMENTS, *REDUCTION_ARGUMENTS):
        written = run.settings.get(key)
        if written is not None and written.value is not False:
            yield key, written


def describe_ineffective_arguments(run: WrittenArguments) -> str | None:
    """Return a sentence about the arguments that the engine leaves unread; None where there are none."""
    options = [written.name for _, written in _iterate_ineffective_arguments(run)]
    if not options:
        return None
    return ARGUMENTS_WITHOUT_EFFECT.format(options=", ".join(options))


def drop_engine_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config without those that the engine decides."""
    return {name: value for name, value in fields.items() if name not in ENGINE_FIELDS}


def read_engine_settings(
    run: WrittenArguments, arguments: Mapping[str, Any], mode: str, path: str
) -> EngineSettings:
    """Return the settings of a run that DeepSpeed's engine decides.

    Args:
        run: The arguments as they are written.
        arguments: Name of an argument -> its value.
        mode: bf16, fp16 or fp32, as the arguments state it.
        path: Path of the script.
    """
    file = load_engine_file(run, path)
    stated = parse_engine_settings(file.content)
    precision = stated.fields
    if precision is None and mode == "fp16":
        precision = dict(FP16_FIELDS)
    stage = stated.stage
    if stage is None:
        stage = parse_integer(_parse_number(arguments.get("zero_stage")))
    is_bf16 = mode == "bf16"
    if precision is not None:
        is_bf16 = bool(precision.get("bf16"))
    experts = _list_open_expert_settings(arguments)
    opened: dict[str, str] = {}
    if stage is None:
        opened.update(dict.fromkeys(SHARDING_SETTINGS, ENGINE_NOUN))
    opened.update(dict.fromkeys(experts, FORK_NOUN))
    if file.content is None or precision is None or stated.reduction is not None:
        opened |= dict.fromkeys((REDUCTION_SETTING, REDUCED_BY_THE_PRECISION), ENGINE_NOUN)
    unknown = list(_describe_open_settings(stage, file))
    if stated.reduction is not None:
        unknown.append(REDUCED_OTHERWISE.format(clause=stated.reduction))
    if experts:
        unknown.append(EXPERTS_DECIDED_BY_FORK)
    return EngineSettings(
        precision=precision,
        sections={
            "model": _build_recompute_fields(arguments),
            **_build_sharding_sections(stage, is_bf16=is_bf16),
        },
        read=(*RECOMPUTE_ARGUMENTS, "zero_stage"),
        opened=opened,
        read_too=_describe_read_file(file),
        unknown=tuple(unknown),
        no_plan_reason=_get_no_plan_reason(file, stated.unfollowed),
    )


def _describe_read_file(file: EngineFile) -> tuple[str, ...]:
    """Return the sentence about the engine's JSON where it was read."""
    if file.content is None:
        return ()
    return (f"--deepspeed_config {file.name}: read from {file.place}.",)


def _get_no_plan_reason(file: EngineFile, unfollowed: Sequence[str]) -> str | None:
    """Return why the run has no plan; None where the plan follows every setting of the JSON."""
    if not unfollowed:
        return None
    return NO_PLAN_REASON.format(file=file.name, settings=" and ".join(unfollowed))


def _list_open_expert_settings(arguments: Mapping[str, Any]) -> list[str]:
    """Return the settings of experts that are not stated, and whose defaults differ in a fork."""
    if str(arguments.get("num_experts")) in ("None", "0", "1"):  # the fork's default is 1: dense
        return []
    unstated = [name for name in ("moe_layer_freq", "moe_router_topk") if name not in arguments]
    return [f"model.{name}" for name in unstated]


def _build_sharding_sections(stage: int | None, *, is_bf16: bool) -> dict[str, dict[str, Any]]:
    """Return the switches of the distributed optimizer at a stage of ZeRO; empty where it is not known."""
    if stage is None:
        return {}
    is_sharded = stage > 0 or is_bf16  # BF16_Optimizer shards without ZeRO
    sections: dict[str, dict[str, Any]] = {}
    for path in SHARDING_SETTINGS:
        section, _, switch = path.partition(".")
        sections[section] = {switch: is_sharded}
    return sections


def _describe_open_settings(stage: int | None, file: EngineFile) -> Iterator[str]:
    """Yield what the engine leaves open, as sentences."""
    yield BUFFERS_NOT_COUNTED
    if file.content is None:
        yield FILE_IS_NOT_READ.format(file=file.name or "its name is not stated, and it")
    if stage is not None and stage > 1:
        sharded = "gradients and weights"
        if stage == 2:
            sharded = "gradients"
        yield f"{DEEPSPEED_OPTION}: ZeRO stage {stage} shards {sharded} too, and is counted as stage 1."


def _build_recompute_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of recomputation that the arguments of Megatron-DeepSpeed stand for."""
    if not arguments.get("checkpoint_activations"):
        return {}
    layers = parse_integer(_parse_number(arguments.get("checkpoint_num_layers"))) or 1
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": layers,
    }


def _parse_number(value: Any) -> Any:
    """Return a number of up to four digits that is written as text; None for another text."""
    text = str(value)
    if text.isdecimal() and len(text) < 5:
        return int(text)
    return None
