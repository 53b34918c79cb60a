"""`read_run`: a file of Megatron-LM as a run.

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
from bridge.preflight.file_reading import MEGATRON_LM, NEWEST_ASSUMED, FileReading, RunChoice
from bridge.read.assumed_release import infer_release
from bridge.read.foreign.reports import ImportReport
from bridge.read.framework.framework_options import (
    FrameworkEffects,
    count_ranks,
    parse_variables_argument,
    read_framework_options,
    write_framework_effects,
)
from bridge.read.launch.shell_word import get_variable_name
from bridge.read.megatron_lm.deepspeed_engine import drop_engine_fields, uses_deepspeed_engine
from bridge.read.megatron_lm.flags import TABLE
from bridge.read.megatron_lm.importer import import_arguments
from bridge.read.megatron_lm.model_kind import find_other_model_kind
from bridge.read.megatron_lm.open_points import describe_open_points
from bridge.read.megatron_lm.other_sources import OtherSources, read_other_sources
from bridge.read.megatron_lm.parsed_run import TEST_GROUP, ParsedRun, read_runs
from bridge.read.megatron_lm.parser_refusals import find_refusals
from bridge.read.megatron_lm.printed_arguments import BLOCK_START
from bridge.read.megatron_lm.sections import (
    add_malformed_values,
    build_sections,
    collect_fields_of_no_config,
    collect_late_fields,
)
from bridge.read.megatron_lm.start_rows import ARGUMENT_SECTION
from bridge.read.megatron_lm.written_arguments import WrittenArguments, find_argument_groups
from bridge.read.text.document import Document
from bridge.target.fields import list_known_releases
from bridge.target.versions import Version, parse_version

ARRAY_PATTERN = re.compile(r"\$\{(\w+)\[[@*]\]\}")
VARIABLE_PATTERN = re.compile(r"\$\{?(\w+)")
"""A variable in the condition of a branch."""
FORK_PARSER = "the parser of Megatron-DeepSpeed"
"""The parser of a program under DeepSpeed."""


def make_document(data: bytes, path: Path) -> Document:
    """Return a file's contents as a document; UnreadFileError for contents that cannot be read."""
    try:
        return Document.from_bytes(data, str(path))
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None


def is_megatron_lm_file(document: Document) -> bool:
    """Return whether a document is one of Megatron-LM's files, or a launch script of any program."""
    if document.kind == "shell" or BLOCK_START.search(document.text):
        return True
    return bool(find_argument_groups(document.mapping)) or TEST_GROUP in document.mapping


def read_run(document: Document, choice: RunChoice) -> FileReading:
    """Return one run of a file as sections, with everything that the file leaves open.

    Raises:
        RunConfigError: The file starts no run of Megatron-LM, or there is no run of this number.
        UnreadFileError: The file holds no arguments of a training.
    """
    number = choice.number or 1
    runs = _load_runs(document, choice.variables, number)
    written = runs[number - 1]
    report = _import_precision(written)
    run = ParsedRun.from_arguments(written, document)
    names = _read_framework_arguments(run, document.path)
    run.require_arguments(document.path)
    own_fields = {**collect_fields_of_no_config(run.values), **names.own_fields}
    sections = _build_argument_sections(run, document, report)
    other = read_other_sources(written, run.values, document.path)
    sections = _merge_other_sources(run, sections, other, names.own)
    release, reason = _get_release(written, sections)
    reading = FileReading(
        framework=MEGATRON_LM,
        sections=sections,
        environment=names.environment,
        own_fields=own_fields,
        unknown=(*describe_open_points(run), *other.unknown, *names.own.unknown),
        no_plan_reason=names.own.no_plan_reason or other.no_plan_reason,
        uncounted=(*other.uncounted, *names.own.uncounted),
        opened={**other.opened, **names.own.opened},
        generation=names.own.generation,
        read_too=(*_describe_framework(written), *other.read_too),
        release=release,
        release_reason=reason,
        mode_decided_by=report.decided_by,
        unstated_by=_find_decider(run, document),
        open_values=collect_late_fields(run.values),
        variables=_collect_mode_variables(runs, written),
        refused=_make_refusal_findings(written),
        faulty_options=names.own.faulty_options,
        runs=_list_labels(runs),
        number=number,
        branches=_list_branches(runs, number),
    )
    if written.framework is not None:
        reading = replace(reading, framework=written.framework.title, base=MEGATRON_LM)
    kind = find_other_model_kind(written, run.values)
    if kind is not None:
        no_plan_reason = kind.sentence(document.path)
        reading = replace(reading, no_plan_reason=no_plan_reason, other_layers=kind.title)
    return reading


def _list_labels(runs: Sequence[WrittenArguments]) -> tuple[str, ...]:
    """Return the labels of the runs of a file; empty for a single run."""
    if len(runs) == 1:
        return ()
    return tuple(run.label for run in runs)


def _load_runs(
    document: Document, variables: Mapping[str, str], number: int
) -> list[WrittenArguments]:
    """Return the runs of a file; RunConfigError where there is no run of this number."""
    try:
        runs = read_runs(document, variables)
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    if not 1 <= number <= len(runs):
        rule = f"must be from 1 to {len(runs)}, the runs of {document.path}"
        raise RunConfigError.of("--launch", rule, number, "Give the number of one of them.")
    return runs


