"""`precision-bridge check [FILE ...] [OVERRIDES]`: the known faults of a run.

`precision-bridge check train.sh` has these stages. The input of each stage is the output of the
stage before:

    path, RunChoice     -> FileReading    read/run_file.py            the file, by its framework's reader
    FileReading         -> ConfigFile     front/config_file.py        overrides, and values set at start
    ConfigFile          -> RunInput       front/config_file.py        sections, and the origin of each value
    RunInput            -> Run            front/loader.py             `auto` resolved, fields stated
    Run                 -> Prediction     sync/prediction.py          every owner's values after the sync
    Prediction          -> CheckContext   preflight/check_context.py  the facts that rules read
    CheckContext        -> Report         preflight/rule_check.py     the findings of every rule
    Report              -> text, JSON     report/findings.py          the output of this command

"The path of a check" in docs/explain/architecture.md has the files of each stage.

A script may start the same launch on several branches. Then each branch has a `Run` and a `Report`.
For several files, or a folder, the command prints a line for each run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.many_runs import (
    RunAnswer,
    add_brief_option,
    answer_many_runs,
    format_precision,
    get_many_paths,
    precision_to_dict,
)
from bridge.cli.output import print_report, write_file
from bridge.cli.parser import add_json_option
from bridge.cli.run_answer import (
    answer_to_dict,
    print_branch_title,
    print_branches_json,
    print_reading,
)
from bridge.cli.run_arguments import (
    add_debug_features_option,
    add_run_arguments,
    get_file_argument,
    read_branches,
)

if TYPE_CHECKING:
    from bridge.preflight.rule_check import Report
    from bridge.preflight.run import Run
    from bridge.report.findings import Line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_run_arguments(parser)
    add_debug_features_option(parser)
    add_brief_option(parser)
    add_json_option(parser)
    parser.add_argument(
        "--backend", choices=("te", "emulated"), help="what runs FP8 and FP4 matrix multiplications"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 if there are warnings")
    parser.add_argument(
        "--silence", action="append", default=[], metavar="RULE=REASON", help="leave a rule out"
    )
    parser.add_argument(
        "--quiet", action="store_true", help="leave out what is for information only"
    )
    parser.add_argument("--sarif", metavar="FILE", help="also write SARIF 2.1.0, for code review")


def run(args: argparse.Namespace) -> int:
    """Print the findings of a run, or of several.

    Returns:
        2 with errors, 1 with warnings under ``--strict``, else 0.
    """
    from bridge.preflight.rule_check import check
    from bridge.preflight.silence import parse_silence_option

    silenced = dict(map(parse_silence_option, args.silence))
    paths = get_many_paths(args)
    if paths:
        return _check_many(args, paths, silenced)
    runs = read_branches(args, strict=False)
    reports = [check(run, silenced=silenced, backend=args.backend) for run in runs]
    if args.sarif:
        from bridge.report.sarif import make_sarif

        file = _make_relative(_get_main_file(args))
        _write_sarif(args.sarif, make_sarif(reports, file=file, version=_get_version()))
    if args.json:
        _print_json(runs, reports, args)
    else:
        _print_text(runs, reports, args)
    return max(report.exit_code(strict=args.strict) for report in reports)


def _print_json(runs: Sequence[Run], reports: Sequence[Report], args: argparse.Namespace) -> None:
    """Print the report as JSON, with the reports of other branches below `branches`."""
    from bridge.report.findings import report_to_dict

    answers = []
    for run, report in zip(runs, reports, strict=True):
        answers.append(answer_to_dict(run, report_to_dict(report, strict=args.strict)))
    print_branches_json(answers)


def _print_text(runs: Sequence[Run], reports: Sequence[Report], args: argparse.Namespace) -> None:
    """Print the report of each run as text."""
    from bridge.report.findings import format_findings

    for run, report in zip(runs, reports, strict=True):
        if len(runs) > 1:
            print_branch_title(run)
        _print_lines(format_findings(report, is_quiet=args.quiet))
        print_reading(run)


def _print_lines(lines: Sequence[Line]) -> None:
    """Print lines, with styles if the output is a terminal."""
    if not (sys.stdout.isatty() or "FORCE_COLOR" in os.environ):
        plain = []
        for line in lines:
            plain.append("".join(part for part, _ in line))
        print("\n".join(plain))
        return
    from rich.console import Group  # heavy
    from rich.text import Text

    styled = [Text.assemble(*line) for line in lines]
    print_report(Group(*styled))


def _check_many(args: argparse.Namespace, paths: Sequence[str], silenced: dict[str, str]) -> int:
    """Print a line for each run of some files, and return the largest exit code."""
    from bridge.preflight.rule_check import check
    from bridge.report.findings import format_brief, report_to_dict
    from bridge.report.sarif import make_sarif_of_files

    checked: list[tuple[str, Report]] = []

    def answer_run(run: Run) -> RunAnswer:
        """Check a run, keep its report for SARIF, and return the answer about it."""
        report = check(run, silenced=silenced, backend=args.backend)
        checked.append((_make_relative(Path(run.name)), report))
        content = {
            **precision_to_dict(report.context),
            **report_to_dict(report, strict=args.strict),
        }
        summary = f"{format_precision(report.context)}; {format_brief(report)}"
        return RunAnswer(text=summary, content=content, code=report.exit_code(strict=args.strict))

    code = answer_many_runs(args, paths, answer_run)
    if args.sarif:
        _write_sarif(args.sarif, make_sarif_of_files(checked, version=_get_version()))
    return code


def _get_main_file(args: argparse.Namespace) -> Path:
    """Return the file that the command line names, or else the primary config of the tree."""
    from bridge.front.folders import find_config_folder

    file = get_file_argument(args)
    if file is not None:
        return Path(file)
    return find_config_folder(args.config_path) / f"{args.config_name}.yaml"


def _make_relative(file: Path) -> str:
    """Return the path of a file as code review names it.

    The path is relative to the working directory if the file is below that directory.
    """
    with contextlib.suppress(ValueError):
        file = file.resolve().relative_to(Path.cwd())
    return file.as_posix()


def _write_sarif(path: str, log: dict[str, Any]) -> None:
    """Write the file of ``--sarif``."""
    write_file(path, json.dumps(log, indent=2) + "\n", "--sarif")


def _get_version() -> str:
    """Return the version of this package."""
    from importlib.metadata import version

    return version("precision-bridge")
