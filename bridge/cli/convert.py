"""`precision-bridge convert FILE --to SYSTEM`: a precision from one system's words into another's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import RunConfigError

if TYPE_CHECKING:
    import argparse

    from bridge.interop.contract import ExportReport, Unmapped
    from bridge.interop.conversion import Run

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("convert", help="read a precision from another system's file, write it for a third")
    parser.add_argument("file", help="launch script, YAML, JSON or Python file")
    parser.add_argument(
        "--to", required=True, metavar="SYSTEM", help="system to write for, or `recipe` for our own YAML"
    )
    parser.add_argument(
        "--from", dest="source", metavar="SYSTEM", help="system the file is written for, if not detected"
    )
    parser.add_argument(
        "--context",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="what no file can say: versions, GPU",
    )
    parser.add_argument("--out", metavar="FILE", help="write the payload to this file instead of printing it")
    parser.add_argument("--json", action="store_true", help="print {source, semantics, config, payload, losses}")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Print the payload, and on stderr what it was read from and what did not cross."""
    from bridge.interop import conversion
    from bridge.interop.document import Document
    from bridge.interop.systems import system

    targets = [] if chosen.to == conversion.OURS else [system(chosen.to)]
    context = _context(chosen.context)
    runs = conversion.runs_of(Document.load(chosen.file), chosen.source, context, targets)
    results = [(one, conversion.convert(one, chosen.to, context)) for one in runs]
    text = conversion.payload_text(runs[0], chosen.to, results[0][1])
    faulty = chosen.to == conversion.OURS and bool(runs[0].imported.config.faults())
    if chosen.out is not None and not faulty and text:
        _write(chosen.out, text)
    report = sys.stdout if chosen.out is not None and not chosen.json else sys.stderr
    if chosen.json:
        told = [_told(one, exported) for one, exported in results]
        print(json.dumps(told[0] if len(told) == 1 else {**told[0], "runs": told}, indent=2))
    else:
        for one, exported in results:
            print(*_lines(one, exported, chosen.to), sep="\n", file=report)
    if faulty:
        runs[0].imported.config.finalize()
    if chosen.json:
        return
    if len(runs) > 1:
        print(f"The payload is that of the first of {len(runs)} runs; --json has them all.", file=report)
    if chosen.out is not None and not text:
        print(f"nothing to write: {chosen.to} has nothing to say of this precision, and {chosen.out} is left alone")
    elif chosen.out is not None:
        print(f"wrote {chosen.out}")
    else:
        sys.stderr.flush()
        print(text, end="" if text.endswith("\n") else "\n")


def _context(words: list[str]) -> dict[str, Any]:
    import yaml

    given: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise RunConfigError(f"--context: must be KEY=VALUE, got {word!r}. Write nemo_version=1.23, say.")
        if key in given:
            raise RunConfigError(
                f"--context: {key} must be given once, got it again as {value!r}. Keep one of the two."
            )
        try:
            parsed = yaml.safe_load(value)
        except yaml.YAMLError:
            parsed = value
        given[key] = (
            value if key.endswith("version") or not isinstance(parsed, bool | int | float | dict | list) else parsed
        )
    return given


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunConfigError(f"--out: {path!r} cannot be written: {error.strerror}. Choose another path.") from None


def _told(one: Run, exported: ExportReport | None) -> dict[str, Any]:
    from bridge.interop.conversion import plain, records

    imported = one.imported
    outward = records(exported.unmapped, "export") if exported is not None else []
    config = imported.config.to_dict()
    return {
        "source": one.source,
        "semantics": imported.semantics,
        "config": plain(config),
        "payload": plain(exported.payload if exported is not None else config),
        "losses": records(imported.unmapped, "import") + outward,
        "faults": [str(fault) for fault in imported.config.faults()],
    }


def _lines(one: Run, exported: ExportReport | None, to: str) -> list[str]:
    """Return the report of one run."""
    from bridge.interop.contract import SEMANTICS

    source, imported = one.source, one.imported
    lines = [f"{source['path']}: {one.system.title}; it {one.evidence}."]
    if source["run"]:
        lines.append(f"run: {source['run']}")
    said = ", ".join(f"{name}={value}" for name, value in imported.config.to_dict().items())
    lines.append(f"recipe: {imported.recipe or 'none of the registered ones'} ({said or 'nothing stated'})")
    lines.append(f"semantics: {imported.semantics}: {SEMANTICS[imported.semantics]}")
    lines += _losses(imported.unmapped, "did not come over as it stands")
    if exported is not None:
        lines += _losses(exported.unmapped, f"cannot be said to {to} as it stands")
    return lines


def _losses(losses: tuple[Unmapped, ...], what: str) -> list[str]:
    if not losses:
        return []
    return [f"{len(losses)} {what}:", *(f"  {loss}" for loss in losses)]
