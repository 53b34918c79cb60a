"""Command-line words as the parser of transformers' `TrainingArguments` reads them."""

from typing import Any

from bridge.read.text.command_arguments import CommandArguments
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


def parse_trainer_arguments(words: CommandArguments) -> dict[str, Any]:
    """Return the arguments of options whose values are known.

    A switch may be written as `--bf16`, `--bf16 True`, `--tf32=false` or `--no_tf32`.
    """
    arguments: dict[str, Any] = {}
    for name, value in words.options.items():
        switch = name.removeprefix("no_")
        if value is True and switch != name and switch in TRAINER_SWITCHES:
            arguments[switch] = False
        else:
            arguments[name] = value
    written = {name: arguments[name] for name in TRAINER_SWITCHES if name in arguments}
    switches = Settings(written, ARGUMENTS_TITLE, lenient=True)
    for name in written:
        arguments[name] = switches.switch(name)
    return arguments
