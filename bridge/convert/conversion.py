"""The work of `convert`: a file into a recipe, and on into another system's words.

run, *others = runs_of(Document.load("train.sh"))
exported = convert(run, "axolotl")
lost(run, exported)
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bridge.convert.systems import detect_system, get_system
from bridge.errors import PayloadError, close_matches, did_you_mean
from bridge.precision.yaml_text import to_yaml
from bridge.read import framework_signs
from bridge.read.foreign.reports import Unmapped
from bridge.read.foreign.semantics import get_semantics
from bridge.read.system_signs import DOCUMENT_KINDS, list_candidates

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bridge.read.command_lines import CommandLine
    from bridge.read.foreign.reports import ExportReport, ImportReport
    from bridge.read.foreign.system import System
    from bridge.read.launch.launch import Launch
    from bridge.read.text.document import Document

RECIPE_TARGET = "recipe"
"""The name that `--to` has for our own YAML."""
LOSS_REASONS = ("unsupported", "semantics")
"""Reasons of a record that loses precision; records of other reasons name a near value, a default or
a setting without effect."""
LOSSLESS_FIELDS = ("pipeline_dtype", "reuse_grad_buf_for_mxfp8_param_ag")
"""Fields that change neither weights nor GEMMs, loss scale or sums: their loss is information."""

MAX_LAUNCHES = 2_000
"""Launches of a script that are read; 10,000 take 9 s."""
MAX_SHOWN_LAUNCHES = 2
"""Launches that the refusal of a script describes; further launches are counted."""


@dataclass(frozen=True, kw_only=True)
class ImportedRun:
    """A run that a file asks for."""

    document: Document
    system: System
    evidence: str
    imported: ImportReport

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
    """Return every run that a document asks for, in the order of the document.

    Args:
        document: The file.
        system_name: The system that the file is written for; None: it is detected.
        context: Facts that no file states.
        targets: Systems that are written for, whose keys the context may have too.

    Raises:
        PayloadError: The file asks for no run that can be read.
    """
    if document.kind == "python" and system_name is not None:
        kinds = DOCUMENT_KINDS[get_system(system_name).name]
        if "python" not in kinds:
            rule = f"{system_name} takes {' or '.join(kinds)}, and this is a Python program"
            raise PayloadError(f"{document.path}: {rule}. Give its configuration.")
    if document.kind == "shell":
        return _import_script(document, system_name, context or {}, targets)
    if system_name is None:
        _refuse_unconverted(framework_signs.recognise_file(document), document)
    detected = []
    systems: list[System] = []
    for part in document.parts:
        source, evidence = detect_system(part, system_name)
        detected.append((part, source, evidence))
        systems.append(source)
    _require_known_keys(context or {}, [*systems, *targets])
    runs: list[ImportedRun] = []
    for part, source, evidence in detected:
        repeated = _report_repeated_keys(part)
        for imported in _import_part(document, part, source, context or {}):
            complete = replace(imported, unmapped=(*imported.unmapped, *repeated))
            runs.append(
                ImportedRun(document=part, system=source, evidence=evidence, imported=complete)
            )
    return runs


def _refuse_unconverted(framework: framework_signs.Framework | None, document: Document) -> None:
    """Refuse a file of a framework that `convert` does not read."""
    if framework is not None and not framework.is_converted:
        raise PayloadError(framework.refusal(document.path))


def _import_part(
    document: Document, part: Document, source: System, context: Mapping[str, Any]
) -> Sequence[ImportReport]:
    """Return the imports of a part of a document by the system that it is written for."""
    payload = part.content
    if source.read is not None:
        payload = source.read(part)
    facts = _select_facts(source, context)
    with _add_path_to_errors(document):
        if source.import_all:
            return source.import_all(payload, **facts)
        return (source.import_(payload, **facts),)


def _report_repeated_keys(part: Document) -> list[Unmapped]:
    """Return a record for each key that stands twice in its mapping."""
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
    """Return the runs of a launch script, each read by the system whose command line it is."""
    from bridge.read import command_lines
    from bridge.read.launch.script_launches import read_launches
    from bridge.read.megatron_lm import importer as megatron_lm
    from bridge.read.megatron_lm.recognition import is_megatron_launch

    ours = megatron_lm.SYSTEM
    variables = megatron_lm.parse_variables(context.get("variables"))
    started = read_launches(document.text, document.path, variables)
    if len(started) > MAX_LAUNCHES:
        rule = f"a launch script must not start more than {MAX_LAUNCHES} programs"
        raise PayloadError(f"{document.path}: {rule}, got {len(started)}. Give a part of it.")
    lines: list[CommandLine | None] = [None] * len(started)
    if system_name != ours.name:
        lines = [command_lines.read_command_line(launch, system_name) for launch in started]
    known = [get_system(line.system) for line in lines if line is not None and line.system]
    _require_known_keys(context, [ours, *known, *targets])
    evidence = _describe_evidence(document, started, system_name)
    runs: list[ImportedRun] = []
    left: list[Unmapped] = []
    for launch, line in zip(started, lines, strict=True):
        if line is None and (
            system_name == ours.name or (system_name is None and is_megatron_launch(launch))
        ):
            with _add_path_to_errors(document, launch.label):
                (imported,) = megatron_lm.import_all([launch], **_select_facts(ours, context))
            runs.append(
                ImportedRun(document=document, system=ours, evidence=evidence, imported=imported)
            )
        elif line is None or line.elsewhere:
            left += command_lines.report_skipped_launch(launch, line)
        else:
            runs.append(_import_command_line(document, launch, line, context))
    if not runs:
        if system_name is None:
            _refuse_unconverted(framework_signs.recognise_first_launch(started), document)
        raise _make_no_launch_error(document, started, system_name, left)
    first = runs[0].imported
    first = replace(first, unmapped=(*first.unmapped, *left))
    runs[0] = replace(runs[0], imported=first)
    return runs


def _describe_evidence(
    document: Document, started: Sequence[Launch], system_name: str | None
) -> str:
    """Return how it is known that a script is Megatron-LM's."""
    if system_name is not None:
        return "was named with --from"
    looks = list_candidates(document)
    if looks:
        return looks[0].evidence
    if any(launch.line for launch in started):
        return "starts a program of Megatron-LM's"
    return "holds arguments, and starts no program"


