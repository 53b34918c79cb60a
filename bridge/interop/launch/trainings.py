"""Which launches of a script train something: those with Megatron-LM's flags, and those that may have such."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from bridge.interop.launch.launches import MEGATRON_FLAGS, RUNNERS, holds_arguments
from bridge.interop.launch.relevance import bears, relevant
from bridge.interop.launch.values import is_unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.interop.launch.launches import Launch

__all__ = ["TOOLS", "trainings"]

PATH_BY_NAME = re.compile(r"DIR|PATH|FILE|DATA|ROOT|HOME|URL|INPUT|OUTPUT|CKPT|CHECKPOINT|^\$\{?\d", re.IGNORECASE)
TOOLS = re.compile(r"(?:^|[/._])(?:convert|export|preprocess|prepare|download|merge|tokenize)(?:_\w+)*(?:\.py)?$")
"""Names of programs that make data or checkpoints for a training."""
OTHER_SYSTEMS = re.compile(r"\b(?:axolotl|llamafactory|torchtitan|nemo|megatron\.bridge)\b")
OVERRIDE = re.compile(
    r"[+~]{0,2}(?:exp_manager|model|trainer|optimizer|ddp)[./].*=.*|--trainer\..*|--deepspeed(?:=.*)?"
)
UNDERSCORED = re.compile(r"--[a-z]+_\w+(?:=.*)?")
"""Options as transformers' programs spell them; Megatron-LM's have hyphens."""


def trainings(found: Sequence[Launch], *, strict: bool = False) -> tuple[Launch, ...]:
    """Return the launches that train something, first those of which it is certain.

    Where some have Megatron-LM's flags, a launch without anything that could set a precision (a download, a step of
    preprocessing) is none. Where none has, all of them stay.

    Args:
        found: Launches in their order.
        strict: Leave out programs of other systems as well.
    """
    if not any(_has_flags(launch) for launch in found):
        trained = [launch for launch in found if not TOOLS.search(launch.program)]
        return tuple(launch for launch in found if not trained or launch in trained or _says_something(launch))
    certain: list[Launch] = []
    others = []
    scripts = {(launch.line, launch.name) for launch in found if launch.starts_script and _has_flags(launch)}
    for launch in found:
        if _has_flags(launch) or _may_have(launch) or (launch.line, launch.name) in scripts:
            certain.append(launch)
        elif not strict and _is_of_another(launch):
            others.append(launch)
    return (*certain, *others)


def _has_flags(launch: Launch) -> bool:
    return any(word.partition("=")[0] in MEGATRON_FLAGS for word in launch.arguments)


def _says_something(launch: Launch) -> bool:
    """Return whether a launch has words that bear on precision or may hold such."""
    return any(map(bears, launch.runner)) or bool(relevant(launch.arguments))


def _may_have(launch: Launch) -> bool:
    """Return whether a launch has words that bear on precision, or unknown ones that may hold such."""
    if any(map(bears, launch.runner)):
        return True
    for word in relevant(launch.arguments):
        text = launch.unknowns.shown(word)
        if is_unknown(word) and (holds_arguments(text) or not PATH_BY_NAME.search(text)):
            return True
        if not is_unknown(word) and (word.startswith(("--", "@")) or "/" not in word):
            return True
    lost = [f"{loss.field} {loss.value}" for loss in launch.unmapped]
    return any(bears(text) or MEGATRON_FLAGS & set(text.split()) for text in lost)


def _is_of_another(launch: Launch) -> bool:
    """Return whether a launch looks like one of another system, whose precision may lie elsewhere."""
    runners = {word.rpartition("/")[2] for word in launch.runner if RUNNERS.search(word)}
    if runners & {"accelerate", "deepspeed"} or "fabric" in launch.runner[:2]:
        return True
    if OTHER_SYSTEMS.search(launch.program) or any(OVERRIDE.fullmatch(word) for word in launch.arguments):
        return True
    return sum(UNDERSCORED.fullmatch(word) is not None for word in launch.arguments) > 1
