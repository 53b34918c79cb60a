"""One file into a recipe and on into another system's words: what `precision-bridge convert` prints."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bridge.errors import PayloadError, close_matches, did_you_mean
from bridge.precision.yaml_text import to_yaml
from bridge.read import frameworks
from bridge.read.contract import Unmapped
from bridge.read.meaning import semantics_of
from bridge.read.systems import candidates, detect, system

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bridge.read.command_lines import CommandLine
    from bridge.read.contract import ExportReport, ImportReport, System
    from bridge.read.launch.launches import Launch
    from bridge.read.text.document import Document

OURS = "recipe"
"""The name that `--to` has for our own YAML."""
LOSSES = ("unsupported", "semantics")
"""Reasons of a record that lose precision; the others name a near value, a default or a setting without effect."""
SAME_NUMBERS = ("pipeline_dtype", "reuse_grad_buf_for_mxfp8_param_ag")
"""Fields that change neither weights nor GEMMs, loss scale or sums: their loss is information."""

MOST_LAUNCHES = 2_000
"""Of one script; all of 10,000 take 9 s to be read."""
SHOWN = 2
"""Launches that the refusal of a script describes; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run that a file asks for."""

    document: Document
    system: System
    evidence: str
    imported: ImportReport

    @property
    def source(self) -> dict[str, Any]:
        """Where it was read and how that was known, as plain data."""
        label = self.imported.label
        if self.document.part is not None:
            label = "; ".join(filter(None, (f"document {self.document.part}", label)))
        return {
            "path": self.document.path,
            "system": self.system.name,
            "version": self.system.version,
            "kind": self.document.kind,
            "evidence": self.evidence,
            "run": label,
            "recipe": self.imported.recipe,
        }


def runs_of(
    document: Document,
    chosen: str | None = None,
    context: Mapping[str, Any] | None = None,
    targets: Sequence[System] = (),
) -> list[Run]:
    """Return every run that a document asks for, the file's first one first; `targets` read the context too."""
    kinds = ("python",) if chosen is None else system(chosen).kinds
    if document.kind == "python" and "python" not in kinds:
        rule = f"{chosen} takes {' or '.join(kinds)}, and this is a Python program"
        raise PayloadError(f"{document.path}: {rule}. Give its configuration.")
    if document.kind == "shell":
        return _of_script(document, chosen, context or {}, targets)
    framework = frameworks.recognise(document) if chosen is None else None
    if framework is not None and not framework.is_converted:
        raise PayloadError(framework.refusal(document.path))
    detected = [(part, *detect(part, chosen)) for part in document.parts]
    _check_context(context or {}, [*(one for _, one, _ in detected), *targets])
    found = []
    twice = "the key stands twice in its mapping, and the last value counts"
    for part, one, evidence in detected:
        payload = one.read(part) if one.read is not None else part.content
        given = _for_system(one, context or {})
        with _named(document):
            imports = (
                one.import_all(payload, **given)
                if one.import_all
                else (one.import_(payload, **given),)
            )
        repeated = [
            Unmapped(key, value, "dead knob", f"line {line}: {twice}", "Keep one of the two.")
            for key, value, line in part.repeated
        ]
        imports = tuple(
            replace(imported, unmapped=(*imported.unmapped, *repeated)) for imported in imports
        )
        found += [
            Run(document=part, system=one, evidence=evidence, imported=imported)
            for imported in imports
        ]
    return found


def _of_script(
    document: Document, chosen: str | None, context: Mapping[str, Any], targets: Sequence[System]
) -> list[Run]:
    """Return the runs of a launch script, each read as the system's whose command line it is."""
    from bridge.read import command_lines
    from bridge.read.launch.alternatives import launches
    from bridge.read.megatron_lm import importer as megatron_lm
    from bridge.read.megatron_lm.recognition import is_megatron

    ours = megatron_lm.SYSTEM
    started = launches(
        document.text, document.path, megatron_lm.variables_of(context.get("variables"))
    )
    if len(started) > MOST_LAUNCHES:
        rule = (
            f"a launch script must not start more than {MOST_LAUNCHES} programs, got {len(started)}"
        )
        raise PayloadError(f"{document.path}: {rule}. Give a part of it.")
    lines = [
        None if chosen == ours.name else command_lines.read(launch, chosen) for launch in started
    ]
    known = [system(line.system) for line in lines if line is not None and line.system]
    _check_context(context, [ours, *known, *targets])
    looks = candidates(document)
    is_started = any(launch.line for launch in started)
    evidence = (
        "starts a program of Megatron-LM's"
        if is_started
        else "holds arguments, and starts no program"
    )
    evidence = looks[0][1].evidence if looks else evidence
    evidence = evidence if chosen is None else "was named with --from"
    found: list[Run] = []
    left: list[Unmapped] = []
    for launch, line in zip(started, lines, strict=True):
        if line is None and (chosen == ours.name or (chosen is None and is_megatron(launch))):
            with _named(document, launch.label):
                (imported,) = megatron_lm.import_all([launch], **_for_system(ours, context))
            found.append(Run(document=document, system=ours, evidence=evidence, imported=imported))
        elif line is None or line.elsewhere:
            left += command_lines.left_out(launch, line)
        else:
            found.append(_of_line(document, launch, line, context))
    if not found:
        framework = frameworks.of_launches(started) if chosen is None else None
        if framework is not None and not framework.is_converted:
            raise PayloadError(framework.refusal(document.path))
        raise _nothing(document, started, chosen, left)
    found[0] = replace(
        found[0], imported=replace(found[0].imported, unmapped=(*found[0].imported.unmapped, *left))
    )
    return found


