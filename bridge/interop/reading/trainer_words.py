"""Command-line words as the parser of transformers' `TrainingArguments` reads them."""

from collections.abc import Iterable
from typing import Any

from bridge.errors import PayloadError
from bridge.interop.reading.settings import Settings, shown

TITLE = "TrainingArguments"
SWITCHES = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32", "torch_compile", "use_cpu", "no_cuda")


def arguments(words: Iterable[object]) -> dict[str, Any]:
    """Return the arguments that command-line words set: `--bf16`, `--bf16 True`, `--tf32=false`, `--no_tf32`."""
    found: dict[str, Any] = {}
    waiting: str | None = None
    for word in words:
        if not isinstance(word, str):
            raise PayloadError(f"{TITLE}: command-line words must be strings, got {shown(word)}. Quote it.")
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name.startswith("no_") and name[3:] in SWITCHES and not equals:
                found[name[3:]], waiting = False, None
                continue
            found[name], waiting = (value if equals else True), (None if equals else name)
        elif waiting is not None:
            found[waiting], waiting = word, None
    switches = Settings({name: found[name] for name in SWITCHES if name in found}, TITLE, lenient=True)
    return found | {name: switches.switch(name) for name in switches.values}