def _import_precision(written: WrittenArguments) -> ImportReport:
    """Return the precision that a run states, as `convert` reads it."""
    try:
        return import_arguments(written)
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class _FrameworkArguments:
    """The part of a run that the table of its framework reads."""

    own: FrameworkEffects
    environment: Mapping[str, str]
    """Environment variables of the run, as far as they are known."""
    own_fields: Mapping[str, Any]


def _read_framework_arguments(run: ParsedRun, path: str) -> _FrameworkArguments:
    """Return the arguments and variables that the run's framework reads by its names."""
    environment: dict[str, str] = {}
    for name, value in run.written.launch.environment.items():
        if not value.is_unknown:
            environment[name] = str(value)
    framework = run.written.framework
    if framework is None:
        return _FrameworkArguments(own=FrameworkEffects(), environment=environment, own_fields={})
    arguments = run.values.all
    environment.update(parse_variables_argument(framework, arguments))
    own_fields: dict[str, Any] = {}
    ranks = count_ranks(framework, arguments)
    if ranks is not None:
        own_fields[f"{ARGUMENT_SECTION}.world_size"] = ranks
    own = read_framework_options(framework, arguments, environment, path)
    return _FrameworkArguments(own=own, environment=environment, own_fields=own_fields)


def _build_argument_sections(
    run: ParsedRun, document: Document, report: ImportReport
) -> dict[str, dict[str, Any]]:
    """Return the sections that the arguments become, with the precision of DeepSpeed's engine."""
    sections = build_sections(run.values)
    if run.written.printed is None:
        add_malformed_values(sections, run.values)
    is_started_engine = document.kind == "shell" and uses_deepspeed_engine(run.written)
    if is_started_engine and report.decided_by is None:
        sections["mixed_precision"] = report.config.to_dict()
    return sections


def _merge_other_sources(
    run: ParsedRun,
    sections: Mapping[str, Mapping[str, Any]],
    other: OtherSources,
    own: FrameworkEffects,
) -> dict[str, dict[str, Any]]:
    """Return the sections of the arguments with the fields of other sources over them.

    A run that trains nothing has a model alone.
    """
    merged: dict[str, dict[str, Any]] = {}
    for owner_name, fields in sections.items():
        if "mixed_precision" in other.sections:  # of an engine, whatever the arguments say
            merged[owner_name] = drop_engine_fields(fields)
        else:
            merged[owner_name] = dict(fields)
    for owner_name, fields in other.sections.items():
        merged[owner_name] = {**merged.get(owner_name, {}), **fields}
    write_framework_effects(merged, own)
    if run.is_inference:
        return {"model": merged["model"]}
    return merged


def _get_release(
    written: WrittenArguments, sections: Mapping[str, Mapping[str, Any]]
) -> tuple[Version | None, str]:
    """Return the release of Megatron Core that a run is read as, and the reason."""
    framework = written.framework
    if written.has_every_default:  # the release that wrote all arguments
        return infer_release(sections, is_complete=True)
    if framework is not None and framework.release:
        return parse_version(framework.release["megatron_core"]), framework.release["because"]
    return list_known_releases()[-1], NEWEST_ASSUMED


def _find_decider(run: ParsedRun, document: Document) -> str | None:
    """Return what decides the settings that a run does not state, as a noun; None: known defaults do."""
    written = run.written
    if written.has_every_default:
        return None
    if written.is_truncated:
        return "the rest of the log"
    if document.kind != "shell":
        if TEST_GROUP in document.mapping or find_argument_groups(
            document.mapping
        ):  # of Megatron-LM's tests
            return None
        return "the command line that names this file"
    if not run.is_started:
        return "the script that uses these arguments"
    if not written.is_known:
        return written.launch.name
    if uses_deepspeed_engine(written):
        return FORK_PARSER
    if run.open_sources:
        return run.open_sources[0]
    return None


def _make_refusal_findings(written: WrittenArguments) -> tuple[Finding, ...]:
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
    for refusal in find_refusals(written):
        facts = {"system": MEGATRON_LM, **refusal.facts}
        sentence = TABLE.sentences[refusal.row].fill(facts)
        finding = Finding(
            path=refusal.setting,
            rule=sentence.detail,
            remedy=sentence.remedy.rstrip("."),
            value=refusal.value,
            severity=severity,
        )
        findings.append(finding)
    return tuple(findings)


def _collect_mode_variables(
    runs: Sequence[WrittenArguments], written: WrittenArguments
) -> tuple[str, ...]:
    """Return the variables that may state the mode.

    Those that choose a branch come first, then those that hold arguments.
    """
    names: list[str] = []
    for run in runs:
        if run.launch.line == written.launch.line:
            for label in run.launch.decisions:
                names += VARIABLE_PATTERN.findall(label)
    for word in written.undecided:
        array = ARRAY_PATTERN.fullmatch(word)
        if array is None:
            names.append(get_variable_name(word))
        else:
            names.append(array[1])
    return tuple(dict.fromkeys(filter(None, names)))


def _list_branches(runs: Sequence[WrittenArguments], number: int) -> tuple[int, ...]:
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


def _describe_framework(written: WrittenArguments) -> tuple[str, ...]:
    """Return by which code of a framework a run is read, as sentences."""
    framework = written.framework
    if framework is None:
        return ()
    return (
        f"Read as a run of {framework.title}, by its code ({framework.code}).",
        *written.read_too,
    )
