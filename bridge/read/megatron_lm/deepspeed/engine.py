"""`EngineSettings`: the settings of a run of Megatron-DeepSpeed that DeepSpeed's engine decides by its JSON.

The engine casts the weights, keeps masters and optimizer states, and accumulates and sends gradients
in the dtypes of its JSON. Megatron's own optimizer and its reduction in FP32 do not run. The bytes of the
engine's own buffers are not counted.

Source: DeepSpeed 0.17 runtime/engine.py, `get_data_types`, and runtime/bf16_optimizer.py;
Megatron-DeepSpeed of 2025-07-16 megatron/arguments.py and megatron/model/gpt_model.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from bridge.read.foreign.import_builder import MODES, ImportBuilder
from bridge.read.megatron_lm.deepspeed.engine_file import (
    DEEPSPEED_FILE_ARGUMENT,
    EngineFile,
    EngineFileSettings,
    load_engine_file,
    parse_engine_settings,
)
from bridge.read.megatron_lm.flags import OTHER_SETTINGS, get_dest
from bridge.read.megatron_lm.gradient_reduction import REDUCTION_ARGUMENTS
from bridge.read.megatron_lm.written_arguments import WrittenArguments, WrittenSetting
from bridge.rules.inert_fields import LOSS_SCALER_FIELDS

DEEPSPEED_OPTION = "--deepspeed"
SCALER_ARGUMENTS = ("loss_scale", *LOSS_SCALER_FIELDS)
ENGINE_ARGUMENTS = (DEEPSPEED_FILE_ARGUMENT, *SCALER_ARGUMENTS, *REDUCTION_ARGUMENTS)
"""Arguments whose settings the engine decides by its JSON. Values of the arguments have no effect."""
RECOMPUTE_ARGUMENTS = (
    "checkpoint_activations",
    "deepspeed_activation_checkpointing",
    "checkpoint_num_layers",
)
"""Arguments about recomputation that only the fork has."""
ENGINE_FIELDS = (*MODES, "params_dtype", "pipeline_dtype", "grad_reduce_in_fp32", *SCALER_ARGUMENTS)
"""Fields that the engine decides by its JSON, whatever the arguments say."""
FP16_FIELDS = {
    "fp16": True,
    "params_dtype": "fp16",
    "pipeline_dtype": "fp16",
    "grad_reduce_in_fp32": False,
}
"""Fields of the engine's precision under `--fp16` if its JSON is not read."""
ENGINE_NAME = "DeepSpeed's engine"
FORK_NAME = "the fork of Megatron-LM for DeepSpeed"
REDUCTION_SETTING = "ddp.grad_reduce_in_fp32"
REDUCTION_SETTINGS = (REDUCTION_SETTING, "mixed_precision.grad_reduce_in_fp32")
SHARDING_SETTINGS = ("optimizer.use_distributed_optimizer", "ddp.use_distributed_optimizer")
BUFFERS_NOT_COUNTED = (
    f"{DEEPSPEED_OPTION}: the engine keeps weights, gradients and states in buffers of its own, "
    "which are not counted."
)
EXPERTS_DECIDED_BY_FORK = (
    "--num-experts: which layers have experts, and how many experts a token goes to, is decided by the fork "
    "(--expert-interval, --topk); Megatron-LM's defaults count here."
)
"""Source: Microsoft's Megatron-DeepSpeed of 2025-07-16 megatron/arguments.py, whose two defaults are 2
and 1. Other forks have other defaults."""
EXPERTS_OPTION, EXPERTS_SETTING = "num_experts", "model.num_moe_experts"
EXPERTS_OF_EACH_LAYER = (
    "--num-experts {numbers}: layers have numbers of experts of their own; "
    "the first number counts for all of them here."
)
"""Source: Microsoft's Megatron-DeepSpeed of 2025-07-16 megatron/model/transformer.py
get_num_experts_per_layer."""
ARGUMENTS_WITHOUT_EFFECT = (
    f"{{options}}: without effect under {DEEPSPEED_OPTION}, whose engine scales the loss and reduces gradients "
    "by its JSON."
)
NO_PLAN_REASON = (
    "--deepspeed_config {file}: {settings} changes formats, and the plan does not follow it."
)
REDUCED_OTHERWISE = f"{REDUCTION_SETTING}: {{clause}}."
FILE_IS_NOT_READ = (
    f"{DEEPSPEED_OPTION}: the engine does what its JSON says about formats and shards; "
    "{file} is not read."
)
FILE_IS_NOT_NAMED = (
    f"{DEEPSPEED_OPTION}: the engine does what its JSON says about formats and shards; "
    "its name is not stated, and it is not read."
)
FILE_WAS_READ = "--deepspeed_config {file}: read from {location}."
STAGE_2_COUNTS_AS_1 = (
    f"{DEEPSPEED_OPTION}: ZeRO stage 2 shards gradients too, and is counted as stage 1."
)
STAGE_3_COUNTS_AS_1 = (
    f"{DEEPSPEED_OPTION}: ZeRO stage {{stage}} shards gradients and weights too, "
    "and is counted as stage 1."
)
MAX_DIGITS = 4
"""Most digits of a whole number that is read from text. Stages and layer counts have fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """The settings of a run that the engine decides."""

    precision: Mapping[str, object] | None = None
    """Fields of a precision; None if the JSON states none or is not read."""
    sections: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Section -> fields that the engine sets in it."""
    read_arguments: tuple[str, ...] = ()
    """Arguments of the fork that are read here."""
    unread_sources: Mapping[str, str] = field(default_factory=dict)
    """Setting whose value is not known -> the name of its decider."""
    notes: tuple[str, ...] = ()
    """Sentences about files that were read."""
    open_points: tuple[str, ...] = ()
    """Sentences about everything that the engine decides and that is not known or not counted."""
    no_plan_reason: str | None = None
    """A sentence that says why the run has no plan; None if it has one."""


