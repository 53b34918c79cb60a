"""`precision-bridge check [FILE ...] [OVERRIDES]`: what is known to go wrong with a run."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.output import show, write_file
from bridge.cli.parser import add_json
from bridge.cli.planned_answer import answer_dict, print_branch, print_first, show_reading
from bridge.cli.run_arguments import add_debug_features, add_run_arguments, file_of, read_branches
from bridge.cli.several import (
    RunAnswer,
    add_several_arguments,
    answer_several,
    paths_of_several,
    precision_dict,
    precision_text,
)
from bridge.errors import RunConfigError

if TYPE_CHECKING:
    from bridge.preflight.check import Report
    from bridge.preflight.run import Run
    from bridge.report.findings import Line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_run_arguments(parser)
    add_debug_features(parser)
    add_several_arguments(parser)
    add_json(parser)
    parser.add_argument(
        "--backend", choices=("te", "emulated"), help="what runs FP8 and FP4 matrix multiplications"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 where there are warnings"
    )
    parser.add_argument(
        "--silence", action="append", default=[], metavar="RULE=REASON", help="leave a rule out"
    )
    parser.add_argument(
        "--quiet", action="store_true", help="leave out what is for information only"
    )
    parser.add_argument("--sarif", metavar="FILE", help="also write SARIF 2.1.0, for code review")


def run(args: argparse.Namespace) -> int:
    """Print every finding; return 2 with errors, 1 with warnings under --strict, else 0."""
    silenced = dict(map(_reason, args.silence))
    paths = paths_of_several(args)
    if paths:
        return _check_several(args, paths, silenced)
    from bridge.preflight.check import check

    runs = read_branches(args, strict=False)
    reports = [check(run, silenced=silenced, backend=args.backend) for run in runs]
    if args.sarif:
        from bridge.report.sarif import sarif

        _write(args.sarif, sarif(reports, file=_relative(_main_file(args)), version=_version()))
    if args.json:
        _print_json(runs, reports, args)
    else:
        _print(runs, reports, args)
    return max(report.exit_code(strict=args.strict) for report in reports)


def _print_json(runs: Sequence[Run], reports: Sequence[Report], args: argparse.Namespace) -> None:
    """Print the answer as JSON; the same launch on other branches stands below `branches`."""
    from bridge.report.findings import findings_dict

    answers = []
    for run, report in zip(runs, reports, strict=True):
        answers.append(answer_dict(run, findings_dict(report, strict=args.strict)))
    print_first(answers)


def _print(runs: Sequence[Run], reports: Sequence[Report], args: argparse.Namespace) -> None:
    """Print the answer for people, one run after the other."""
    from bridge.report.findings import findings_lines

    for run, report in zip(runs, reports, strict=True):
        if len(runs) > 1:
            print_branch(run)
        _show(findings_lines(report, is_quiet=args.quiet))
        show_reading(run)


def _show(lines: Sequence[Line]) -> None:
    """Print lines: with styles on a terminal, as they are into a file or a pipe."""
    if not (sys.stdout.isatty() or "FORCE_COLOR" in os.environ):
        plain = []
        for line in lines:
            plain.append("".join(text for text, _ in line))
        print("\n".join(plain))
        return
    from rich.console import Group  # heavy
    from rich.text import Text

    styled = [Text.assemble(*line) for line in lines]
    show(Group(*styled))


def _check_several(args: argparse.Namespace, paths: Sequence[str], silenced: dict[str, str]) -> int:
    """Print a line for each run of some files, and return the largest exit code."""
    from bridge.preflight.check import check
    from bridge.report.findings import brief_line, findings_dict
    from bridge.report.sarif import sarif_of_files

    checked: list[tuple[str, Report]] = []

    def answer_of(run: Run) -> RunAnswer:
        report = check(run, silenced=silenced, backend=args.backend)
        checked.append((_relative(Path(run.name)), report))
        content = {**precision_dict(report.context), **findings_dict(report, strict=args.strict)}
        text = f"{precision_text(report.context)}; {brief_line(report)}"
        return RunAnswer(text=text, content=content, code=report.exit_code(strict=args.strict))

    code = answer_several(args, paths, answer_of)
    if args.sarif:
        _write(args.sarif, sarif_of_files(checked, version=_version()))
    return code


def _reason(word: str) -> tuple[str, str]:
    name, _, reason = word.partition("=")
    if not reason.strip():
        raise RunConfigError(
            f"--silence: needs a reason, got {word!r}. Write {name or 'PB306'}=why it is all right."
        )
    return name.strip(), reason.strip()


def _main_file(args: argparse.Namespace) -> Path:
    """Return the file of the run: the one of the command line, or the tree's primary config."""
    from bridge.front.folders import config_folder

    file = file_of(args)
    if file is not None:
        return Path(file)
    return config_folder(args.config_path) / f"{args.config_name}.yaml"


def _relative(file: Path) -> str:
    """Return a file as code review names it: below the folder of this process, if it is there."""
    with contextlib.suppress(ValueError):
        file = file.resolve().relative_to(Path.cwd())
    return file.as_posix()


def _write(path: str, log: dict[str, Any]) -> None:
    write_file(path, json.dumps(log, indent=2) + "\n", "--sarif")


def _version() -> str:
    from importlib.metadata import version

    return version("precision-bridge")
