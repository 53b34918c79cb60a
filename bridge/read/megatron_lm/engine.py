"""`Engine`: what DeepSpeed's engine makes of a run of Megatron-DeepSpeed, as its own JSON says.

The engine casts the weights, keeps masters and states, and reduces gradients in the dtype of the weights; Megatron's
own optimizer and its reduction in FP32 do not run. Its JSON is read where the script writes it by `cat` and a
here-document, or where it lies next to the script. The engine's own buffers are not counted.

Source: DeepSpeed 0.17 runtime/engine.py, `get_data_types`, and runtime/bf16_optimizer.py; Megatron-DeepSpeed of
2025-07-16 megatron/arguments.py and megatron/model/gpt_model.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.read.builders import MODES
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
NOT_COUNTED = f"{NAME}: the engine keeps weights, gradients and states in buffers of its own, which are not counted."
FORK = "the fork of Megatron-LM for DeepSpeed"
OF_EXPERTS = (
    "--num-experts: which layers have experts, and how many experts a token goes to, is decided by the fork "
    "(--expert-interval, --topk); Megatron-LM's defaults count here."
)
"""Source: Microsoft's Megatron-DeepSpeed of 2025-07-16 megatron/arguments.py: 2 and 1 by default; others differ."""
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
    stated = [
        one for key in (*SCALER, *REDUCTION) for one in [run.settings.get(key)] if one is not None
    ]
    options = [one.name for one in stated if one.value is not False]
    return WITHOUT_EFFECT.format(options=", ".join(options)) if options else None


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
    name, content = file.name, file.content
    fields, stage, unfollowed = stated_by(content)
    if fields is None and mode == "fp16":
        fields = {
            "fp16": True,
            "params_dtype": "fp16",
            "pipeline_dtype": "fp16",
            "grad_reduce_in_fp32": False,
        }
    if stage is None:
        stage = whole_number(_number(arguments.get("zero_stage")))
    opened = {} if stage is not None else dict.fromkeys(SHARDED, ENGINE)
    experts = _experts_left_open(arguments)
    opened |= dict.fromkeys(experts, FORK)
    if content is None or fields is None:
        opened[REDUCED] = ENGINE
    is_bf16 = mode == "bf16" if fields is None else bool(fields.get("bf16"))
    read_too, unplanned = list[str](), None
    if content is not None:
        read_too.append(f"--deepspeed_config {name}: read from {file.place}.")
    if unfollowed:
        unplanned = NO_PLAN.format(file=name, settings=" and ".join(unfollowed))
    return Engine(
        precision=fields,
        sections={"model": _recomputed(arguments), **_sharded(stage, is_bf16=is_bf16)},
        read=(*RECOMPUTED, "zero_stage"),
        opened=opened,
        read_too=tuple(read_too),
        unknown=(
            *_open(stage, name, is_read=content is not None),
            *([OF_EXPERTS] if experts else []),
        ),
        unplanned=unplanned,
    )


def _experts_left_open(arguments: Mapping[str, Any]) -> list[str]:
    """Return the settings of experts that the arguments do not state, and that a fork has other defaults of."""
    if str(arguments.get("num_experts")) in (
        "None",
        "0",
        "1",
    ):  # Megatron-DeepSpeed's default is 1, a dense model
        return []
    return [
        f"model.{name}" for name in ("moe_layer_freq", "moe_router_topk") if name not in arguments
    ]


def _sharded(stage: int | None, *, is_bf16: bool) -> dict[str, dict[str, Any]]:
    """Return the switches of the distributed optimizer at a stage of ZeRO; none where it is not known."""
    if stage is None:
        return {}
    is_sharded = stage > 0 or is_bf16  # BF16_Optimizer shards without ZeRO
    return {
        section: {switch: is_sharded}
        for section, _, switch in (one.partition(".") for one in SHARDED)
    }


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
    return int(text) if text.isdecimal() and len(text) < 5 else None
