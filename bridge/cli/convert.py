"""`precision-bridge convert FILE --to SYSTEM`: a precision of one system, written for another."""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from bridge.cli.output import print_json, write_file
from bridge.cli.parser import add_json_option
from bridge.errors import RunConfigError
from bridge.precision.mode import get_mode
from bridge.registry.config import find_config_faults

if TYPE_CHECKING:
    from bridge.convert.conversion import ImportedRun
    from bridge.read.foreign.reports import ExportReport, ImportReport, Unmapped

    Result = tuple[ImportedRun, ExportReport | None]
    """A run of the file, and what it is for the other system; None where nothing is asked."""


SILENT_REASONS = ("implied default", "dead knob")
"""Reasons of records that change nothing by themselves; -v lists them."""
REASON_GROUPS = (
    (
        ("unsupported", "semantics"),
        "losses that change what a run computes",
        "losses that change what it computes in",
    ),
    (("approximated",), "nearest settings taken", "nearest settings taken in"),
    (SILENT_REASONS, "defaults that decide, and settings without an effect", "the same in"),
)
"""Reasons of records -> the words over them in a file that is read, and in one that is written for
a system."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_json_option(
        parser, "print {source, mode, decided_by, semantics, config, payload, losses, lost}"
    )
    parser.add_argument("file", help="launch script, YAML, JSON or Python file")
    parser.add_argument(
        "--to", metavar="SYSTEM", help="system to write for, or `recipe` for our own YAML"
    )
    assumed = "where the file does not state the mode, take the system's own default, and record it"
    parser.add_argument("--assume-defaults", action="store_true", help=assumed)
    source = "system the file is written for, if not detected"
    parser.add_argument("--from", dest="source", metavar="SYSTEM", help=source)
    facts = "facts that no file states: versions, GPU"
    parser.add_argument(
        "--context", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=facts
    )
    strict = "exit with 1 where precision is lost, and write no payload but that of --json"
    parser.add_argument("--strict", action="store_true", help=strict)
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="list every field, default and dead setting too",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write the payload to this file instead of printing it"
    )


def run(args: argparse.Namespace) -> int:
    """Print the payload, and on stderr its source and what cannot be converted exactly.

    Return 1 under --strict.
    """
    from bridge.convert import conversion
    from bridge.convert.systems import get_system
    from bridge.read.text.document import Document

    if args.to is None and args.out is not None:
        raise RunConfigError("--out: needs --to, got none. Add --to recipe, or another system.")
    targets = []
    if args.to not in (None, conversion.RECIPE_TARGET):
        targets.append(get_system(args.to))
    context = _parse_context(args.context)
    runs = conversion.import_runs(Document.load(args.file), args.source, context, targets)
    results: list[Result] = []
    if args.assume_defaults:
        runs = [replace(read, imported=read.imported.assume_default()) for read in runs]
    for read in runs:
        exported = None
        if args.to and read.imported.mode_is_stated:
            exported = conversion.convert(read, args.to, context)
        results.append((read, exported))
    return _write_results(results, args, context)


def _write_results(results: list[Result], args: argparse.Namespace, context: dict[str, Any]) -> int:
    """Write and print the results of all runs; the payload is that of the first."""
    from bridge.convert import conversion

    first, exported = results[0]
    is_stated = first.imported.mode_is_stated
    text = ""
    if args.to is not None and is_stated:
        text = conversion.format_payload(first, args.to, exported)
    is_faulty = False
    if args.to == conversion.RECIPE_TARGET and is_stated:
        is_faulty = bool(find_config_faults(first.imported.config))
    files: dict[str, str] = {}
    if exported is not None:
        files.update(exported.files)
    judged = results
    if not args.json:
        judged = results[:1]
    losses = _format_lost(judged, args)
    if args.out is not None and not is_faulty and not losses and text:
        _write_payload(args.out, text, files)
    report = sys.stdout
    if args.json or (args.to is not None and args.out is None):
        report = sys.stderr
    _print_results(results, args, report)
    if args.to is not None and not is_stated:
        conversion.convert(first, args.to, context)  # raises: no payload without a mode
    if is_faulty:
        first.imported.config.finalize()
    if losses:
        print(losses, file=sys.stderr)
        return 1
    if not args.json and args.to is not None:
        if len(results) > 1:
            sentence = (
                f"The payload is that of the first of {len(results)} runs; --json has them all."
            )
            print(sentence, file=report)
        _print_payload(text, files, args, report)
    return 0


def _write_payload(out: str, text: str, files: dict[str, str]) -> None:
    """Write the payload to a file, and its further files next to it."""
    write_file(out, text, "--out")
    for name, content in files.items():
        write_file(Path(out).parent / name, content, "--out")


def _print_payload(
    text: str, files: dict[str, str], args: argparse.Namespace, report: TextIO
) -> None:
    """Print the payload, or the names of the files that it was written to."""
    if args.out is not None and not text:
        print(
            f"nothing to write: {args.to} has nothing to say of this precision, "
            f"and {args.out} is left alone"
        )
    elif args.out is not None:
        written = [args.out]
        for name in files:
            written.append(str(Path(args.out).parent / name))
        print(f"wrote {', '.join(written)}")
    else:
        sys.stderr.flush()
        if not text.endswith("\n"):
            text += "\n"
        print(text, end="")
        for name, content in files.items():
            print(f"{name}, which --out writes too:\n{content}", file=report)


def _format_lost(results: list[Result], args: argparse.Namespace) -> str:
    """Return the line under --strict that names each setting whose precision is lost.

    Empty where none is.
    """
    from bridge.convert.conversion import collect_losses

    if not args.strict:
        return ""
    gone = []
    for read, exported in results:
        for entry in collect_losses(read, exported):
            gone.append(f"{entry.field}={entry.value!r}")
    if not gone:
        return ""
    where = ""
    if args.to is not None:
        where = f" for {args.to}"
    settings = ", ".join(dict.fromkeys(gone))
    remedy = "Follow the remedies of the report, or convert without --strict."
    return f"{args.file}: precision is lost{where}: {settings}. {remedy}"


def _print_results(results: list[Result], args: argparse.Namespace, report: TextIO) -> None:
    if not args.json:
        for read, exported in results:
            print(*_format_report(read, exported, args), sep="\n", file=report)
        return
    runs = list(itertools.starmap(_result_to_dict, results))
    content = runs[0]
    if len(runs) > 1:
        content = {**content, "runs": runs}
    print_json(content)


def _parse_context(words: list[str]) -> dict[str, Any]:
    import yaml

    facts: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise RunConfigError(
                f"--context: must be KEY=VALUE, got {word!r}. Write auto=bf16, for example."
            )
        if key in facts:
            rule = f"{key} must be given once, got it again as {value!r}"
            raise RunConfigError(f"--context: {rule}. Keep one of the two.")
        facts[key] = value
        if key.endswith("version"):
            continue
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            continue
        if isinstance(parsed, bool | int | float | dict | list):
            facts[key] = parsed
    return facts


def _result_to_dict(read: ImportedRun, exported: ExportReport | None) -> dict[str, Any]:
    from bridge.convert.conversion import collect_losses, format_records, to_plain_data

    imported = read.imported
    config = imported.config.to_dict()
    mode, payload = None, None
    faults: list[str] = []
    if imported.mode_is_stated:
        mode = get_mode(imported.config)
        payload = to_plain_data(config)
        faults = list(map(str, find_config_faults(imported.config)))
    files: dict[str, str] = {}
    losses = format_records(imported.unmapped, "import")
    if exported is not None:
        payload = to_plain_data(exported.payload)
        files = dict(exported.files)
        losses = losses + format_records(exported.unmapped, "export")
    lost_fields = dict.fromkeys(entry.field for entry in collect_losses(read, exported))
    return {
        "source": read.source,
        "mode": mode,
        "decided_by": imported.decided_by,
        "semantics": imported.semantics,
        "config": to_plain_data(config),
        "payload": payload,
        "files": files,
        "losses": losses,
        "lost": list(lost_fields),
        "faults": faults,
    }


def _format_report(
    read: ImportedRun, exported: ExportReport | None, args: argparse.Namespace
) -> list[str]:
    """Return the report of one run: first the recipe that it amounts to, then what it loses."""
    from bridge.read.foreign.semantics import SEMANTICS

    source, imported = read.source, read.imported
    lines = [
        _format_headline(imported),
        f"{source['path']}: {read.system.title}; it {read.evidence}.",
    ]
    stated = []
    for name, value in imported.config.to_dict().items():
        stated.append(f"{name}={value}")
    if source["run"]:
        lines.append(f"run: {source['run']}")
    if args.verbose:
        for field in stated or ["nothing is stated"]:
            lines.append(f"  {field}")
    elif imported.decided_by is not None and stated:
        lines.append(f"stated all the same: {', '.join(stated)}")
    lines.append(f"semantics: {imported.semantics}: {SEMANTICS[imported.semantics]}")
    of_file = list(imported.unmapped)
    of_target: list[Unmapped] = []
    if exported is not None:
        of_target = list(exported.unmapped)
    for reasons, title_of_file, title_of_target in REASON_GROUPS:
        lines += _format_entries(of_file, reasons, title_of_file, args)
        lines += _format_entries(of_target, reasons, f"{title_of_target} {args.to}", args)
    silent = []
    for entry in (*of_file, *of_target):
        if entry.reason in SILENT_REASONS and entry.field not in silent:
            silent.append(entry.field)
    if silent and not args.verbose:
        title = "defaults that decide, and settings without an effect (-v explains them)"
        lines.append(f"{title}: {', '.join(silent)}")
    return lines


def _format_headline(imported: ImportReport) -> str:
    """Return the recipe that means the same, the nearest one, or what decides instead."""
    from bridge.registry.nearest_recipe import format_nearest_label

    if imported.decided_by is not None:
        return f"mode: not stated; {imported.decided_by} decides"
    if imported.recipe is not None:
        return f"recipe: {imported.recipe}"
    return f"recipe: none means the same; the nearest is {format_nearest_label(imported.config)}"


def _format_entries(
    unmapped: list[Unmapped], reasons: tuple[str, ...], title: str, args: argparse.Namespace
) -> list[str]:
    """Return the records of some reasons below their title; none of silent ones without -v."""
    group = [entry for entry in unmapped if entry.reason in reasons]
    if not group or (group[0].reason in SILENT_REASONS and not args.verbose):
        return []
    lines = [f"{title} ({len(group)}):"]
    for entry in group:
        lines.append(f"  {entry}")
    return lines