def uses_deepspeed_engine(written: WrittenArguments) -> bool:
    """Return whether DeepSpeed's engine trains the model of a run."""
    return "deepspeed" in written or DEEPSPEED_FILE_ARGUMENT in written.settings


def report_engine(
    written: WrittenArguments,
    builder: ImportBuilder,
    file: EngineFile,
    stated: EngineFileSettings,
) -> None:
    """Report the arguments that have no effect under the engine, and map its JSON.

    Args:
        written: The arguments as they are written.
        builder: The report.
        file: The JSON.
        stated: The settings that the JSON states.

    Source: Megatron-DeepSpeed megatron/optimizer/__init__.py, which returns the bare optimizer
    under --deepspeed and leaves the arguments of its own scaler unread.
    """
    for key, setting in _iterate_ineffective_arguments(written):
        effect = "reduces gradients"
        if key in SCALER_ARGUMENTS:
            effect = "scales the loss"
        sentence = "megatron_deepspeed.under-deepspeed-the-engine"
        builder.record(sentence, setting.name, setting.shown, does=effect)
    file_setting = written.settings.get(DEEPSPEED_FILE_ARGUMENT)
    if file_setting is None:
        builder.record("megatron_deepspeed.the-engine-scales-the-loss", DEEPSPEED_OPTION, True)
        return
    option, name = file_setting.name, file_setting.shown
    if stated.fields is None:
        builder.report(option, name, *OTHER_SETTINGS[DEEPSPEED_FILE_ARGUMENT].sentence)
        return
    for field_name in (*MODES, "params_dtype", "pipeline_dtype"):
        builder.fields.pop(field_name, None)
    builder.map(option, **stated.fields)
    if stated.reduction is not None:
        sentence = "megatron_deepspeed.gradients-of-the-engine"
        builder.record(sentence, option, name, clause=stated.reduction)
    builder.record("megatron_deepspeed.read", option, name, place=file.location)


def _iterate_ineffective_arguments(
    written: WrittenArguments,
) -> Iterator[tuple[str, WrittenSetting]]:
    """Yield the arguments that the engine does not read, unless they are switched off."""
    for key in (*SCALER_ARGUMENTS, *REDUCTION_ARGUMENTS):
        setting = written.settings.get(key)
        if setting is not None and setting.value is not False:
            yield key, setting


def describe_ineffective_arguments(written: WrittenArguments) -> tuple[str, ...]:
    """Return the sentence about the arguments that the engine does not read; empty if there are none."""
    options = [setting.name for _, setting in _iterate_ineffective_arguments(written)]
    if not options:
        return ()
    return (ARGUMENTS_WITHOUT_EFFECT.format(options=", ".join(options)),)


