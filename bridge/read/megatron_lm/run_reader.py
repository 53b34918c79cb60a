"""`read_run`: a file of Megatron-LM as a run.

A file is an argument file, a launch script, or the arguments that a run printed or saved. A run of
Megatron-LM has no recipe. Its flags of a precision become values of Megatron's configs, as in its own
code. So there is no precision to write, and no sync to predict. Under DeepSpeed the engine decides
the precision, and it is read as `convert` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bridge.errors import Finding, PayloadError, RunConfigError, UnreadFileError
from bridge.preflight.file_reading import MEGATRON_LM, FileReading, OptionFaults
from bridge.preflight.launches import Launches
from bridge.preflight.megatron_release import NEWEST_ASSUMED, MegatronRelease
from bridge.preflight.run_choice import RunChoice
from bridge.preflight.uncertainty import Uncertainty
from bridge.read.assumed_release import AssumedRelease, infer_release
from bridge.read.foreign.reports import ImportReport
from bridge.read.framework.framework_options import (
    FrameworkEffects,
    count_ranks,
    parse_variables_argument,
    read_framework_options,
    write_framework_effects,
)
from bridge.read.launch.shell_word import get_variable_name
from bridge.read.launch.torchrun import count_torchrun_ranks
from bridge.read.megatron_lm.deepspeed.engine import drop_engine_fields, uses_deepspeed_engine
from bridge.read.megatron_lm.flags import TABLE, find_misspelt, format_option
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
from bridge.read.megatron_lm.start_rows import WORLD_SIZE_KEY
from bridge.read.megatron_lm.written_arguments import WrittenArguments, find_argument_groups
from bridge.read.text.document import Document
from bridge.target.fields import list_known_releases
from bridge.target.versions import parse_version

ARRAY_PATTERN = re.compile(r"\$\{(\w+)\[[@*]\]\}")
"""A word that is a whole array: ${MODEL_ARGS[@]}."""
VARIABLE_PATTERN = re.compile(r"\$\{?(\w+)")
"""A variable in the condition of a branch."""
MISSPELT_OPTION_RULE = (
    "no known release of Megatron-LM has this argument, and its parser refuses to start; "
    "it is not read"
)
FORK_PARSER = "the parser of Megatron-DeepSpeed"
"""The parser of a program under DeepSpeed."""
READ_BY_FRAMEWORK = "Read as a run of {title}, by its code ({code})."


def make_document(data: bytes, path: Path) -> Document:
    """Return the contents of a file as a document.

    Raises:
        UnreadFileError: The contents cannot be read.
    """
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
    """Return one run of a file as sections, with everything that the file does not decide.

    The arguments are read three times: as the precision that they state, as sections, and by the
    names of the run's framework. Settings of other sources are written over the sections.

    Raises:
        RunConfigError: The file has no run of this number.
        UnreadFileError: The file starts no run of Megatron-LM, or has no arguments of a training run.
    """
    number = choice.number or 1
    runs = _load_runs(document, choice.variables, number)
    written = runs[number - 1]
    report = _import_precision(written)
    parsed = ParsedRun.from_arguments(written, document)
    framework = _read_framework_arguments(parsed, document.path)
    effects = framework.effects
    parsed.require_arguments(document.path)
    own_fields = {**collect_fields_of_no_config(parsed.values), **framework.own_fields}
    sections = _build_argument_sections(parsed, document, report)
    other = read_other_sources(written, parsed.values, document.path)
    sections = _merge_other_sources(parsed, sections, other, effects)
    assumed = _get_release(written, sections)
    reading = FileReading(
        framework=MEGATRON_LM,
        sections=sections,
        environment=framework.environment,
        own_fields=own_fields,
        generation=effects.generation,
        notes=(*_describe_framework(written), *other.read_too),
        release=MegatronRelease(version=assumed.release, reason=assumed.reason),
        uncertainty=Uncertainty(
            open_points=(*describe_open_points(parsed), *other.unknown, *effects.unknown),
            mode_decider=report.decided_by,
            default_decider=_find_decider(parsed, document),
            late_values=collect_late_fields(parsed.values),
            unread_sources={**other.opened, **effects.opened},
            uncounted_options=(*other.uncounted, *effects.uncounted),
            no_plan_reason=effects.no_plan_reason or other.no_plan_reason,
        ),
        launches=Launches(
            labels=_list_labels(runs),
            number=number,
            branches=_list_branches(runs, number),
            variables=_collect_mode_variables(runs, written),
        ),
        option_faults=OptionFaults(
            refused=(*_make_refusal_findings(written), *_make_misspelling_findings(parsed)),
            misdirected=effects.faulty_options,
        ),
    )
    return _replace_framework_and_kind(reading, parsed, document.path)


def _replace_framework_and_kind(reading: FileReading, parsed: ParsedRun, path: str) -> FileReading:
    """Return a reading under the name of its framework, and without a plan for a model of another kind."""
    framework = parsed.written.framework
    if framework is not None:
        reading = replace(reading, framework=framework.title, base=MEGATRON_LM)
    kind = find_other_model_kind(parsed.written, parsed.values)
    if kind is not None:
        no_plan_reason = kind.format_no_plan_reason(path)
        uncertainty = replace(
            reading.uncertainty, no_plan_reason=no_plan_reason, other_model_kind=kind.title
        )
        reading = replace(reading, uncertainty=uncertainty)
    return reading


def _list_labels(runs: Sequence[WrittenArguments]) -> tuple[str, ...]:
    """Return the labels of the runs of a file; none for a single run."""
    if len(runs) == 1:
        return ()
    return tuple(written.label for written in runs)


def _load_runs(
    document: Document, variables: Mapping[str, str], number: int
) -> list[WrittenArguments]:
    """Return the runs of a file.

    Raises:
        RunConfigError: There is no run of this number.
        UnreadFileError: The arguments cannot be read.
    """
    try:
        runs = read_runs(document, variables)
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    if not 1 <= number <= len(runs):
        rule = f"must be from 1 to {len(runs)}, the runs of {document.path}"
        raise RunConfigError.of("--launch", rule, number, "Give the number of one of them.")
    return runs


def _import_precision(written: WrittenArguments) -> ImportReport:
    """Return the precision that a run states, as `convert` reads it.

    Raises:
        UnreadFileError: An argument has a value that no field can have.
    """
    try:
        return import_arguments(written)
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class _FrameworkArguments:
    """The arguments and variables that the table of the run's framework reads."""

    effects: FrameworkEffects
    environment: Mapping[str, str]
    """Environment variables of the run, as far as they are known."""
    own_fields: Mapping[str, object]
    """As in `FileReading`."""


