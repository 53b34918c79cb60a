"""`read`: a file of Megatron-LM as a run.

A file is an argument file, a launch script, or the arguments that a run printed or saved. A run of
Megatron-LM has no recipe: its flags of a precision are read as the values of the configs that hold
them, as its own code does. So there is no precision to write, and no sync to foresee. Under
DeepSpeed its engine decides, and the precision is that of `convert`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.errors import Finding, PayloadError, RunConfigError, UnreadFileError
from bridge.preflight.file_reading import MEGATRON_LM, NEWEST, FileReading, RunChoice
from bridge.read.assumed_release import release_of
from bridge.read.foreign.reports import ImportReport
from bridge.read.framework.names import OwnReading, own_names, ranks_of, variables_of, write_own
from bridge.read.launch.word import variable_of
from bridge.read.megatron_lm.arguments import Arguments, argument_groups
from bridge.read.megatron_lm.elsewhere import Elsewhere, elsewhere
from bridge.read.megatron_lm.engine import is_engine, without_those_of_the_engine
from bridge.read.megatron_lm.file_run import GROUP, FileRun, runs_of_file
from bridge.read.megatron_lm.flags import TABLE
from bridge.read.megatron_lm.importer import imported
from bridge.read.megatron_lm.model_kind import other_kind
from bridge.read.megatron_lm.open_points import open_points
from bridge.read.megatron_lm.printed import START
from bridge.read.megatron_lm.refused import refused_words
from bridge.read.megatron_lm.sections import (
    fields_of_no_config,
    late_fields,
    put_malformed,
    sections_of,
)
from bridge.read.megatron_lm.start import ARGUMENT
from bridge.read.text.document import Document
from bridge.target.fields import known_releases
from bridge.target.versions import Version, parse_version

ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
VARIABLE = re.compile(r"\$\{?(\w+)")
"""A variable in the condition of a branch."""
FORK = "the parser of Megatron-DeepSpeed"
"""The parser of a program under DeepSpeed."""


def document_of(data: bytes, path: Path) -> Document:
    """Return a file's contents as a document; UnreadFileError for contents that cannot be read."""
    try:
        return Document.of_bytes(data, str(path))
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None


def is_of(document: Document) -> bool:
    """Return whether a document is one of Megatron-LM's files, or a launch script of any program."""
    if document.kind == "shell" or START.search(document.text):
        return True
    return bool(argument_groups(document.mapping)) or GROUP in document.mapping


def read(document: Document, choice: RunChoice) -> FileReading:
    """Return one run of a file as sections, with everything that the file leaves open.

    Raises:
        RunConfigError: The file starts no run of Megatron-LM, or there is no run of this number.
        UnreadFileError: The file holds no arguments of a training.
    """
    number = choice.number or 1
    runs = _runs(document, choice.variables, number)
    written = runs[number - 1]
    report = _imported(written)
    run = FileRun.of(written, document)
    names = _framework_names(run, document.path)
    run.require_arguments(document.path)
    own_fields = {**fields_of_no_config(run.values), **names.own_fields}
    sections = _argument_sections(run, document, report)
    other = elsewhere(written, run.values, document.path)
    sections = _with_other_sources(run, sections, other, names.own)
    release, reason = _release(written, sections)
    reading = FileReading(
        framework=MEGATRON_LM,
        sections=sections,
        environment=names.environment,
        own_fields=own_fields,
        unknown=(*open_points(run), *other.unknown, *names.own.unknown),
        unplanned=names.own.unplanned or other.unplanned,
        uncounted=(*other.uncounted, *names.own.uncounted),
        opened={**other.opened, **names.own.opened},
        generation=names.own.generation,
        read_too=(*_read_as(written), *other.read_too),
        release=release,
        release_reason=reason,
        mode_decided_by=report.decided_by,
        unstated_by=_decider(run, document),
        open_values=late_fields(run.values),
        variables=_variables(runs, written),
        refused=_refused(written),
        faulty_options=names.own.faulty_options,
        runs=_labels(runs),
        number=number,
        branches=_branches(runs, number),
    )
    if written.framework is not None:
        reading = replace(reading, framework=written.framework.title, base=MEGATRON_LM)
    kind = other_kind(written, run.values)
    if kind is not None:
        unplanned = kind.sentence(document.path)
        reading = replace(reading, unplanned=unplanned, other_layers=kind.title)
    return reading


def _labels(runs: Sequence[Arguments]) -> tuple[str, ...]:
    """Return the labels of the runs of a file; empty for a single run."""
    if len(runs) == 1:
        return ()
    return tuple(run.label for run in runs)


def _runs(document: Document, variables: Mapping[str, str], number: int) -> list[Arguments]:
    """Return the runs of a file; RunConfigError where there is no run of this number."""
    try:
        runs = runs_of_file(document, variables)
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    if not 1 <= number <= len(runs):
        rule = f"must be from 1 to {len(runs)}, the runs of {document.path}"
        raise RunConfigError.of("--launch", rule, number, "Give the number of one of them.")
    return runs


def _imported(written: Arguments) -> ImportReport:
    """Return the precision that a run states, as `convert` reads it."""
    try:
        return imported(written)
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class _FrameworkNames:
    """The part of a run that the table of its framework reads."""

    own: OwnReading
    environment: Mapping[str, str]
    """Environment variables of the run, as far as they are known."""
    own_fields: Mapping[str, Any]


