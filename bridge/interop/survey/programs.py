"""The precision that a Python program states in recipes of Megatron Bridge and NeMo 2; it is read and never run.

Where the arguments of a call are written out, the system's importer reads them. A call whose arguments only a run knows
is listed as decided there.
"""

import re
from dataclasses import replace
from typing import Any

from bridge.errors import BridgeError
from bridge.interop import nemo2
from bridge.interop.reading.document import Document
from bridge.interop.reading.python_calls import Call, Program, program_of
from bridge.interop.survey.source import Source, source_of
from bridge.interop.systems import system

BRIDGE = "megatron-bridge"
PACKAGE = re.compile(r"(?:megatron\.bridge|bridge)\..+")
RECIPES = r"(?:bf16|fp16)_\w*mixed"
FIELDS = ("bf16", "fp16", "fp32", "fp8", "fp4")
LATE = "decided at run time"
WORDS = re.compile(
    "|".join(
        ("get_mixed_precision_config", "ConfigContainer", "MixedPrecisionConfig", RECIPES, nemo2.PLUGIN, *nemo2.RECIPES)
    )
)
LOOKS = re.compile(r"mixed_precision|ConfigContainer|MixedPrecisionConfig|(?:import|from) nemo|" + nemo2.PLUGIN)
"""Text of which some stands in every file with such a call: others need no parsing."""


def sources_of_program(document: Document, name: str, unread: dict[str, str]) -> list[Source]:
    """Return the sources in a program, one for each precision that it states.

    `unread` takes file and line of calls whose arguments their system refuses, with the reason.
    """
    if LOOKS.search(document.text) is None:
        return []
    program = program_of(document.text, name, WORDS.fullmatch)
    found = [source for call in program.calls for source in _called(call, name, unread)]
    return [*found, *_nemo(document, program, name, unread)]


def _called(call: Call, name: str, unread: dict[str, str]) -> list[Source]:
    if PACKAGE.fullmatch(call.path) is None:
        return []
    payload, stated = _payload(call)
    if not stated:
        return []
    says = f"{call.written['']}({', '.join(stated)})" if stated != [""] else f"{call.written['']}()"
    source = Source(path=name, system=BRIDGE, kind="program", says=says, precision=None, run=f"line {call.line}")
    if payload is None:
        return [replace(source, says=f"{says}, {LATE}")]
    try:
        imported = system(BRIDGE).import_(payload)
    except BridgeError as error:
        unread[f"{name}, line {call.line}"] = str(error).splitlines()[0]
        return [source]
    evidence = f"calls `{call.written['']}`"
    return [source_of(imported, path=name, system=BRIDGE, kind="program", evidence=evidence, run=source.run, says=says)]


def _payload(call: Call) -> tuple[Any, list[str]]:
    """Return the input of the system's importer, None where only a run knows it, and the arguments as written."""
    if re.fullmatch(RECIPES, call.name):
        return call.name, [""]
    if call.name == "MixedPrecisionConfig":
        stated = [f"{key}={call.written[key]}" for key in FIELDS if key in call.written]
        return (None if call.undecided else {"_target_": call.name, **call.arguments}), stated
    key = "mixed_precision" if call.name == "ConfigContainer" else "name"
    if key in call.written:
        return call.arguments.get(key), [f"{key}={call.written[key]}"]
    if call.name != "ConfigContainer" and call.positional:
        return call.positional[0], [call.written["0"]]
    return None, []


def _nemo(document: Document, program: Program, name: str, unread: dict[str, str]) -> list[Source]:
    """Return the plugins and recipes of NeMo 2; functions of a recipe's name are its own where it is imported."""
    imports_nemo = any(path.partition(".")[0] == "nemo" for path in program.imports)
    wanted = (nemo2.PLUGIN, *(nemo2.RECIPES if imports_nemo else ()))
    if not any(call.name in wanted for call in program.calls):
        return []
    try:
        runs = nemo2.import_all(document)
    except BridgeError as error:
        unread[name] = str(error).splitlines()[0]
        return []
    return [
        source_of(run, path=name, system="nemo2", kind="program", evidence=f"names `{run.label}`", run=run.label)
        for run in runs
    ]
