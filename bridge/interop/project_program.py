"""What a Python program says about its precision: the calls of a table, switches and variables, read and never run.

Where a system here reads the arguments and they are written out, it says what they mean. Any other call is listed as it
stands, and one whose arguments only a run knows is said to be decided there.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError
from bridge.interop import nemo2
from bridge.interop.project_calls import CALLS, Pattern
from bridge.interop.project_source import Source, source_of
from bridge.interop.project_variables import VARIABLES, of_variables
from bridge.interop.python_calls import Assignment, Call, Program, program_of
from bridge.interop.systems import system

if TYPE_CHECKING:
    from bridge.interop.document import Document

__all__ = ["sources_of_program"]

NEMO = "|".join((nemo2.PLUGIN, *nemo2.RECIPES))
SWITCHES = r"allow_tf32|fp32_precision|allow_bf16_reduced_precision_reduction|allow_fp16_reduced_precision_reduction"
"""What is assigned to below `torch.backends`."""
ENVIRON = "environ|setdefault|putenv"
WORDS = re.compile("|".join((*(row.names for row in CALLS), NEMO, SWITCHES, ENVIRON)))
LOOKS = (nemo2.PLUGIN, "import nemo", "from nemo", "allow_tf32", "fp32_precision", "_reduced_precision_reduction")
"""Texts that a file may hold beside those of the table; one without any, and without a variable, is not parsed."""
LATE = "decided at run time"
MAX_LINES = 4
"""Of one thing said several times."""


def sources_of_program(document: Document, name: str, unread: dict[str, str]) -> list[Source]:
    """Return what a program says, one source for each thing said.

    Args:
        document: The program.
        name: What it is called in the survey.
        unread: File and line -> why; takes the calls whose arguments their system refuses.

    Raises:
        PayloadError: It has words that bear on precision, and is no Python.
    """
    text = document.text
    looks = any(look in text for row in CALLS for look in row.looks) or any(look in text for look in LOOKS)
    if not looks and not ("env" in text and VARIABLES.search(text)):
        return []
    program = program_of(text, name, WORDS.fullmatch)
    found = []
    for call in program.calls:
        row = next((row for row in CALLS if row.matches(call)), None)
        found += _variable(call, name) if row is None else _called(call, row, name, unread)
    for made in program.assignments:
        found += _assigned(made, name)
    return _merged([*found, *_nemo(document, program, name, unread)])


def _called(call: Call, row: Pattern, name: str, unread: dict[str, str]) -> list[Source]:
    given = row.given(call)
    unpacked = "**" in call.written and not given
    if call.arguments.get("enabled") is False or (row.decides and not given and not (unpacked and row.payload)):
        return []
    shown = [*given.values(), *(["**"] if unpacked else [])] if row.decides else [key for key in call.written if key]
    says = f"{call.written['']}({', '.join(_argument(key, call) for key in shown)})"
    said = Source(path=name, system=row.system, kind="program", says=says, precision=None, run=f"line {call.line}")
    if row.payload is None:
        return [said]
    values = {key: _value(call, place) for key, place in given.items()}
    payload = None if unpacked or None in values.values() else row.payload(values, call)
    if payload is None:
        return [replace(said, says=f"{says}, {LATE}")]
    if row.system == "deepspeed" and isinstance(payload, str):  # the name of its file, which is read by itself
        return [said]
    try:
        imported = system(row.system).import_(payload)
    except BridgeError as error:
        unread[f"{name}, line {call.line}"] = str(error).splitlines()[0]
        return [said]
    evidence = f"calls `{call.written['']}`"
    return [
        source_of(imported, path=name, system=row.system, kind=row.kind, evidence=evidence, run=said.run, says=says)
    ]


def _value(call: Call, key: str) -> Any:
    """Return an argument's value, None where only a run decides it."""
    return call.positional[int(key)] if key.isdigit() else call.arguments.get(key)


def _argument(key: str, call: Call) -> str:
    written = call.written[key]
    return written if key.isdigit() else f"**{written}" if key == "**" else f"{key}={written}"


def _assigned(made: Assignment, name: str) -> list[Source]:
    run = f"line {made.line}"
    if made.path == "os.environ" and made.key is not None:
        return _set(made.key, made.value, made.written, name, run)
    if made.key is None and made.path.startswith("torch.backends."):
        says = f"{made.path} = {made.written}"
        return [Source(path=name, system="pytorch", kind="program", says=says, precision=None, run=run)]
    return []


def _variable(call: Call, name: str) -> list[Source]:
    """Return what `os.putenv` and `os.environ.setdefault` set; the latter gives way to whoever set it before."""
    if call.path not in ("os.putenv", "os.environ.setdefault") or len(call.positional) != 2:
        return []
    key, value = call.positional
    found = _set(key, value, call.written["1"], name, f"line {call.line}") if isinstance(key, str) else []
    gives_way = call.name == "setdefault"
    return [
        replace(one, precision=None, says=f"{one.says}, where it is not set") if gives_way else one for one in found
    ]


def _set(key: str, value: object, written: str, name: str, run: str) -> list[Source]:
    known = of_variables({key: value if isinstance(value, str) else ""}, name, "program variable", run=run)
    return [one if isinstance(value, str) else replace(one, says=f"{key}={written}, {LATE}") for one in known]


def _nemo(document: Document, program: Program, name: str, unread: dict[str, str]) -> list[Source]:
    """Return the plugins and recipes of NeMo 2.x; functions of a recipe's name are its own where it is imported."""
    imports_nemo = any(path.partition(".")[0] == "nemo" for path in program.imports)
    called = [call for call in program.calls if re.fullmatch(NEMO, call.name)]
    if not any(call.name == nemo2.PLUGIN or imports_nemo for call in called):
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


def _merged(found: list[Source]) -> list[Source]:
    """Return one source for what is said on several lines."""
    merged: dict[tuple[str, str], list[Source]] = {}
    for source in sorted(found, key=_line):
        merged.setdefault((source.says, source.run if source.system == "nemo2" else ""), []).append(source)
    told = []
    for sources in merged.values():
        lines = [source.run.removeprefix("line ") for source in sources]
        more = f" and {len(lines) - MAX_LINES} more" if len(lines) > MAX_LINES else ""
        run = f"lines {', '.join(lines[:MAX_LINES])}{more}" if len(lines) > 1 else sources[0].run
        told.append(replace(sources[0], run=run))
    return told


def _line(source: Source) -> int:
    return int(source.run.removeprefix("line ").partition(",")[0])
