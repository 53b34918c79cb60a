"""`make_file_reading`: a run of a file of Megatron-LM.

The file is an argument file, a launch script, or the arguments that a run printed or saved.

Megatron-LM has no recipes. Its flags of a precision are written directly into the fields of the
model, the optimizer and DDP, as its code does it. So the reading has no section `mixed_precision`,
and the sync changes none of its values. Only under DeepSpeed there is such a section: the engine
decides the precision, whatever the arguments state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bridge.errors import PayloadError, RunConfigError, UnreadFileError
from bridge.preflight.file_reading import MEGATRON_LM, FileReading, OptionFaults
from bridge.preflight.megatron_release import MegatronRelease, assume_newest_release
from bridge.preflight.run_choice import RunChoice
from bridge.preflight.uncertainty import Uncertainty
from bridge.read.assumed_release import infer_release
from bridge.read.framework.framework_options import (
    FrameworkEffects,
    count_ranks,
    parse_variables_argument,
    read_framework_options,
    write_framework_effects,
)
from bridge.read.launch.launched_ranks import count_launched_ranks
from bridge.read.megatron_lm.deepspeed.engine import drop_engine_fields, uses_deepspeed_engine
from bridge.read.megatron_lm.file_arguments import has_argument_groups, list_written_arguments
from bridge.read.megatron_lm.importer import import_arguments, require_values
from bridge.read.megatron_lm.launches import make_launches
from bridge.read.megatron_lm.model_kind import find_other_model_kind
from bridge.read.megatron_lm.open_points import describe_open_points
from bridge.read.megatron_lm.other_sources import OtherSources, read_other_sources
from bridge.read.megatron_lm.parsed_run import ParsedRun
from bridge.read.megatron_lm.refusal_findings import make_refused_option_findings
from bridge.read.megatron_lm.run_mode import ModeSource, find_run_mode
from bridge.read.megatron_lm.sections import (
    add_malformed_values,
    build_sections,
    collect_fields_of_no_config,
    collect_open_fields,
)
from bridge.read.megatron_lm.start_rows import WORLD_SIZE_KEY
from bridge.read.megatron_lm.written_arguments import WrittenArguments
from bridge.read.text.document import Document

FORK_PARSER = "the parser of Megatron-DeepSpeed"
"""The parser of a program under DeepSpeed."""
READ_BY_FRAMEWORK = "Read as a run of {title}, by its code ({code})."


def make_file_reading(document: Document, choice: RunChoice) -> FileReading:
    """Return a run of a file, with everything that the file does not decide.

    The arguments are read three times: as the precision that they state, as sections, and by the
    names of the run's framework. Settings of other sources are written over the sections.

    Raises:
        RunConfigError: The file has no run of this number.
        UnreadFileError: The file starts no run of Megatron-LM, or has no arguments of a training run.
    """
    runs = list_written_arguments(document, choice.variables)
    number = choice.number or 1
    _require_number(number, runs, document.path)
    written = runs[number - 1]
    parsed = ParsedRun.from_arguments(written, document)
    parsed.require_arguments(document.path)

    precision = _read_precision(written, document)
    launches = make_launches(runs, number)
    try:
        framework_arguments = _read_framework_arguments(parsed, document.path)
    except UnreadFileError as error:  # another run of the file may train
        for sentence in launches.sentences:
            error.add_note(sentence)
        raise
    argument_fields = collect_fields_of_no_config(parsed.values)
    argument_sections = _build_argument_sections(parsed, precision)
    # A value of a wrong type is in the sections now, or among the open values of `parsed`.
    other = read_other_sources(written, parsed.values, document.path)
    sections = _merge_other_sources(parsed, argument_sections, other, framework_arguments.effects)

    title, underlying_framework = MEGATRON_LM, ""
    if written.framework is not None:
        title, underlying_framework = written.framework.title, MEGATRON_LM
    return FileReading(
        framework=title,
        underlying_framework=underlying_framework,
        sections=sections,
        environment=framework_arguments.environment,
        own_fields={**argument_fields, **framework_arguments.own_fields},
        generation=framework_arguments.effects.generation,
        notes=(*_describe_framework(written), *other.notes),
        release=_get_release(written, sections),
        trains_nothing=parsed.is_inference,
        uncertainty=_make_uncertainty(
            parsed, document, precision, other, framework_arguments.effects
        ),
        launches=launches,
        option_faults=OptionFaults(
            refused=make_refused_option_findings(parsed),
            misdirected=framework_arguments.effects.faulty_options,
        ),
    )


def _require_number(number: int, runs: Sequence[WrittenArguments], path: str) -> None:
    """Refuse the number of a run that a file does not have.

    Raises:
        RunConfigError: There is no run of this number.
    """
    if not 1 <= number <= len(runs):
        rule = f"must be from 1 to {len(runs)}, the runs of {path}"
        raise RunConfigError.of("--launch", rule, number, "Give the number of one of them.")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Precision:
    """The precision of a run, as far as it is no field of Megatron's."""

    mode_decider: str | None
    """The source of a mode that the run does not state; None if the mode is known."""
    engine_fields: Mapping[str, object] | None = None
    """Fields of the precision that DeepSpeed's engine decides; None without an engine."""