def drop_engine_fields(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a config without those that the engine decides."""
    return {name: value for name, value in fields.items() if name not in ENGINE_FIELDS}


def read_engine_settings(
    written: WrittenArguments, arguments: Mapping[str, object], mode: str, path: str
) -> EngineSettings:
    """Return the settings of a run that DeepSpeed's engine decides.

    Args:
        written: The arguments as they are written.
        arguments: Name of an argument -> its value.
        mode: bf16, fp16 or fp32, as the arguments state it.
        path: Path of the script.
    """
    file = load_engine_file(written, path)
    stated = parse_engine_settings(file.content)
    precision = _get_precision(stated, mode)
    stage = _get_stage(stated, arguments)
    is_bf16 = mode == "bf16"
    if precision is not None:
        is_bf16 = bool(precision.get("bf16"))
    expert_settings = _list_open_expert_settings(arguments)
    expert_numbers = _list_expert_numbers(written)
    unread_sources: dict[str, str] = {}
    if stage is None:
        unread_sources.update(dict.fromkeys(SHARDING_SETTINGS, ENGINE_NAME))
    unread_sources.update(dict.fromkeys(expert_settings, FORK_NAME))
    if len(expert_numbers) > 1:
        unread_sources[EXPERTS_SETTING] = FORK_NAME
    if file.content is None or precision is None or stated.reduction is not None:
        unread_sources.update(dict.fromkeys(REDUCTION_SETTINGS, ENGINE_NAME))
    open_points = list(_describe_unknown(stage, file))
    if stated.reduction is not None:
        open_points.append(REDUCED_OTHERWISE.format(clause=stated.reduction))
    if expert_settings:
        open_points.append(EXPERTS_DECIDED_BY_FORK)
    if len(expert_numbers) > 1:
        numbers = " ".join(expert_numbers)
        open_points.append(EXPERTS_OF_EACH_LAYER.format(numbers=numbers))
    return EngineSettings(
        precision=precision,
        sections={
            "model": _build_recompute_fields(arguments),
            **_build_sharding_sections(stage, is_bf16=is_bf16),
        },
        read_arguments=(*RECOMPUTE_ARGUMENTS, "zero_stage"),
        unread_sources=unread_sources,
        notes=_describe_read_file(file),
        open_points=tuple(open_points),
        no_plan_reason=_get_no_plan_reason(file, stated.unfollowed),
    )


def _get_precision(stated: EngineFileSettings, mode: str) -> dict[str, object] | None:
    """Return the precision of the JSON, or else that of `--fp16`; None if neither decides it."""
    if stated.fields is None and mode == "fp16":
        return dict(FP16_FIELDS)
    return stated.fields


def _get_stage(stated: EngineFileSettings, arguments: Mapping[str, object]) -> int | None:
    """Return the stage of ZeRO of the JSON, or else that of `--zero-stage`; None if neither states it."""
    if stated.stage is not None:
        return stated.stage
    return _parse_whole_number(arguments.get("zero_stage"))


def _describe_read_file(file: EngineFile) -> tuple[str, ...]:
    """Return the sentence about the engine's JSON if the JSON was read."""
    if file.content is None:
        return ()
    return (FILE_WAS_READ.format(file=file.name, location=file.location),)


def _get_no_plan_reason(file: EngineFile, unfollowed: Sequence[str]) -> str | None:
    """Return why the run has no plan; None if the plan follows every setting of the JSON."""
    if not unfollowed:
        return None
    return NO_PLAN_REASON.format(file=file.name, settings=" and ".join(unfollowed))


def _list_open_expert_settings(arguments: Mapping[str, object]) -> list[str]:
    """Return the settings of experts that are not stated and whose defaults differ in a fork."""
    if str(arguments.get("num_experts")) in ("None", "0", "1"):  # the fork's default is 1: dense
        return []
    unstated = [name for name in ("moe_layer_freq", "moe_router_topk") if name not in arguments]
    return [f"model.{name}" for name in unstated]


def _list_expert_numbers(written: WrittenArguments) -> list[str]:
    """Return the numbers behind the option of the number of experts, of which a fork takes several."""
    numbers: list[str] = []
    for option in written.options:
        if get_dest(option.name) == EXPERTS_OPTION:
            numbers = list(takewhile(str.isdecimal, map(str, option.following)))
    return numbers


def _build_sharding_sections(stage: int | None, *, is_bf16: bool) -> dict[str, dict[str, object]]:
    """Return the switches of the distributed optimizer at a stage of ZeRO; none for an unknown stage."""
    if stage is None:
        return {}
    is_sharded = stage > 0 or is_bf16  # BF16_Optimizer shards without ZeRO
    sections: dict[str, dict[str, object]] = {}
    for path in SHARDING_SETTINGS:
        section, _, switch = path.partition(".")
        sections[section] = {switch: is_sharded}
    return sections


def _describe_unknown(stage: int | None, file: EngineFile) -> Iterator[str]:
    """Yield sentences about everything that the engine decides and that is not known or not counted."""
    yield BUFFERS_NOT_COUNTED
    if file.content is None and file.name:
        yield FILE_IS_NOT_READ.format(file=file.name)
    elif file.content is None:
        yield FILE_IS_NOT_NAMED
    if stage == 2:
        yield STAGE_2_COUNTS_AS_1
    elif stage is not None and stage > 2:
        yield STAGE_3_COUNTS_AS_1.format(stage=stage)


def _build_recompute_fields(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of recomputation that the fork's own arguments stand for."""
    if not arguments.get("checkpoint_activations"):
        return {}
    layers = _parse_whole_number(arguments.get("checkpoint_num_layers")) or 1
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": layers,
    }


def _parse_whole_number(value: object) -> int | None:
    """Return a whole number of at most `MAX_DIGITS` digits; None for any other value."""
    text = str(value)
    if text.isdecimal() and len(text) <= MAX_DIGITS:
        return int(text)
    return None
