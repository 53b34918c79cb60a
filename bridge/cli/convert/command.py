"""`precision-bridge convert FILE --to SYSTEM`: a precision of one system, written for another."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from bridge.cli.convert.context import parse_context
from bridge.cli.convert.payload import Payload
from bridge.cli.output import print_json
from bridge.cli.parser import add_json_option
from bridge.errors import RunConfigError
from bridge.registry.mixed_precision_config import find_config_faults

if TYPE_CHECKING:
    from bridge.cli.convert.converted_run import ConvertedRun


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
    """Convert the runs of a file, write or print the payload of the first, and report on all.

    Returns:
        1 if precision is lost under ``--strict``, else 0.

    Raises:
        RunConfigError: ``--out`` has nothing to write.
        PayloadError: The file cannot be read, or the payload needs a mode and no mode is stated.
        PrecisionConfigError: The recipe of the first run contradicts itself.
    """
    from bridge.cli.convert.report import format_strict_refusal

    if args.to is None and args.out is not None:
        raise RunConfigError("--out: needs --to, got none. Add --to recipe, or another system.")
    context = parse_context(args.context)
    converted = _convert_runs(args, context)
    first = converted[0]
    payload = _make_payload(first, args)
    is_faulty = _is_faulty_recipe(first, args)
    refusal = ""
    if args.strict:
        judged = converted
        if not args.json:  # without --json only the payload of the first run is printed
            judged = converted[:1]
        refusal = format_strict_refusal(judged, args.file, args.to)
    if args.out is not None and payload.text and not is_faulty and not refusal:
        payload.write(args.out)
    report = _choose_report_stream(args)
    _print_report(converted, args, report)
    if is_faulty:
        first.run.imported.config.finalize()  # raises the faults
    if args.to is not None:
        _require_mode(first, args.to, context)
    if refusal:
        print(refusal, file=sys.stderr)
        return 1
    if args.to is not None and not args.json:
        _print_payload(payload, len(converted), args, report)
    return 0


def _convert_runs(args: argparse.Namespace, context: dict[str, Any]) -> list[ConvertedRun]:
    """Return each run of the file, converted if its mode is stated."""
    from bridge.cli.convert.converted_run import ConvertedRun
    from bridge.convert import conversion
    from bridge.convert.systems import get_system
    from bridge.read.text.document import Document

    targets = []
    if args.to not in (None, conversion.RECIPE_TARGET):
        targets.append(get_system(args.to))
    runs = conversion.import_runs(Document.load(args.file), args.source, context, targets)
    if args.assume_defaults:
        runs = [replace(run, imported=run.imported.assume_default()) for run in runs]
    converted = []
    for run in runs:
        exported = None
        if args.to and run.imported.mode_is_stated:
            exported = conversion.convert(run, args.to, context)
        converted.append(ConvertedRun(run=run, exported=exported))
    return converted


def _make_payload(first: ConvertedRun, args: argparse.Namespace) -> Payload:
    """Return the payload of the first run. Empty if the run is only read, or has no mode."""
    from bridge.convert.conversion import format_payload

    if args.to is None or not first.run.imported.mode_is_stated:
        return Payload()
    payload_text = format_payload(first.run, args.to, first.exported)
    if first.exported is None:
        return Payload(text=payload_text)
    return Payload(text=payload_text, files=first.exported.files)


def _is_faulty_recipe(first: ConvertedRun, args: argparse.Namespace) -> bool:
    """Return whether the payload is a recipe that contradicts itself."""
    from bridge.convert.conversion import RECIPE_TARGET

    imported = first.run.imported
    if args.to != RECIPE_TARGET or not imported.mode_is_stated:
        return False
    return bool(find_config_faults(imported.config))


def _require_mode(first: ConvertedRun, system: str, context: dict[str, Any]) -> None:
    """Refuse a payload without a mode.

    Raises:
        PayloadError: The first run does not state its mode.
    """
    from bridge.convert import conversion

    if not first.run.imported.mode_is_stated:
        conversion.convert(first.run, system, context)  # raises, with the source of the mode


def _choose_report_stream(args: argparse.Namespace) -> TextIO:
    """Return stderr if standard output has the JSON or the payload, else standard output."""
    prints_payload = args.to is not None and args.out is None
    if args.json or prints_payload:
        return sys.stderr
    return sys.stdout


def _print_report(
    converted: Sequence[ConvertedRun], args: argparse.Namespace, report: TextIO
) -> None:
    """Print the report on all runs: as JSON on standard output, or as text on `report`."""
    from bridge.cli.convert.report import format_report

    if not args.json:
        for converted_run in converted:
            lines = format_report(converted_run, args.to, is_verbose=args.verbose)
            print(*lines, sep="\n", file=report)
        return
    contents = [converted_run.to_dict() for converted_run in converted]
    content = contents[0]
    if len(contents) > 1:
        content = {**content, "runs": contents}
    print_json(content)


def _print_payload(
    payload: Payload, run_count: int, args: argparse.Namespace, report: TextIO
) -> None:
    """Print the payload of the first run, or the names of the files that were written."""
    if run_count > 1:
        sentence = f"The payload is that of the first of {run_count} runs; --json has them all."
        print(sentence, file=report)
    if args.out is None:
        payload.print_text(report)
    else:
        payload.print_names(args.out, args.to)
