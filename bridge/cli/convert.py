"""`precision-bridge convert FILE --to SYSTEM`: a precision from one system's words into another's."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from bridge.cli.output import print_json, write_file
from bridge.cli.parser import add_json
from bridge.errors import RunConfigError
from bridge.precision.mode import mode_of
from bridge.registry.faults import faults_of

if TYPE_CHECKING:
    from bridge.convert.conversion import Run
    from bridge.read.contract import ExportReport, ImportReport, Unmapped


SILENT = ("implied default", "dead knob")
"""Reasons of records that change nothing by themselves; -v lists them."""
GROUPS = (
    (
        ("unsupported", "semantics"),
        "losses that change what a run computes",
        "losses that change what it computes in",
    ),
    (("approximated",), "nearest settings taken", "nearest settings taken in"),
    (SILENT, "defaults that decide, and settings without an effect", "the same in"),
)
"""Reasons of records -> the words over them in a file that is read, and in one that is written for a system."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_json(parser, "print {source, mode, decided_by, semantics, config, payload, losses, lost}")
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


def run(chosen: argparse.Namespace) -> int:
    """Print the payload, and on stderr its source and what cannot be converted exactly; return 1 under --strict."""
    from bridge.convert import conversion
    from bridge.read.systems import system
    from bridge.read.text.document import Document

    if chosen.to is None and chosen.out is not None:
        raise RunConfigError("--out: needs --to, got none. Add --to recipe, or another system.")
    targets = [] if chosen.to in (None, conversion.OURS) else [system(chosen.to)]
    context = _context(chosen.context)
    runs = conversion.runs_of(Document.load(chosen.file), chosen.source, context, targets)
    if chosen.assume_defaults:
        runs = [replace(one, imported=one.imported.assume_default()) for one in runs]
    results = [
        (
            one,
            conversion.convert(one, chosen.to, context)
            if chosen.to and one.imported.mode_is_stated
            else None,
        )
        for one in runs
    ]
    first, exported = results[0]
    undecided = chosen.to is not None and not first.imported.mode_is_stated
    text = (
        ""
        if chosen.to is None or undecided
        else conversion.payload_text(first, chosen.to, exported)
    )
    faulty = (
        chosen.to == conversion.OURS and not undecided and bool(faults_of(first.imported.config))
    )
    files = dict(exported.files) if exported is not None else {}
    gone = _lost(results if chosen.json else results[:1], chosen)
    if chosen.out is not None and not faulty and not gone and text:
        write_file(chosen.out, text, "--out")
        for name, content in files.items():
            write_file(Path(chosen.out).parent / name, content, "--out")
    report = (
        sys.stderr if chosen.json or (chosen.to is not None and chosen.out is None) else sys.stdout
    )
    _print(results, chosen, report)
    if undecided:
        conversion.convert(first, chosen.to, context)
    if faulty:
        first.imported.config.finalize()
    if gone:
        print(gone, file=sys.stderr)
        return 1
    if not chosen.json and chosen.to is not None:
        if len(runs) > 1:
            print(
                f"The payload is that of the first of {len(runs)} runs; --json has them all.",
                file=report,
            )
        _print_payload(text, files, chosen, report)
    return 0


def _print_payload(
    text: str, files: dict[str, str], chosen: argparse.Namespace, report: TextIO
) -> None:
    if chosen.out is not None and not text:
        print(
            f"nothing to write: {chosen.to} has nothing to say of this precision, and {chosen.out} is left alone"
        )
    elif chosen.out is not None:
        written = [chosen.out, *(str(Path(chosen.out).parent / name) for name in files)]
        print(f"wrote {', '.join(written)}")
    else:
        sys.stderr.flush()
        print(text, end="" if text.endswith("\n") else "\n")
        for name, content in files.items():
            print(f"{name}, which --out writes too:\n{content}", file=report)


def _lost(results: list[tuple[Run, ExportReport | None]], chosen: argparse.Namespace) -> str:
    """Return the line under --strict that names each setting whose precision is lost; empty where none is."""
    from bridge.convert.conversion import lost

    if not chosen.strict:
        return ""
    gone = [
        f"{entry.field}={entry.value!r}"
        for one, exported in results
        for entry in lost(one, exported)
    ]
    if not gone:
        return ""
    where = f" for {chosen.to}" if chosen.to is not None else ""
    settings = ", ".join(dict.fromkeys(gone))
    remedy = "Follow the remedies of the report, or convert without --strict."
    return f"{chosen.file}: precision is lost{where}: {settings}. {remedy}"


