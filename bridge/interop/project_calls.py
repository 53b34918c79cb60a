"""The calls in Python programs that bear on precision: whose they are, which arguments decide, and who reads those.

A row without a `payload` is only ever listed: an autocast region or a cast says nothing of what a whole run trains in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.interop.python_calls import Call

__all__ = ["CALLS", "Pattern"]

TRL = "SFT|DPO|KTO|ORPO|CPO|PPO|RLOO|GRPO|GKD|Reward|PRM|XPO|NashMD|OnlineDPO|BCO"
HANDLER = re.compile(r"(?:TE|AO|MSAMP)RecipeKwargs")
MAX_PATH = 200
Payload = Callable[[Mapping[str, Any], Call], object]


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """One call."""

    system: str
    package: str
    """Regular expression: how the dotted name of what is called begins."""
    names: str
    """Regular expression: its last word."""
    looks: tuple[str, ...]
    """Texts of which one stands in every file with such a call: others need no parsing."""
    decides: tuple[str, ...] = ()
    """Arguments of which one must be there; none: the call itself says it."""
    places: Mapping[str, int] = field(default_factory=dict)
    """Where among the positional arguments those stand that can."""
    payload: Payload | None = None
    """What the system's `import_` reads, from the deciding arguments; a result of None: only the run decides."""
    kind: str = "program"
    takes: str = ""
    """Regular expression: an argument that must be there as written; none: any will do."""

    def matches(self, call: Call) -> bool:
        """Return whether a call is this one."""
        if len(call.path) > MAX_PATH:
            return False
        if self.takes and not any(re.fullmatch(self.takes, text) for key, text in call.written.items() if key):
            return False
        return re.fullmatch(rf"(?:{self.package})\.(?:.+\.)?(?:{self.names})", call.path) is not None

    def given(self, call: Call) -> dict[str, str]:
        """Return the deciding arguments that are there, and under which key of `Call.written`."""
        found = {name: name if name in call.written else str(self.places.get(name)) for name in self.decides}
        return {name: key for name, key in found.items() if call.written.get(key, "None") != "None"}


def _accelerator(values: Mapping[str, Any], call: Call) -> object:
    handlers = call.undecided.get("kwargs_handlers")
    if values["mixed_precision"] != "fp8" or handlers is None:
        return values
    found: dict[str, Any] = {**values}
    for name in HANDLER.findall(handlers):
        found[name] = {}  # its arguments are no plain values; which class it is decides the scheme
    return found if found.keys() != values.keys() else None


def _trainer(values: Mapping[str, Any], call: Call) -> object:
    return {name: value for name, value in call.arguments.items() if name in ("strategy", "accelerator")} | dict(values)


def _policy(values: Mapping[str, Any], call: Call) -> object:
    return {**call.arguments, **values}


def _fields(_: Mapping[str, Any], call: Call) -> object:
    return {"_target_": call.name, **call.arguments}


def _only(values: Mapping[str, Any], _: Call) -> object:
    return next(iter(values.values()))


MODEL = r"(?:.*[._])?(?:model|net|network|module|unet|vae)"
OURS = r"megatron\.bridge|bridge"
CALLS = (
    Pattern(
        system="accelerate",
        package="accelerate",
        names="Accelerator",
        looks=("Accelerator",),
        decides=("mixed_precision",),
        payload=_accelerator,
    ),
    Pattern(
        system="huggingface",
        package="transformers|trl",
        names=rf"\w*TrainingArguments|(?:{TRL})Config",
        looks=("TrainingArguments", "from trl", "import trl"),
        decides=("bf16", "fp16"),
        payload=lambda values, _: values,
    ),
    Pattern(
        system="lightning",
        package="lightning|pytorch_lightning|lightning_fabric",
        names="Trainer|Fabric",
        looks=("lightning",),
        decides=("precision",),
        payload=_trainer,
    ),
    Pattern(
        system="fsdp",
        package="torch",
        names="MixedPrecision|MixedPrecisionPolicy",
        looks=("MixedPrecision",),
        decides=("param_dtype",),
        places={"param_dtype": 0},
        payload=_policy,
    ),
    Pattern(
        system="megatron-bridge",
        package=OURS,
        names="get_mixed_precision_config",
        looks=("get_mixed_precision_config",),
        decides=("name",),
        places={"name": 0},
        payload=_only,
    ),
    Pattern(
        system="megatron-bridge",
        package=OURS,
        names="ConfigContainer",
        looks=("ConfigContainer",),
        decides=("mixed_precision",),
        payload=_only,
    ),
    Pattern(
        system="megatron-bridge",
        package=OURS,
        names="MixedPrecisionConfig",
        looks=("MixedPrecisionConfig",),
        decides=("bf16", "fp16", "fp32", "fp8", "fp4"),
        payload=_fields,
    ),
    Pattern(
        system="megatron-bridge",
        package=r"megatron\.bridge",
        names=r"(?:bf16|fp16)_\w*mixed",
        looks=("megatron.bridge",),
        payload=lambda _, call: call.name,
    ),
    Pattern(
        system="deepspeed",
        package="deepspeed",
        names="initialize",
        looks=("deepspeed",),
        decides=("config", "config_params"),
        payload=_only,
        kind="deepspeed",
    ),
    Pattern(system="pytorch", package="torch", names="autocast|GradScaler", looks=("autocast", "GradScaler")),
    Pattern(
        system="pytorch",
        package="torch",
        names="set_float32_matmul_precision|set_default_dtype",
        looks=("set_float32_matmul_precision", "set_default_dtype"),
    ),
    Pattern(
        system="pytorch",
        package=MODEL,
        names="half|bfloat16",
        looks=(".half()", ".bfloat16()"),
    ),
    Pattern(
        system="pytorch",
        package=MODEL,
        names="to",
        looks=("float16", "torch.half"),
        takes=r"torch\.(?:bfloat16|float16|half)",
    ),
    Pattern(
        system="torchao",
        package="torchao",
        names="convert_to_float8_training|Float8LinearConfig|from_recipe_name",
        looks=("torchao",),
    ),
    Pattern(
        system="te",
        package="transformer_engine",
        names="fp8_autocast|autocast|fp8_model_init|quantized_model_init",
        looks=("transformer_engine",),
    ),
)
"""Adding a call is adding a row; the first that matches is taken."""
