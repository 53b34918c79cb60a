"""`Source`: one place where a project states its precision: a run, a variable, a program, a file of matchers."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from bridge.convert.conversion import Run, runs_of
from bridge.errors import BridgeError
from bridge.precision.matchers import HIGH, Matchers
from bridge.precision.mode import mode_of
from bridge.read.contract import ImportReport
from bridge.read.megatron_bridge import importer as megatron_bridge
from bridge.read.megatron_bridge.program import StatedRun, runs_in
from bridge.read.nemo import nemo2
from bridge.read.table import rows
from bridge.read.text.document import Document
from bridge.read.text.python_calls import Call, program_of

ROWS = rows("sources")
ORDER: dict[str, str] = ROWS["order"]
"""Kind of source -> why it stands above the ones below it, the one that wins first."""
VARIABLES = re.compile("|".join(f"(?P<{system}>{pattern})" for system, pattern in ROWS["variables"].items()))
"""Variables that bear on precision, each in the group of the system that reads it."""
MIXED_PRECISION = "ACCELERATE_MIXED_PRECISION"
SAID: dict[str, str] = ROWS["environment"]
"""Value of `MIXED_PRECISION` -> the precision that it states."""
PACKAGE = re.compile(r"(?:megatron\.bridge|bridge)\..+")
RECIPE = re.compile(r"(?:bf16|fp16)_\w*mixed")
STATING = {
    "get_mixed_precision_config": ("0", "name"),
    "ConfigContainer": ("mixed_precision",),
    "MixedPrecisionConfig": ("bf16", "fp16", "fp32", "fp8", "fp4"),
}
"""Callee of Megatron Bridge -> its arguments that state a precision, the first positional one as "0"."""
UNREAD_CALLS: dict[str, list[str]] = ROWS["unread calls"]
WORDS = re.compile("|".join((*STATING, *UNREAD_CALLS, RECIPE.pattern, nemo2.PLUGIN, *nemo2.RECIPES)))
LOOKS = re.compile(
    r"mixed_precision|ConfigContainer|MixedPrecisionConfig|(?:import|from) nemo|"
    + "|".join((nemo2.PLUGIN, *(rf"\b{name}\(" for name in UNREAD_CALLS)))
)
"""Text of which some stands in every file with such a call: others need no parsing."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source."""

    path: str
    """File, or "environment"."""
    system: str
    kind: str
    """One of `ORDER`, or "per module"."""
    says: str = ""
    precision: str | None = None
    """What decides agreement: "bf16", "bf16 + fp8 delayed"; None where it does not say what a run trains in."""
    run: str = ""
    semantics: str | None = None
    recipe: str | None = None
    evidence: str = ""
    unmapped: int = 0

    @classmethod
    def of(cls, run: Run, name: str, kind: str, says: str = "") -> Self:
        """Return the source that a run is: no precision where the system leaves it to another.

        `name` is the file's in the project; `says` are the words of a program that state the precision.
        """
        imported, config = run.imported, run.imported.config
        is_fp32 = mode_of(config) == "fp32" and not config.autocast_enabled and not imported.mapped.get(MIXED_PRECISION)
        decider = ROWS["open"].get(run.system.name) if is_fp32 else None
        if not imported.mode_is_stated:
            decider = f"{imported.decided_by} decides"
        stated = precision(imported) if decider is None else None
        return cls(
            path=name,
            system=run.system.name,
            kind=kind,
            says=": ".join(filter(None, (says, decider))) or str(stated),
            precision=stated,
            run=run.source["run"],
            semantics=imported.semantics if stated else None,
            recipe=imported.recipe if stated else None,
            evidence=run.evidence,
            unmapped=len(imported.unmapped),
        )


def precision(imported: ImportReport) -> str:
    """Return dtype and scheme, the part of a precision that two sources can disagree about."""
    config = imported.config
    dtype = mode_of(config)
    if config.autocast_enabled:
        dtype = str(config.to_dict().get("autocast_dtype") or dtype)
    if config.fp8:
        return f"{dtype} + fp8 {config.fp8_recipe}"
    return f"{dtype} + {config.fp4_recipe}" if config.fp4 else dtype