def _import_command_line(
    document: Document, launch: Launch, line: CommandLine, context: Mapping[str, Any]
) -> ImportedRun:
    """Return the run of a launch whose command line is another system's than Megatron-LM."""
    source = get_system(line.system)
    facts = {**line.context, **_select_facts(source, context)}
    with _add_path_to_errors(document, launch.label):
        imported = source.import_(line.payload, **facts)
    imported = replace(imported, unmapped=(*imported.unmapped, *line.unread), label=launch.label)
    return ImportedRun(document=document, system=source, evidence=line.evidence, imported=imported)


def _make_no_launch_error(
    document: Document,
    started: Sequence[Launch],
    system_name: str | None,
    left: Sequence[Unmapped] = (),
) -> PayloadError:
    """Return the error for a script without a launch that a system reads; `left`: the launches left out."""
    if left:
        launches = [f"{loss.field}: {loss.detail}" for loss in left[:MAX_SHOWN_LAUNCHES]]
        if len(left) > MAX_SHOWN_LAUNCHES:
            launches.append(f"and {len(left) - MAX_SHOWN_LAUNCHES} more launches")
        return PayloadError(f"{document.path}: {'; '.join(launches)}. {left[0].remedy}")
    programs = ", ".join(dict.fromkeys(launch.program for launch in started if launch.line))
    starts = "it starts no training program"
    if programs and system_name is not None:
        starts = f"it starts {programs}, whose arguments {system_name} does not know"
    elif programs:
        starts = f"it starts {programs}, whose arguments no system here knows"
    remedy = "Give the file that sets the precision, or its system with --from."
    return PayloadError(f"{document.path}: {starts}. {remedy}")


