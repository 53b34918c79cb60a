"""`Engine`: what DeepSpeed's engine makes of a run of Megatron-DeepSpeed, as its own JSON says.

The engine casts the weights, keeps masters and states, and reduces gradients in the dtype of the
weights; Megatron's own optimizer and its reduction in FP32 do not run. Its JSON is read where the
script writes it by `cat` and a here-document, or where it lies next to the script. The engine's own
buffers are not counted.

Source: DeepSpeed 0.17 runtime/engine.py, `get_data_types`, and runtime/bf16_optimizer.py;
Megatron-DeepSpeed of 2025-07-16 megatron/arguments.py and megatron/model/gpt_model.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.read.foreign.import_builder import MODES
from bridge.read.megatron_lm.arguments import Arguments
from bridge.read.megatron_lm.effects import REDUCTION, SCALER
from bridge.read.megatron_lm.engine_file import engine_file, stated_by
from bridge.target.fields import whole_number

NAME = "--deepspeed"
RECOMPUTED = (
    "checkpoint_activations",
    "deepspeed_activation_checkpointing",
    "checkpoint_num_layers",
)
"""Arguments about recomputation that are read here."""
OWNED = (*MODES, "params_dtype", "pipeline_dtype", "grad_reduce_in_fp32", *SCALER)
"""Fields that the engine decides by its JSON, whatever the arguments say."""
ENGINE = "DeepSpeed's engine"
REDUCED = "ddp.grad_reduce_in_fp32"
SHARDED = ("optimizer.use_distributed_optimizer", "ddp.use_distributed_optimizer")
NOT_COUNTED = (
    f"{NAME}: the engine keeps weights, gradients and states in buffers of its own, "
    "which are not counted."
)
FORK = "the fork of Megatron-LM for DeepSpeed"
OF_EXPERTS = (
    "--num-experts: which layers have experts, and how many experts a token goes to, is decided by the fork "
    "(--expert-interval, --topk); Megatron-LM's defaults count here."
)
"""Source: Microsoft's Megatron-DeepSpeed of 2025-07-16 megatron/arguments.py: 2 and 1 by default;
others differ."""
WITHOUT_EFFECT = (
    f"{{options}}: without effect under {NAME}, whose engine scales the loss and reduces gradients "
    "by its JSON."
)
NO_PLAN = "--deepspeed_config {file}: {settings} changes formats, and the plan does not follow it."
NOT_READ = (
    f"{NAME}: the engine does what its JSON says about formats and shards; {{file}} is not read."
)


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


def without_effect(run: Arguments) -> str | None:
    """Return which arguments the engine leaves unread, as a sentence; None without any."""
    options: list[str] = []
    for key in (*SCALER, *REDUCTION):
        written = run.settings.get(key)
        if written is not None and written.value is not False:
            options.append(written.name)
    if not options:
        return None
    return WITHOUT_EFFECT.format(options=", ".join(options))


def without_those_of_the_engine(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config without those of which the engine decides instead."""
    return {name: value for name, value in fields.items() if name not in OWNED}


def engine_of(run: Arguments, arguments: Mapping[str, Any], mode: str, path: str) -> Engine:
    """Return what DeepSpeed's engine makes of a run.

    Args:
        run: The arguments as they are written.
        arguments: Name of an argument -> its value.
        mode: bf16, fp16 or fp32, as the arguments say.
        path: Path of the script.
    """
    file = engine_file(run, path)
    fields, stage, unfollowed = stated_by(file.content)
    if fields is None and mode == "fp16":
        fields = {
            "fp16": True,
            "params_dtype": "fp16",
            "pipeline_dtype": "fp16",
            "grad_reduce_in_fp32": False,
        }
    if stage is None:
        stage = whole_number(_number(arguments.get("zero_stage")))
    experts = _experts_left_open(arguments)
    opened: dict[str, str] = {}
    if stage is None:
        opened.update(dict.fromkeys(SHARDED, ENGINE))
    opened.update(dict.fromkeys(experts, FORK))
    if file.content is None or fields is None:
        opened[REDUCED] = ENGINE
    is_bf16 = mode == "bf16"
    if fields is not None:
        is_bf16 = bool(fields.get("bf16"))
    read_too: list[str] = []
    if file.content is not None:
        read_too.append(f"--deepspeed_config {file.name}: read from {file.place}.")
    unknown = [*_open(stage, file.name, is_read=file.content is not None)]
    if experts:
        unknown.append(OF_EXPERTS)
    unplanned = None
    if unfollowed:
        unplanned = NO_PLAN.format(file=file.name, settings=" and ".join(unfollowed))
    return Engine(
        precision=fields,
        sections={"model": _recomputed(arguments), **_sharded(stage, is_bf16=is_bf16)},
        read=(*RECOMPUTED, "zero_stage"),
        opened=opened,
        read_too=tuple(read_too),
        unknown=tuple(unknown),
        unplanned=unplanned,
    )


def _experts_left_open(arguments: Mapping[str, Any]) -> list[str]:
    """Return the settings of experts that are not stated, and whose defaults differ in a fork."""
    if str(arguments.get("num_experts")) in ("None", "0", "1"):  # the fork's default is 1: dense
        return []
    unstated = [name for name in ("moe_layer_freq", "moe_router_topk") if name not in arguments]
    return [f"model.{name}" for name in unstated]


def _sharded(stage: int | None, *, is_bf16: bool) -> dict[str, dict[str, Any]]:
    """Return the switches of the distributed optimizer at a stage of ZeRO.

    None where it is not known.
    """
    if stage is None:
        return {}
    is_sharded = stage > 0 or is_bf16  # BF16_Optimizer shards without ZeRO
    sections: dict[str, dict[str, Any]] = {}
    for path in SHARDED:
        section, _, switch = path.partition(".")
        sections[section] = {switch: is_sharded}
    return sections


def _open(stage: int | None, name: str, *, is_read: bool) -> Iterator[str]:
    """Yield what the engine leaves open, as sentences."""
    yield NOT_COUNTED
    if not is_read:
        yield NOT_READ.format(file=name or "its name is not stated, and it")
    if stage is not None and stage > 1:
        sharded = "gradients" if stage == 2 else "gradients and weights"
        yield f"{NAME}: ZeRO stage {stage} shards {sharded} too, and is counted as stage 1."


def _recomputed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of recomputation that the arguments of Megatron-DeepSpeed stand for."""
    if not arguments.get("checkpoint_activations"):
        return {}
    each = whole_number(_number(arguments.get("checkpoint_num_layers"))) or 1
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": each,
    }


def _number(value: Any) -> Any:
    """Return a number that is written as text."""
    text = str(value)
    if text.isdecimal() and len(text) < 5:
        return int(text)
    return None
