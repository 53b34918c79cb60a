"""Reads a file as recipes, and writes a recipe for another system, for the command `convert`.

run, *others = import_runs(Document.load("train.sh"))
exported = convert(run, "axolotl")
collect_losses(run, exported)
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from bridge.convert.systems import detect_system, get_system
from bridge.errors import PayloadError, close_matches, did_you_mean
from bridge.precision.yaml_text import to_yaml
from bridge.read import framework_signs
from bridge.read.foreign.reports import Unmapped
from bridge.read.foreign.semantics import get_semantics
from bridge.read.foreign_system_signs import DOCUMENT_KINDS, list_candidates

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bridge.read.command_lines import CommandLine
    from bridge.read.foreign.reports import ExportReport, ImportReport
    from bridge.read.foreign.system import System
    from bridge.read.launch.launch import Launch
    from bridge.read.text.document import Document

RECIPE_TARGET = "recipe"
"""The name in `--to` of this project's YAML."""
LOSS_REASONS = ("unsupported", "semantics")
"""Reasons of records that change the precision. Other reasons are a near value, a default, and a
setting without effect."""
LOSSLESS_FIELDS = ("pipeline_dtype", "reuse_grad_buf_for_mxfp8_param_ag")
"""Fields that change neither weights, GEMMs, the loss scale nor sums. Their records are notes."""

MAX_LAUNCHES = 2_000
"""The most launches of a script that are read. Reading 10,000 launches would take 9 seconds."""
MAX_SHOWN_LAUNCHES = 2
"""The most launches that the refusal of a script describes. Further launches are only counted."""


@dataclass(frozen=True, kw_only=True)
class ImportedRun:
    """A run that a file describes."""

    document: Document
    """The file, or its part with the run."""
    system: System
    """The system that the run is written for."""
    evidence: str
    """The evidence for the system, as a clause after "it"."""
    imported: ImportReport
    """The precision of the run."""

    @property
    def source(self) -> dict[str, Any]:
        """The file and the system of the run, with the evidence for the system, as plain data."""
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


def import_runs(
    document: Document,
    system_name: str | None = None,
    context: Mapping[str, Any] | None = None,
    targets: Sequence[System] = (),
) -> list[ImportedRun]:
    """Return every run that a document describes, in the order of the document.

    Args:
        document: The file.
        system_name: The system that the file is written for; None: it is detected.
        context: Facts that no file states.
        targets: The systems to write for. The context may have their keys too.

    Raises:
        PayloadError: The file describes no run that can be read, or the context has another key.
    """
    context = context or {}
    if document.kind == "python" and system_name is not None:
        kinds = DOCUMENT_KINDS[get_system(system_name).name]
        if "python" not in kinds:
            rule = f"{system_name} takes {' or '.join(kinds)}, and this is a Python program"
            raise PayloadError(f"{document.path}: {rule}. Give its configuration.")
    if document.kind == "shell":
        return _import_script(document, system_name, context, targets)
    if system_name is None:
        _refuse_unconverted(framework_signs.recognise_file(document), document)
    detected = [detect_system(part, system_name) for part in document.parts]
    _require_known_keys(context, [*(system for system, _ in detected), *targets])
    runs: list[ImportedRun] = []
    for part, (system, evidence) in zip(document.parts, detected, strict=True):
        repeated = _report_repeated_keys(part)
        for imported in _import_part(document, part, system, context):
            complete = replace(imported, unmapped=(*imported.unmapped, *repeated))
            runs.append(
                ImportedRun(document=part, system=system, evidence=evidence, imported=complete)
            )
    return runs


def _refuse_unconverted(framework: framework_signs.Framework | None, document: Document) -> None:
    """Refuse a file of a framework that `convert` does not read.

    Raises:
        PayloadError: The file belongs to such a framework.
    """
    if framework is not None and not framework.is_converted:
        raise PayloadError(framework.refusal(document.path))


def _import_part(
    document: Document, part: Document, source: System, context: Mapping[str, Any]
) -> Sequence[ImportReport]:
    """Return the imports of a part of a document.

    Args:
        document: The file, which errors name.
        source: The system that it is written for.
        context: Facts that no file states.
    """
    payload = part.content
    if source.read is not None:
        payload = source.read(part)
    facts = _select_facts(source, context)
    with _add_path_to_errors(document):
        if source.import_all:
            return source.import_all(payload, **facts)
        return (source.import_(payload, **facts),)


def _report_repeated_keys(part: Document) -> list[Unmapped]:
    """Return a record for each key that occurs twice in its mapping."""
    twice = "the key stands twice in its mapping, and the last value counts"
    repeated: list[Unmapped] = []
    for key, value, line in part.repeated:
        detail = f"line {line}: {twice}"
        repeated.append(Unmapped(key, value, "dead knob", detail, "Keep one of the two."))
    return repeated


