"""The precision that a Python program states in recipes of Megatron Bridge and NeMo 2; it is read and never run."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.interop import nemo2
from bridge.interop.conversion import Run, runs_of
from bridge.interop.megatron_bridge import importer as megatron_bridge
from bridge.interop.reading.document import Document
from bridge.interop.reading.python_calls import Call, program_of
from bridge.interop.survey.source import Source

PACKAGE = re.compile(r"(?:megatron\.bridge|bridge)\..+")
RECIPE = re.compile(r"(?:bf16|fp16)_\w*mixed")
STATING = {
    "get_mixed_precision_config": ("name",),
    "ConfigContainer": ("mixed_precision",),
    "MixedPrecisionConfig": ("bf16", "fp16", "fp32", "fp8", "fp4"),
}
"""Callee of Megatron Bridge -> its arguments that state a precision."""
WORDS = re.compile("|".join((*STATING, RECIPE.pattern, nemo2.PLUGIN, *nemo2.RECIPES)))
LOOKS = re.compile(r"mixed_precision|ConfigContainer|MixedPrecisionConfig|(?:import|from) nemo|" + nemo2.PLUGIN)
"""Text of which some stands in every file with such a call: others need no parsing."""


def sources_of_program(document: Document, name: str, unread: dict[str, str]) -> Iterator[Source]:
    """Yield the sources in a program, one for each precision that it states.

    `unread` takes file and line of calls whose arguments their system refuses, with the reason.
    """
    if LOOKS.search(document.text) is None:
        return
    program = program_of(document.text, document.path, WORDS.fullmatch)
    for call in program.calls:
        says, payload = _stated_by(call) if PACKAGE.fullmatch(call.path) else ("", None)
        place = f"line {call.line}"
        if payload is not None:
            try:
                imported = replace(megatron_bridge.import_(payload), label=place)
            except BridgeError as error:
                unread[f"{name}, {place}"] = f"{document.path}, {place}: {error}"
                payload = None
        if payload is not None:
            evidence = f"calls `{call.written['']}`"
            run = Run(document=document, system=megatron_bridge.SYSTEM, evidence=evidence, imported=imported)
            yield Source.of(run, name, "program", says)
        elif says:
            yield Source(path=name, system=megatron_bridge.SYSTEM.name, kind="program", run=place, says=says)
    imports_nemo = any(module.partition(".")[0] == "nemo" for module in program.imports)
    wanted = {nemo2.PLUGIN, *(nemo2.RECIPES if imports_nemo else ())}  # a recipe's name alone may be another's
    if wanted & {call.name for call in program.calls}:
        for run in runs_of(document, nemo2.SYSTEM.name):
            yield Source.of(replace(run, evidence=f"names `{run.imported.label}`"), name, "program")


def _stated_by(call: Call) -> tuple[str, Any]:
    """Return what a call of Megatron Bridge states, as written, and the payload of its import.

    Nothing is written where it states no precision, and there is no payload where only a run knows its arguments.
    """
    keys = [key for key in STATING.get(call.name, ()) if key in call.written]
    written = ", ".join(f"{key}={call.written[key]}" for key in keys)
    payload: Any = None
    if RECIPE.fullmatch(call.name):
        payload = call.name
    elif keys and call.name == "MixedPrecisionConfig":
        payload = None if call.undecided else {"_target_": call.name, **call.arguments}
    elif keys:
        payload = call.arguments.get(keys[0])
    elif call.name == "get_mixed_precision_config" and call.positional:
        written, payload = call.written["0"], call.positional[0]
    else:
        return "", None
    says = f"{call.written['']}({written})"
    return (f"{says}, decided at run time" if payload is None else says), payload