def _of_line(
    document: Document, launch: Launch, line: CommandLine, context: Mapping[str, Any]
) -> Run:
    """Return the run of a launch whose command line is another system's than Megatron-LM."""
    one = system(line.system)
    with _named(document, launch.label):
        imported = one.import_(line.payload, **{**line.context, **_for_system(one, context)})
    imported = replace(imported, unmapped=(*imported.unmapped, *line.unread), label=launch.label)
    return Run(document=document, system=one, evidence=line.evidence, imported=imported)


def _nothing(
    document: Document, started: Sequence[Launch], chosen: str | None, left: Sequence[Unmapped] = ()
) -> PayloadError:
    """Return the error for a script that starts nothing a system reads; `left` are the launches left out."""
    if left:
        launches = [f"{loss.field}: {loss.detail}" for loss in left[:SHOWN]]
        launches += [f"and {len(left) - SHOWN} more launches"] if len(left) > SHOWN else []
        return PayloadError(f"{document.path}: {'; '.join(launches)}. {left[0].remedy}")
    rule = f"{chosen} does not know" if chosen is not None else "no system here knows"
    programs = ", ".join(dict.fromkeys(launch.program for launch in started if launch.line))
    starts = (
        f"it starts {programs}, whose arguments {rule}"
        if programs
        else "it starts no training program"
    )
    return PayloadError(
        f"{document.path}: {starts}. Give the file that sets the precision, or its system with --from."
    )


@contextmanager
def _named(document: Document, label: str = "") -> Iterator[None]:
    """Put the file in front of what an import complains of."""
    try:
        yield
    except PayloadError as error:
        if error.path == document.path:
            raise
        where = ", ".join(filter(None, (document.path, label)))
        raise PayloadError(f"{where}: {error}") from None


def convert(run: Run, to: str, context: Mapping[str, Any] | None = None) -> ExportReport | None:
    """Return the run as a configuration of the system `to`; None for our own, which is the run's config itself."""
    if run.imported.decided_by is not None:
        where = ", ".join(filter(None, (run.document.path, run.imported.label)))
        rule = f"the precision must be stated; {run.imported.decided_by} decides it"
        ways = ["that"]
        if run.document.kind == "shell":
            ways += [
                "variables of the run with --context variables=...",
                "the log of a run with its arguments",
            ]
            ways.append("the run's configuration")
        remedy = f"Give {', '.join(ways)}"
        if run.imported.default_mode is not None:
            remedy += f", or take {run.imported.default_mode} with --assume-defaults"
        raise PayloadError(f"{where}: {rule}. {remedy}.")
    if to == OURS:
        return None
    target = system(to)
    return target.export(run.imported.config, **_for_system(target, context or {}, "export"))


def lost(run: Run, exported: ExportReport | None) -> list[Unmapped]:
    """Return the records of a conversion that lose precision: a format, scheme, loss scale or dtype of sums."""
    kept: tuple[str, ...] = SAME_NUMBERS
    if semantics_of(run.imported.config) != "fp32":
        kept += ("tf32",)  # it decides about GEMMs in FP32 alone
    written = (
        [entry for entry in exported.unmapped if entry.field not in kept]
        if exported is not None
        else []
    )
    return [entry for entry in (*run.imported.unmapped, *written) if entry.reason in LOSSES]


def _check_context(given: Mapping[str, Any], systems: list[System]) -> None:
    known = [key.name for one in systems for key in one.context]
    for name in given:
        if name not in known:
            hint = did_you_mean(close_matches(name, known))
            hint = hint or (
                f"Keys: {', '.join(dict.fromkeys(known))}." if known else "There are none."
            )
            names = " and ".join(dict.fromkeys(one.name for one in systems))
            raise PayloadError(f"--context: {name!r} is no key of {names}. {hint}")


def _for_system(one: System, context: Mapping[str, Any], use: str = "import") -> dict[str, Any]:
    keys = {key.name for key in one.context if use in key.use}
    return {name: value for name, value in context.items() if name in keys}


def payload_text(run: Run, to: str, exported: ExportReport | None) -> str:
    """Return the payload as the text of a file; empty where there is nothing to write."""
    if exported is None:
        return to_yaml(run.imported.config)
    return "" if exported.payload is None else system(to).write(exported.payload)


def plain(value: Any) -> Any:
    """Return anything as what JSON can hold."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def records(unmapped: tuple[Unmapped, ...], direction: str) -> list[dict[str, Any]]:
    """Return unmapped settings as plain data; `direction` is "import" or "export"."""
    return [{**plain(vars(entry)), "on": direction} for entry in unmapped]
