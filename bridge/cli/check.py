"""`precision-bridge check [OVERRIDES]`: everything known to go wrong with a run, before a GPU is held.

`precision-bridge support-matrix` shows which recipe runs on which GPU, with which CUDA and Transformer Engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.arguments import (
    add_command,
    add_run_command,
    answer,
    answer_dict,
    print_branch,
    print_json,
    read_branches,
    show,
    show_reading,
    write_file,
)
from bridge.errors import RunConfigError
from bridge.registry.registry import REGISTRY

if TYPE_CHECKING:
    from bridge.front.loader import RunValues
    from bridge.preflight.auto import Support
    from bridge.preflight.check import Report
    from bridge.report.findings import Line

TITLES = {"te": "TE", "cuda": "CUDA"}
WORDS = {"native": "yes", "emulated": "emulated", "unknown": "?", "no": "no"}


def add_parsers(commands: Any) -> None:
    """Add the commands."""
    parser = add_run_command(
        commands, "check", _check, "report what is known to go wrong with a run, without running it"
    )
    parser.add_argument("--backend", choices=("te", "emulated"), help="what runs FP8 and FP4 matrix multiplications")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where there are warnings")
    parser.add_argument("--silence", action="append", default=[], metavar="RULE=REASON", help="leave a rule out")
    parser.add_argument("--quiet", action="store_true", help="leave out what is for information only")
    parser.add_argument("--sarif", metavar="FILE", help="also write SARIF 2.1.0, for code review")
    text = "show which recipe runs on which GPU, with which CUDA and TE"
    parser = add_command(commands, "support-matrix", _support_matrix, text)
    parser.add_argument("--target", help="one target only (h100x8,te2.8,cuda12.9), with the reasons")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")


def _check(chosen: argparse.Namespace) -> int:
    """Print every finding; return 2 with errors, 1 with warnings under --strict, else 0."""
    silenced = dict(_reason(word) for word in chosen.silence)
    runs = read_branches(chosen, strict=False)
    reports = [run.checked(run.prediction, silenced=silenced, backend=chosen.backend) for run in runs]
    if chosen.sarif:
        _write_sarif(reports, chosen)
    if chosen.json:
        _print_json(runs, reports, chosen)
    else:
        _print(runs, reports, chosen)
    return max(report.exit_code(strict=chosen.strict) for report in reports)


def _print_json(runs: Sequence[RunValues], reports: Sequence[Report], chosen: argparse.Namespace) -> None:
    """Print the answer as JSON; the same launch on other branches stands below `branches`."""
    from bridge.report.findings import findings_dict

    answers = [
        answer_dict(run, findings_dict(report, strict=chosen.strict)) for run, report in zip(runs, reports, strict=True)
    ]
    first, *branches = answers
    print_json({**first, "branches": branches} if branches else first)


def _print(runs: Sequence[RunValues], reports: Sequence[Report], chosen: argparse.Namespace) -> None:
    """Print the answer for people, one run after the other."""
    from bridge.report.findings import findings_lines

    for run, report in zip(runs, reports, strict=True):
        if len(runs) > 1:
            print_branch(run)
        _show(findings_lines(report, is_quiet=chosen.quiet))
        show_reading(run)


def _show(lines: Sequence[Line]) -> None:
    """Print lines: with styles on a terminal, as they are into a file or a pipe."""
    if not (sys.stdout.isatty() or "FORCE_COLOR" in os.environ):
        print("\n".join("".join(text for text, _ in line) for line in lines))
        return
    from rich.console import Group  # heavy
    from rich.text import Text

    show(Group(*(Text.assemble(*line) for line in lines)))


def _reason(word: str) -> tuple[str, str]:
    name, _, reason = word.partition("=")
    if not reason.strip():
        raise RunConfigError(f"--silence: needs a reason, got {word!r}. Write {name or 'PB306'}=why it is all right.")
    return name.strip(), reason.strip()


def _write_sarif(reports: Sequence[Report], chosen: argparse.Namespace) -> None:
    from importlib.metadata import version

    from bridge.front.loader import config_folder
    from bridge.report.findings import sarif

    file = Path(chosen.config) if chosen.config else config_folder(chosen.config_path) / f"{chosen.config_name}.yaml"
    with contextlib.suppress(ValueError):
        file = file.resolve().relative_to(Path.cwd())
    log = sarif(reports, file=file.as_posix(), version=version("precision-bridge"))
    write_file(chosen.sarif, json.dumps(log, indent=2) + "\n", "--sarif")


def _support_matrix(chosen: argparse.Namespace) -> None:
    from bridge.preflight.auto import matrix, support
    from bridge.target.target import parse_target

    if chosen.json and chosen.markdown:
        raise RunConfigError("--json: not allowed together with --markdown, got both. Give one.")
    if chosen.target:
        target = parse_target(chosen.target)
        found = {name: support(name, target) for name in REGISTRY.names()}
        content: Any = {"target": str(target), "recipes": {name: _plain(one) for name, one in found.items()}}
        rows = [{"recipe": name, str(target): _cell(one), "why": one.reason} for name, one in found.items()]
    else:
        whole = matrix(REGISTRY.names())
        content = {name: {column: _plain(one) for column, one in row.items()} for name, row in whole.items()}
        rows = support_rows(whole)
    from bridge.report.table import markdown, table  # rich is heavy

    if chosen.markdown:
        print(markdown(rows))
        return
    answer(chosen, content, table(rows, wraps=("why",)))


def support_rows(whole: Mapping[str, Mapping[str, Support]]) -> list[dict[str, str]]:
    """Return the rows of the matrix: the recipe, and the words of a cell for each target."""
    return [{"recipe": name, **{column: _cell(one) for column, one in row.items()}} for name, row in whole.items()]


def _cell(found: Support) -> str:
    """Return what a cell says: yes, no, emulated, or the versions that it takes."""
    needs = " ".join(f"{TITLES[product]} {least}" for product, least in found.needs)
    if found.verdict == "emulated" and needs:
        return f"emulated, {needs}"
    return needs if found.verdict == "unknown" and needs else WORDS[found.verdict]


def _plain(found: Support) -> dict[str, Any]:
    return {"verdict": found.verdict, "reason": found.reason, "needs": dict(found.needs)}
