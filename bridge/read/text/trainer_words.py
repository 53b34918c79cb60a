"""Command-line words as the parser of transformers' `TrainingArguments` reads them."""

from typing import Any

from bridge.read.text.command_words import CommandWords
from bridge.read.text.settings import Settings

TITLE = "TrainingArguments"
SWITCHES = (
    "bf16",
    "fp16",
    "bf16_full_eval",
    "fp16_full_eval",
    "tf32",
    "torch_compile",
    "use_cpu",
    "no_cuda",
)


def arguments_of(words: CommandWords) -> dict[str, Any]:
    """Return the arguments of options whose values are known: `--bf16`, `--bf16 True`, `--tf32=false`, `--no_tf32`."""
    found: dict[str, Any] = {}
    for name, value in words.options.items():
        is_off = value is True and name.startswith("no_") and name[3:] in SWITCHES
        found |= {name[3:]: False} if is_off else {name: value}
    switches = Settings(
        {name: found[name] for name in SWITCHES if name in found}, TITLE, lenient=True
    )
    return found | {name: switches.switch(name) for name in switches.values}