def _import_script(
    document: Document,
    system_name: str | None,
    context: Mapping[str, Any],
    targets: Sequence[System],
) -> list[ImportedRun]:
    """Return the runs of a launch script, each read by the system of its command line.

    The launches that are not read are recorded in the report of the first run.

    Args:
        document: The script.
        system_name: The system that --from names; None: it is detected for each launch.
        context: Facts that no file states.
        targets: The systems to write for.

    Raises:
        PayloadError: No launch is read.
    """
    from bridge.read import command_lines
    from bridge.read.megatron_lm import importer as megatron_lm
    from bridge.read.megatron_lm.recognition import is_megatron_launch

    launches = _read_script(document, megatron_lm.parse_variables(context.get("variables")))
    lines: list[CommandLine | None] = [None] * len(launches)
    if system_name != megatron_lm.SYSTEM.name:
        lines = [command_lines.read_command_line(launch, system_name) for launch in launches]
    systems = [get_system(line.system) for line in lines if line is not None and line.system]
    _require_known_keys(context, [megatron_lm.SYSTEM, *systems, *targets])
    evidence = _describe_evidence(document, launches, system_name)
    runs: list[ImportedRun] = []
    skipped: list[Unmapped] = []
    for launch, line in zip(launches, lines, strict=True):
        is_of_megatron = system_name == megatron_lm.SYSTEM.name
        if system_name is None and line is None:
            is_of_megatron = is_megatron_launch(launch)
        if is_of_megatron:
            runs.append(_import_megatron_launch(document, launch, evidence, context))
        elif line is None or line.elsewhere:
            skipped += command_lines.report_skipped_launch(launch, line)
        else:
            runs.append(_import_command_line(document, launch, line, context))
    if not runs:
        if system_name is None:
            _refuse_unconverted(framework_signs.recognise_first_launch(launches), document)
        raise _make_no_launch_error(document, launches, system_name, skipped)
    first = runs[0].imported
    first = replace(first, unmapped=(*first.unmapped, *skipped))
    runs[0] = replace(runs[0], imported=first)
    return runs


def _read_script(document: Document, variables: Mapping[str, str]) -> tuple[Launch, ...]:
    """Return the launches of a script.

    Args:
        document: The script.
        variables: Variables that its environment sets.

    Raises:
        PayloadError: It starts more than `MAX_LAUNCHES` programs.
    """
    from bridge.read.launch.script_launches import read_launches

    launches = read_launches(document.text, document.path, variables)
    if len(launches) > MAX_LAUNCHES:
        rule = f"a launch script must not start more than {MAX_LAUNCHES} programs"
        raise PayloadError(f"{document.path}: {rule}, got {len(launches)}. Give a part of it.")
    return launches


def _import_megatron_launch(
    document: Document, launch: Launch, evidence: str, context: Mapping[str, Any]
) -> ImportedRun:
    """Return the run of a launch of Megatron-LM.

    Args:
        document: The script.
        evidence: The evidence for Megatron-LM, as a clause after "it".
        context: Facts that no file states.
    """
    from bridge.read.megatron_lm import importer as megatron_lm

    system = megatron_lm.SYSTEM
    with _add_path_to_errors(document, launch.label):
        (imported,) = megatron_lm.import_all([launch], **_select_facts(system, context))
    return ImportedRun(document=document, system=system, evidence=evidence, imported=imported)


def _describe_evidence(
    document: Document, launches: Sequence[Launch], system_name: str | None
) -> str:
    """Return the evidence that a script is for Megatron-LM, as a clause after "it"."""
    if system_name is not None:
        return "was named with --from"
    candidates = list_candidates(document)
    if candidates:
        return candidates[0].evidence
    if any(launch.line for launch in launches):
        return "starts a program of Megatron-LM's"
    return "holds arguments, and starts no program"


def _import_command_line(
    document: Document, launch: Launch, line: CommandLine, context: Mapping[str, Any]
) -> ImportedRun:
    """Return the run of a launch of another system than Megatron-LM.

    Args:
        document: The script.
        line: Its command line, which has the system and the payload.
        context: Facts that no file states.
    """
    system = get_system(line.system)
    facts = {**line.context, **_select_facts(system, context)}
    with _add_path_to_errors(document, launch.label):
        imported = system.import_(line.payload, **facts)
    imported = replace(imported, unmapped=(*imported.unmapped, *line.unread), label=launch.label)
    return ImportedRun(document=document, system=system, evidence=line.evidence, imported=imported)