def _read_framework_arguments(parsed: ParsedRun, path: str) -> _FrameworkArguments:
    """Return the arguments and variables that the run's framework reads by its names."""
    environment: dict[str, str] = {}
    for name, value in parsed.written.launch.environment.items():
        if not value.is_open:
            environment[name] = str(value)
    own_fields: dict[str, object] = {}
    framework = parsed.written.framework
    if framework is None:
        ranks = count_torchrun_ranks(parsed.written.launch.runner)
        if ranks is not None:
            own_fields[WORLD_SIZE_KEY] = ranks
        return _FrameworkArguments(
            effects=FrameworkEffects(), environment=environment, own_fields=own_fields
        )
    arguments = parsed.values.all
    environment.update(parse_variables_argument(framework, arguments))
    ranks = count_ranks(framework, arguments)
    if ranks is not None:
        own_fields[WORLD_SIZE_KEY] = ranks
    effects = read_framework_options(framework, arguments, environment, path)
    return _FrameworkArguments(effects=effects, environment=environment, own_fields=own_fields)


def _build_argument_sections(
    parsed: ParsedRun, document: Document, report: ImportReport
) -> dict[str, dict[str, object]]:
    """Return the sections that the arguments become, with the precision of DeepSpeed's engine.

    Stated values of a wrong type are put into the sections, where a rule reports them. The values of a
    printed run have passed Megatron-LM's parser, so that none of them is reported.
    """
    sections = build_sections(parsed.values)
    if parsed.written.printed is None:
        add_malformed_values(sections, parsed.values)
    has_started_engine = document.kind == "shell" and uses_deepspeed_engine(parsed.written)
    if has_started_engine and report.decided_by is None:
        sections["mixed_precision"] = report.config.to_dict()
    return sections