def _read_precision(written: WrittenArguments, document: Document) -> _Precision:
    """Return the decider of the mode, and the precision under DeepSpeed's engine.

    Raises:
        UnreadFileError: An argument has a value that no field can have.
    """
    try:
        if not uses_deepspeed_engine(written):
            require_values(written)
            return _Precision(mode_decider=_find_mode_decider(written))
        report = import_arguments(written)
    except PayloadError as error:
        raise UnreadFileError(str(error)) from None
    if document.kind != "shell" or report.decided_by is not None:
        return _Precision(mode_decider=report.decided_by)
    return _Precision(mode_decider=None, engine_fields=report.config.to_dict())


def _find_mode_decider(written: WrittenArguments) -> str | None:
    """Return the source of a mode that a run without an engine does not state; None if it is known."""
    if find_run_mode(written).source is ModeSource.UNREAD:
        return written.mode_decider
    return None


# -- the run's framework ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _FrameworkArguments:
    """The arguments and variables that the table of the run's framework reads."""

    effects: FrameworkEffects
    environment: Mapping[str, str]
    """Environment variables of the run, as far as they are known."""
    own_fields: Mapping[str, object]
    """As in `FileReading`."""


def _read_framework_arguments(parsed: ParsedRun, path: str) -> _FrameworkArguments:
    """Return the arguments and variables that the run's framework reads by its names.

    A run without a framework has none but the number of its ranks.
    """
    environment: dict[str, str] = {}
    for name, value in parsed.written.launch.environment.items():
        if not value.is_open:
            environment[name] = str(value)
    effects = FrameworkEffects()
    table = parsed.written.framework
    if table is None:
        ranks = count_launched_ranks(parsed.written.launch.runner)
    else:
        arguments = parsed.values.all
        environment.update(parse_variables_argument(table, arguments))
        ranks = count_ranks(table, arguments)
        effects = read_framework_options(table, arguments, environment, path)
    own_fields: dict[str, object] = {}
    if ranks is not None:
        own_fields[WORLD_SIZE_KEY] = ranks
    return _FrameworkArguments(effects=effects, environment=environment, own_fields=own_fields)


def _describe_framework(written: WrittenArguments) -> tuple[str, ...]:
    """Return sentences about the code of the framework that a run is read by."""
    table = written.framework
    if table is None:
        return ()
    sentence = READ_BY_FRAMEWORK.format(title=table.title, code=table.code)
    return (sentence, *written.notes)


# -- the sections ----------------------------------------------------------------------------------


def _build_argument_sections(
    parsed: ParsedRun, precision: _Precision
) -> dict[str, dict[str, object]]:
    """Return the sections that the arguments become, with the precision of DeepSpeed's engine.

    Stated values of a wrong type are put into the sections, where a rule reports them. The values of a
    printed run have passed Megatron-LM's parser, so that none of them is reported.
    """
    sections = build_sections(parsed.values)
    if parsed.written.printed is None:
        add_malformed_values(sections, parsed.values)
    if precision.engine_fields is not None:
        sections["mixed_precision"] = dict(precision.engine_fields)
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
) -> MegatronRelease:
    """Return the release of Megatron Core that a run is read as.

    It is the release that printed all arguments, or the one of the framework's table, or else the
    newest known one.
    """
    table = written.framework
    if written.has_every_default:
        return infer_release(sections, is_complete=True)
    if table is not None:
        return table.megatron_release
    return assume_newest_release()


# -- the settings that the file does not decide ----------------------------------------------------


def _make_uncertainty(
    parsed: ParsedRun,
    document: Document,
    precision: _Precision,
    other: OtherSources,
    effects: FrameworkEffects,
) -> Uncertainty:
    """Return the settings of a run that its file does not decide.

    A model that is not a language model has no plan, for this reason before any other.
    """
    no_plan_reason = effects.no_plan_reason or other.no_plan_reason
    other_model_kind = None
    kind = find_other_model_kind(parsed.written, parsed.values)
    if kind is not None:
        no_plan_reason = kind.format_no_plan_reason(document.path)
        other_model_kind = kind.title
    return Uncertainty(
        open_points=(*describe_open_points(parsed), *other.open_points, *effects.open_points),
        mode_decider=precision.mode_decider,
        default_decider=_find_default_decider(parsed, document),
        open_values=collect_open_fields(parsed.values),
        unread_sources={**other.unread_sources, **effects.unread_sources},
        unread_options=(*other.unread_options, *effects.unread_options),
        no_plan_reason=no_plan_reason,
        other_model_kind=other_model_kind,
    )


def _find_default_decider(parsed: ParsedRun, document: Document) -> str | None:
    """Return the decider of the settings that a run does not state; None if known defaults decide."""
    written = parsed.written
    if written.has_every_default:
        return None
    if written.is_truncated:
        return "the rest of the log"
    if document.kind != "shell":
        if has_argument_groups(document):  # Megatron-LM's own tests start these
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