@contextmanager
def _add_path_to_errors(document: Document, label: str = "") -> Iterator[None]:
    """Put the file in front of the message of an import's error."""
    try:
        yield
    except PayloadError as error:
        if error.path == document.path:
            raise
        where = ", ".join(filter(None, (document.path, label)))
        raise PayloadError(f"{where}: {error}") from None


def convert(
    run: ImportedRun, to: str, context: Mapping[str, Any] | None = None
) -> ExportReport | None:
    """Return the run as a configuration of a system; None for `RECIPE_TARGET`, whose text `format_payload` writes.

    Raises:
        PayloadError: The run does not state its mode.
    """
    _require_mode(run)
    if to == RECIPE_TARGET:
        return None
    target = get_system(to)
    return target.export(run.imported.config, **_select_facts(target, context or {}, "export"))


def _require_mode(run: ImportedRun) -> None:
    """Refuse a run whose mode another source decides."""
    imported = run.imported
    if imported.decided_by is None:
        return
    where = ", ".join(filter(None, (run.document.path, imported.label)))
    rule = f"the precision must be stated; {imported.decided_by} decides it"
    remedy = "Give that"
    if run.document.kind == "shell":
        remedy = (
            "Give that, variables of the run with --context variables=..., "
            "the log of a run with its arguments, the run's configuration"
        )
    if imported.default_mode is not None:
        remedy += f", or take {imported.default_mode} with --assume-defaults"
    raise PayloadError(f"{where}: {rule}. {remedy}.")


def collect_losses(run: ImportedRun, exported: ExportReport | None) -> list[Unmapped]:
    """Return the records of a conversion that lose a format, a scheme, a loss scale or the dtype of sums."""
    kept: tuple[str, ...] = LOSSLESS_FIELDS
    if get_semantics(run.imported.config) != "fp32":
        kept += ("tf32",)  # it decides about GEMMs in FP32 alone
    entries = list(run.imported.unmapped)
    if exported is not None:
        entries += [entry for entry in exported.unmapped if entry.field not in kept]
    return [entry for entry in entries if entry.reason in LOSS_REASONS]


def _require_known_keys(context: Mapping[str, Any], systems: list[System]) -> None:
    """Refuse a key of the context that no system of the conversion has."""
    known: dict[str, None] = {}
    for reader in systems:
        for key in reader.context:
            known[key.name] = None
    for name in context:
        if name in known:
            continue
        hint = did_you_mean(close_matches(name, known))
        if not hint and known:
            hint = f"Keys: {', '.join(known)}."
        names = " and ".join(dict.fromkeys(reader.name for reader in systems))
        remedy = hint or "There are none."
        raise PayloadError(f"--context: {name!r} is no key of {names}. {remedy}")


def _select_facts(
    reader: System, context: Mapping[str, Any], use: str = "import"
) -> dict[str, Any]:
    """Return the facts of the context that a system takes for an import or an export."""
    keys = {key.name for key in reader.context if use in key.use}
    return {name: value for name, value in context.items() if name in keys}


def format_payload(run: ImportedRun, to: str, exported: ExportReport | None) -> str:
    """Return the payload as the text of a file; empty where there is nothing to write."""
    if exported is None:
        return to_yaml(run.imported.config)
    if exported.payload is None:
        return ""
    return get_system(to).write(exported.payload)


def to_plain_data(value: Any) -> Any:
    """Return a value as plain data of JSON; the text of a value of another type."""
    if isinstance(value, dict):
        return {str(key): to_plain_data(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return list(map(to_plain_data, value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str | int | float | bool | None):
        return value
    return str(value)


def format_records(unmapped: tuple[Unmapped, ...], direction: str) -> list[dict[str, Any]]:
    """Return unmapped settings as plain data; `direction` is "import" or "export"."""
    return [{**to_plain_data(vars(entry)), "on": direction} for entry in unmapped]