def _merge_other_sources(
    parsed: ParsedRun,
    sections: Mapping[str, Mapping[str, object]],
    other: OtherSources,
    effects: FrameworkEffects,
) -> dict[str, dict[str, object]]:
    """Return the sections of the arguments with the fields of other sources written over them.

    A run that trains nothing has only a model.
    """
    merged: dict[str, dict[str, object]] = {}
    for section, fields in sections.items():
        if "mixed_precision" in other.sections:  # an engine decides, whatever the arguments say
            merged[section] = drop_engine_fields(fields)
        else:
            merged[section] = dict(fields)
    for section, fields in other.sections.items():
        merged[section] = {**merged.get(section, {}), **fields}
    write_framework_effects(merged, effects)
    if parsed.is_inference:
        return {"model": merged["model"]}
    return merged


def _get_release(
    written: WrittenArguments, sections: Mapping[str, Mapping[str, object]]
) -> AssumedRelease:
    """Return the release of Megatron Core that a run is read as.

    It is the release that printed all arguments, or the one of the framework's table, or else the
    newest known one.
    """
    framework = written.framework
    if written.has_every_default:
        return infer_release(sections, is_complete=True)
    if framework is not None and framework.release:
        version = parse_version(framework.release["megatron_core"])
        return AssumedRelease(version, framework.release["because"])
    return AssumedRelease(list_known_releases()[-1], NEWEST_ASSUMED)


def _find_decider(parsed: ParsedRun, document: Document) -> str | None:
    """Return the source that decides the settings which a run does not state, for messages.

    It is None if known defaults decide them.
    """
    written = parsed.written
    if written.has_every_default:
        return None
    if written.is_truncated:
        return "the rest of the log"
    if document.kind != "shell":
        is_of_tests = TEST_GROUP in document.mapping or find_argument_groups(document.mapping)
        if is_of_tests:
            return None
        return "the command line that names this file"
    if not parsed.is_started:
        return "the script that uses these arguments"
    if not written.is_known:
        return written.launch.name
    if uses_deepspeed_engine(written):
        return FORK_PARSER
    if parsed.open_sources:
        return parsed.open_sources[0]
    return None


def _make_misspelling_findings(parsed: ParsedRun) -> tuple[Finding, ...]:
    """Return a warning for each option that differs from an argument's name by a letter or two.

    It is no error, since a fork of Megatron-LM may have an option of this name. There is none if the
    framework's parser drops unknown words, or if the file states every argument of its parser.
    """
    written = parsed.written
    if written.has_every_default:
        return ()
    if written.framework is not None and written.framework.ignores:
        return ()
    findings: list[Finding] = []
    for name, argument in find_misspelt(parsed.values.all).items():
        finding = Finding(
            path=format_option(name),
            rule=MISSPELT_OPTION_RULE,
            remedy=f"Write {format_option(argument)}",
            value=parsed.values.all[name],
            severity="warning",
        )
        findings.append(finding)
    return tuple(findings)


def _make_refusal_findings(written: WrittenArguments) -> tuple[Finding, ...]:
    """Return the words that the parser refuses, as errors.

    They are warnings if the program may have a parser of its own. They are no findings if the
    framework's parser drops words that it does not know.
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
            remedy=sentence.remedy.rstrip("."),  # as the remedies of rules
            value=refusal.value,
            severity=severity,
        )
        findings.append(finding)
    return tuple(findings)


def _collect_mode_variables(
    runs: Sequence[WrittenArguments], chosen: WrittenArguments
) -> tuple[str, ...]:
    """Return the variables that may state the mode, each once.

    Variables that choose a branch come first, then those that hold arguments.

    Args:
        runs: The runs of the file, of which some are the same launch on other branches.
        chosen: The run that is read.
    """
    names: list[str] = []
    for written in runs:
        if written.launch.line == chosen.launch.line:
            for decision in written.launch.decisions:
                names += VARIABLE_PATTERN.findall(decision)
    for word in chosen.undecided_words:
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
    for other_number, written in enumerate(runs, 1):
        is_same = written.launch.line == launch.line and written.launch.name == launch.name
        if is_same and other_number != number:
            numbers.append(other_number)
    return tuple(numbers)


def _describe_framework(written: WrittenArguments) -> tuple[str, ...]:
    """Return sentences about the code of the framework that a run is read by."""
    framework = written.framework
    if framework is None:
        return ()
    sentence = READ_BY_FRAMEWORK.format(title=framework.title, code=framework.code)
    return (sentence, *written.notes)