def _make_no_launch_error(
    document: Document,
    launches: Sequence[Launch],
    system_name: str | None,
    skipped: Sequence[Unmapped] = (),
) -> PayloadError:
    """Return the error about a script without a launch that is read.

    Args:
        document: The script.
        system_name: The system that --from names; None: it was detected.
        skipped: The records of the launches.
    """
    if skipped:
        shown = [f"{record.field}: {record.detail}" for record in skipped[:MAX_SHOWN_LAUNCHES]]
        if len(skipped) > MAX_SHOWN_LAUNCHES:
            shown.append(f"and {len(skipped) - MAX_SHOWN_LAUNCHES} more launches")
        return PayloadError(f"{document.path}: {'; '.join(shown)}. {skipped[0].remedy}")
    programs = ", ".join(dict.fromkeys(launch.program for launch in launches if launch.line))
    starts = "it starts no training program"
    if programs and system_name is not None:
        starts = f"it starts {programs}, whose arguments {system_name} does not know"
    elif programs:
        starts = f"it starts {programs}, whose arguments no system here knows"
    remedy = "Give the file that sets the precision, or its system with --from."
    return PayloadError(f"{document.path}: {starts}. {remedy}")


@contextmanager
def _add_path_to_errors(document: Document, label: str = "") -> Iterator[None]:
    """Put the name of the file, and of the run, at the beginning of an error of an import."""
    try:
        yield
    except PayloadError as error:
        if error.path == document.path:
            raise
        run_name = ", ".join(filter(None, (document.path, label)))
        raise PayloadError(f"{run_name}: {error}") from None


def convert(
    run: ImportedRun, to: str, context: Mapping[str, Any] | None = None
) -> ExportReport | None:
    """Return the run as a configuration of a system.

    Args:
        to: The name of the system, or `RECIPE_TARGET`.
        context: Facts that no file states.

    Returns:
        None if `to` is `RECIPE_TARGET`: the recipe itself is the result.

    Raises:
        PayloadError: The run does not state its mode.
    """
    _require_mode(run)
    if to == RECIPE_TARGET:
        return None
    target = get_system(to)
    return target.export(run.imported.config, **_select_facts(target, context or {}, "export"))


def _require_mode(run: ImportedRun) -> None:
    """Refuse a run whose mode another source decides.

    Raises:
        PayloadError: The mode is not stated.
    """
    imported = run.imported
    if imported.decided_by is None:
        return
    run_name = ", ".join(filter(None, (run.document.path, imported.label)))
    rule = f"the precision must be stated; {imported.decided_by} decides it"
    remedy = "Give that"
    if run.document.kind == "shell":
        remedy = (
            "Give that, variables of the run with --context variables=..., "
            "the log of a run with its arguments, the run's configuration"
        )
    if imported.default_mode is not None:
        remedy += f", or take {imported.default_mode} with --assume-defaults"
    raise PayloadError(f"{run_name}: {rule}. {remedy}.")


def collect_losses(run: ImportedRun, exported: ExportReport | None) -> list[Unmapped]:
    """Return the records of a conversion that changes a format, a scheme, a loss scale or a sum.

    Args:
        run: The run as it was read.
        exported: The run as it was written; None if it was only read.
    """
    lossless: tuple[str, ...] = LOSSLESS_FIELDS
    if get_semantics(run.imported.config) != "fp32":
        lossless += ("tf32",)  # it affects only GEMMs in FP32
    records = list(run.imported.unmapped)
    if exported is not None:
        records += [record for record in exported.unmapped if record.field not in lossless]
    return [record for record in records if record.reason in LOSS_REASONS]


def _require_known_keys(context: Mapping[str, Any], systems: Sequence[System]) -> None:
    """Refuse a key of the context that no system of the conversion has.

    Raises:
        PayloadError: The context has such a key.
    """
    known: dict[str, None] = {}
    for system in systems:
        for key in system.context:
            known[key.name] = None
    for name in context:
        if name in known:
            continue
        hint = did_you_mean(close_matches(name, known))
        if not hint and known:
            hint = f"Keys: {', '.join(known)}."
        names = " and ".join(dict.fromkeys(system.name for system in systems))
        remedy = hint or "There are none."
        raise PayloadError(f"--context: {name!r} is no key of {names}. {remedy}")


def _select_facts(
    system: System, context: Mapping[str, Any], use: Literal["import", "export"] = "import"
) -> dict[str, Any]:
    """Return the facts of the context that a system needs for an import or an export."""
    keys = {key.name for key in system.context if use in key.use}
    return {name: value for name, value in context.items() if name in keys}


def format_payload(run: ImportedRun, to: str, exported: ExportReport | None) -> str:
    """Return the result of a conversion as the text of a file; empty if there is nothing to write.

    Args:
        to: The name of the system, or `RECIPE_TARGET`.
        exported: The result of `convert`.
    """
    if exported is None:
        return to_yaml(run.imported.config)
    if exported.payload is None:
        return ""
    return get_system(to).write(exported.payload)


def to_plain_data(value: Any) -> Any:
    """Return a value as plain data of JSON. A value of another type becomes its text."""
    if isinstance(value, dict):
        return {str(key): to_plain_data(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return list(map(to_plain_data, value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | bool | None):
        return value
    return str(value)


def format_records(
    unmapped: Sequence[Unmapped], direction: Literal["import", "export"]
) -> list[dict[str, Any]]:
    """Return the records of an import or an export as plain data."""
    return [{**to_plain_data(vars(record)), "on": direction} for record in unmapped]
