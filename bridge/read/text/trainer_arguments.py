"""`parse_trainer_arguments`: command line options, as `TrainingArguments` of transformers reads."""

from collections.abc import Mapping
from typing import Any

from bridge.read.text.settings import Settings

ARGUMENTS_TITLE = "TrainingArguments"
TRAINER_SWITCHES = (
    "bf16",
    "fp16",
    "bf16_full_eval",
    "fp16_full_eval",
    "tf32",
    "torch_compile",
    "use_cpu",
    "no_cuda",
)
"""Arguments about the precision or the device whose values are true or false."""


def parse_trainer_arguments(options: Mapping[str, str | bool]) -> dict[str, Any]:
    """Return the arguments of a command line: switches as bools, all other arguments as texts.

    A switch may be written as `--bf16`, `--bf16 True`, `--tf32=false` or `--no_tf32`.

    Args:
        options: `CommandArguments.options`.

    Raises:
        PayloadError: The value of a switch is neither true nor false.
    """
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        switch = name.removeprefix("no_")
        if value is True and switch != name and switch in TRAINER_SWITCHES:
            arguments[switch] = False
        else:
            arguments[name] = value
    stated_switches = {name: arguments[name] for name in TRAINER_SWITCHES if name in arguments}
    settings = Settings(stated_switches, ARGUMENTS_TITLE, lenient=True)
    for name in stated_switches:
        arguments[name] = settings.switch(name)
    return arguments