def _framework_names(run: FileRun, path: str) -> _FrameworkNames:
    """Return the arguments and variables that the run's framework reads by its names."""
    environment: dict[str, str] = {}
    for name, value in run.written.launch.environment.items():
        if not value.is_unknown:
            environment[name] = str(value)
    framework = run.written.framework
    if framework is None:
        return _FrameworkNames(own=OwnReading(), environment=environment, own_fields={})
    arguments = run.values.all
    environment.update(variables_of(framework, arguments))
    own_fields: dict[str, Any] = {}
    ranks = ranks_of(framework, arguments)
    if ranks is not None:
        own_fields[f"{ARGUMENT}.world_size"] = ranks
    own = own_names(framework, arguments, environment, path)
    return _FrameworkNames(own=own, environment=environment, own_fields=own_fields)


def _argument_sections(
    run: FileRun, document: Document, report: ImportReport
) -> dict[str, dict[str, Any]]:
    """Return the sections that the arguments become, with the precision of DeepSpeed's engine."""
    sections = sections_of(run.values)
    if run.written.printed is None:
        put_malformed(sections, run.values)
    is_started_engine = document.kind == "shell" and is_engine(run.written)
    if is_started_engine and report.decided_by is None:
        sections["mixed_precision"] = report.config.to_dict()
    return sections


def _with_other_sources(
    run: FileRun, sections: Mapping[str, Mapping[str, Any]], other: Elsewhere, own: OwnReading
) -> dict[str, dict[str, Any]]:
    """Return the sections of the arguments with the fields of other sources over them.

    A run that trains nothing has a model alone.
    """
    whole: dict[str, dict[str, Any]] = {}
    for role, fields in sections.items():
        if "mixed_precision" in other.sections:  # of an engine, whatever the arguments say
            whole[role] = without_those_of_the_engine(fields)
        else:
            whole[role] = dict(fields)
    for role, fields in other.sections.items():
        whole[role] = {**whole.get(role, {}), **fields}
    write_own(whole, own)
    if run.is_inference:
        return {"model": whole["model"]}
    return whole


def _release(
    written: Arguments, sections: Mapping[str, Mapping[str, Any]]
) -> tuple[Version | None, str]:
    """Return the release of Megatron Core that a run is read as, and the reason."""
    framework = written.framework
    if written.has_every_default:  # the release that wrote all arguments
        return release_of(sections, is_whole=True)
    if framework is not None and framework.release:
        return parse_version(framework.release["megatron_core"]), framework.release["because"]
    return known_releases()[-1], NEWEST


def _decider(run: FileRun, document: Document) -> str | None:
    """Return what decides the settings that a run does not state, as a noun; None: known defaults do."""
    written = run.written
    if written.has_every_default:
        return None
    if written.is_cut:
        return "the rest of the log"
    if document.kind != "shell":
        if GROUP in document.mapping or argument_groups(document.mapping):  # of Megatron-LM's tests
            return None
        return "the command line that names this file"
    if not run.is_started:
        return "the script that uses these arguments"
    if not written.is_known:
        return written.launch.name
    if is_engine(written):
        return FORK
    if run.open_ends:
        return run.open_ends[0]
    return None


def _refused(written: Arguments) -> tuple[Finding, ...]:
    """Return the words that the parser refuses, as errors.

    They are warnings where the program may have a parser of its own. The parser of some frameworks
    drops words that it does not know.
    """
    if written.framework is not None and written.framework.ignores:
        return ()
    severity = "warning"
    if written.is_known:
        severity = "error"
    findings: list[Finding] = []
    for refusal in refused_words(written):
        facts = {"system": MEGATRON_LM, **refusal.facts}
        words = TABLE.sentences[refusal.row].filled(facts)
        finding = Finding(
            path=refusal.setting,
            rule=words.detail,
            remedy=words.remedy.rstrip("."),
            value=refusal.value,
            severity=severity,
        )
        findings.append(finding)
    return tuple(findings)


def _variables(runs: Sequence[Arguments], written: Arguments) -> tuple[str, ...]:
    """Return the variables that may state the mode.

    Those that choose a branch come first, then those that hold arguments.
    """
    names: list[str] = []
    for run in runs:
        if run.launch.line == written.launch.line:
            for label in run.launch.decisions:
                names += VARIABLE.findall(label)
    for word in written.undecided:
        array = ARRAY.fullmatch(word)
        if array is None:
            names.append(variable_of(word))
        else:
            names.append(array[1])
    return tuple(dict.fromkeys(filter(None, names)))


def _branches(runs: Sequence[Arguments], number: int) -> tuple[int, ...]:
    """Return the numbers of the runs that are the same launch on other branches of the script."""
    launch = runs[number - 1].launch
    if not launch.line:
        return ()
    numbers: list[int] = []
    for other_number, run in enumerate(runs, 1):
        is_same = run.launch.line == launch.line and run.launch.name == launch.name
        if is_same and other_number != number:
            numbers.append(other_number)
    return tuple(numbers)


def _read_as(written: Arguments) -> tuple[str, ...]:
    """Return by which code of a framework a run is read, as sentences."""
    framework = written.framework
    if framework is None:
        return ()
    return (
        f"Read as a run of {framework.title}, by its code ({framework.code}).",
        *written.read_too,
    )
