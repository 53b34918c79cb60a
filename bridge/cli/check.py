"""`precision-bridge check [OVERRIDES]`: everything known to go wrong with a run, before a GPU is held."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.run_values import add_run_arguments, read_run, write_file
from bridge.errors import RunConfigError

if TYPE_CHECKING:
    import argparse

    from bridge.preflight.check import Report

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("check", help="report what is known to go wrong with a run, without running it")
    add_run_arguments(parser)
    parser.add_argument("--backend", choices=("te", "emulated"), help="what runs FP8 and FP4 matrix multiplications")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where there are warnings")
    parser.add_argument("--silence", action="append", default=[], metavar="RULE=REASON", help="leave a rule out")
    parser.add_argument("--quiet", action="store_true", help="leave out what is for information only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--sarif", metavar="FILE", help="also write SARIF 2.1.0, for code review")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    """Print every finding; return 2 with errors, 1 with warnings under --strict, else 0."""
    from bridge.preflight.run_check import check_run

    silenced = dict(_reason(word) for word in chosen.silence)
    values = read_run(chosen, strict=False)
    report = check_run(
        {**values.sections, "mixed_precision": values.precision},
        target=None,
        silenced=silenced,
        backend=chosen.backend,
        origins=values.origin_of,
        choice=values.choice,
    )
    if chosen.sarif:
        _write_sarif(report, chosen)
    if chosen.json:
        from bridge.report.findings import findings_dict

        print(json.dumps(findings_dict(report, strict=chosen.strict), indent=2))
    else:
        _print(report, is_quiet=chosen.quiet)
    return report.exit_code(strict=chosen.strict)


def _print(report: Report, *, is_quiet: bool) -> None:
    from bridge.report.findings import findings_text, render_findings

    if sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(findings_text(report, is_quiet=is_quiet))
    else:
        print(render_findings(report, is_quiet=is_quiet), end="")


def _reason(word: str) -> tuple[str, str]:
    name, _, reason = word.partition("=")
    if not reason.strip():
        raise RunConfigError(f"--silence: needs a reason, got {word!r}. Write {name or 'PB306'}=why it is all right.")
    return name.strip(), reason.strip()


def _write_sarif(report: Report, chosen: argparse.Namespace) -> None:
    from importlib.metadata import version

    from bridge.front.loader import config_folder
    from bridge.report.sarif import sarif

    file = Path(chosen.config) if chosen.config else config_folder(chosen.config_path) / f"{chosen.config_name}.yaml"
    with contextlib.suppress(ValueError):
        file = file.resolve().relative_to(Path.cwd())
    log = sarif(report, file=file.as_posix(), version=version("precision-bridge"))
    write_file(chosen.sarif, json.dumps(log, indent=2) + "\n", "--sarif")