def _print(
    results: list[tuple[Run, ExportReport | None]], chosen: argparse.Namespace, report: TextIO
) -> None:
    if chosen.json:
        found = [_as_dict(one, exported) for one, exported in results]
        print_json(found[0] if len(found) == 1 else {**found[0], "runs": found})
        return
    for one, exported in results:
        print(*_lines(one, exported, chosen), sep="\n", file=report)


def _context(words: list[str]) -> dict[str, Any]:
    import yaml

    given: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise RunConfigError(
                f"--context: must be KEY=VALUE, got {word!r}. Write auto=bf16, for example."
            )
        if key in given:
            raise RunConfigError(
                f"--context: {key} must be given once, got it again as {value!r}. Keep one of the two."
            )
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            parsed = value
        given[key] = (
            value
            if key.endswith("version") or not isinstance(parsed, bool | int | float | dict | list)
            else parsed
        )
    return given


def _as_dict(one: Run, exported: ExportReport | None) -> dict[str, Any]:
    from bridge.convert.conversion import lost, plain, records

    imported = one.imported
    config, payload = imported.config.to_dict(), None
    if imported.mode_is_stated:
        payload = plain(exported.payload if exported is not None else config)
    return {
        "source": one.source,
        "mode": mode_of(imported.config) if imported.mode_is_stated else None,
        "decided_by": imported.decided_by,
        "semantics": imported.semantics,
        "config": plain(config),
        "payload": payload,
        "files": dict(exported.files) if exported is not None else {},
        "losses": records(imported.unmapped, "import")
        + (records(exported.unmapped, "export") if exported is not None else []),
        "lost": list(dict.fromkeys(entry.field for entry in lost(one, exported))),
        "faults": [str(fault) for fault in faults_of(imported.config)]
        if imported.mode_is_stated
        else [],
    }


def _lines(one: Run, exported: ExportReport | None, chosen: argparse.Namespace) -> list[str]:
    """Return the report of one run: first the recipe that it amounts to, then what it loses."""
    from bridge.read.contract import SEMANTICS

    source, imported = one.source, one.imported
    lines = [_headline(imported), f"{source['path']}: {one.system.title}; it {one.evidence}."]
    stated = [f"{name}={value}" for name, value in imported.config.to_dict().items()]
    if source["run"]:
        lines.append(f"run: {source['run']}")
    if chosen.verbose:
        lines += [f"  {field}" for field in stated] or ["  nothing is stated"]
    elif imported.decided_by is not None and stated:
        lines.append(f"stated all the same: {', '.join(stated)}")
    lines.append(f"semantics: {imported.semantics}: {SEMANTICS[imported.semantics]}")
    read = list(imported.unmapped)
    written = list(exported.unmapped) if exported is not None else []
    for reasons, read_so, written_so in GROUPS:
        lines += _entries([entry for entry in read if entry.reason in reasons], read_so, chosen)
        lines += _entries(
            [entry for entry in written if entry.reason in reasons],
            f"{written_so} {chosen.to}",
            chosen,
        )
    silent = dict.fromkeys(entry.field for entry in (*read, *written) if entry.reason in SILENT)
    if silent and not chosen.verbose:
        lines.append(
            f"defaults that decide, and settings without an effect (-v explains them): {', '.join(silent)}"
        )
    return lines


def _headline(imported: ImportReport) -> str:
    """Return the line that matters: the recipe that means the same, the nearest one, or what decides instead."""
    from bridge.registry.nearest import nearest_label

    if imported.decided_by is not None:
        return f"mode: not stated; {imported.decided_by} decides"
    if imported.recipe is not None:
        return f"recipe: {imported.recipe}"
    return f"recipe: none means the same; the nearest is {nearest_label(imported.config)}"


def _entries(unmapped: list[Unmapped], what: str, chosen: argparse.Namespace) -> list[str]:
    if not unmapped or (unmapped[0].reason in SILENT and not chosen.verbose):
        return []
    return [f"{what} ({len(unmapped)}):", *(f"  {entry}" for entry in unmapped)]