def of_variables(pairs: Iterable[tuple[str, str]], path: str, kind: str) -> Iterator[Source]:
    """Yield a source for each variable that bears on precision; one that is set to several values is several."""
    known = {pair: str(found.lastgroup) for pair in sorted({*pairs}) if (found := VARIABLES.fullmatch(pair[0]))}
    for (name, value), system in known.items():
        says = f"{name}={value}"
        stated = SAID.get(value) if name == MIXED_PRECISION else None
        yield Source(path=path, system=system, kind=kind, says=says, precision=stated, evidence=f"sets {name}")


def of_matchers(document: Document, name: str) -> Source:
    """Return a file for Megatron-LM's --te-precision-config-file, which overrides the precision module by module."""
    recipe = Matchers.of(document.mapping)
    matchers = recipe.matchers if recipe is not None else ()
    rows = [f"{one.select} -> {'high precision' if one.precision == HIGH else one.precision}" for one in matchers]
    says = "; ".join(rows) or "no matcher is enabled"
    evidence = "has `configs` and `matchers`, as files for --te-precision-config-file do"
    return Source(path=name, system="te-precision-file", kind="per module", says=says, evidence=evidence)


def of_program(document: Document, name: str, unread: dict[str, str]) -> Iterator[Source]:
    """Yield a source for each precision that a program states; `unread` takes the calls that their system refuses."""
    if LOOKS.search(document.text) is None:
        return
    program = program_of(document.text, document.path, WORDS.fullmatch)
    assigned = runs_in(document, is_assigned=True) if _imports_bridge(program.imports) else ()
    for found in assigned:
        yield _of_assigned(found, document, name)
    read = frozenset[int]().union(*(found.lines for found in assigned))
    for call in program.calls:
        if call.line in read:
            continue
        keys = () if call.path.startswith(".") else UNREAD_CALLS.get(call.name, ())  # a class of the file's own
        stating = [key for key in keys if call.written.get(key) not in (None, "False", "None")]
        if stating:
            where = f"{document.path}, line {call.line}"
            why = (
                f"{call.name}({stating[0]}={call.written[stating[0]]}) states a precision, and such calls are not read"
            )
            unread[f"{name}, line {call.line}"] = f"{where}: {why}. Look there."
        says, payload = _stated_by(call) if PACKAGE.fullmatch(call.path) else ("", None)
        place = f"line {call.line}"
        system, evidence = megatron_bridge.SYSTEM, f"calls `{call.written['']}`"
        source = Source(path=name, system=system.name, kind="program", run=place, says=says)
        if payload is not None:
            try:
                imported = replace(megatron_bridge.import_(payload), label=place)
                run = Run(document=document, system=system, evidence=evidence, imported=imported)
                source = Source.of(run, name, "program", says)
            except BridgeError as error:
                unread[f"{name}, {place}"] = f"{document.path}, {place}: {error}"
        if says:
            yield source
    imports_nemo = any(module.partition(".")[0] == "nemo" for module in program.imports)
    wanted = {nemo2.PLUGIN, *(nemo2.RECIPES if imports_nemo else ())}  # a recipe's name alone may be another's
    if wanted & {call.name for call in program.calls}:
        for run in runs_of(document, nemo2.SYSTEM.name):
            yield Source.of(replace(run, evidence=f"names `{run.imported.label}`"), name, "program")


def _imports_bridge(imports: Iterable[str]) -> bool:
    return any(f"{module}.".startswith(("megatron.bridge.", "bridge.")) for module in imports)


def _of_assigned(found: StatedRun, document: Document, name: str) -> Source:
    """Return a precision that a program assigns to the `mixed_precision` of a run."""
    imported = replace(megatron_bridge.import_of_program(found.stated), label=found.label)
    evidence = "assigns `mixed_precision`"
    run = Run(document=document, system=megatron_bridge.SYSTEM, evidence=evidence, imported=imported)
    return Source.of(run, name, "program")


def _stated_by(call: Call) -> tuple[str, Any]:
    """Return what a call of Megatron Bridge states, as written or empty, and its import's payload or None."""
    keys = [key for key in STATING.get(call.name, ()) if key in call.written]
    if not keys and RECIPE.fullmatch(call.name) is None:
        return "", None
    payload: Any = call.name
    if call.name == "MixedPrecisionConfig":
        payload = None if call.undecided else {"_target_": call.name, **call.arguments}
    elif keys:
        payload = call.positional[0] if keys[0] == "0" else call.arguments.get(keys[0])
    written = ", ".join(call.written[key] if key == "0" else f"{key}={call.written[key]}" for key in keys)
    says = f"{call.written['']}({written})"
    return (f"{says}, decided at run time" if payload is None else says), payload
