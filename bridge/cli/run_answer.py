"""Answers that foresee a run: with the decisive findings of its check, and notes on its file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from bridge.cli.output import print_json, print_report
from bridge.cli.run_arguments import read_branches
from bridge.errors import RunConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.precision.config import PrecisionConfig
    from bridge.preflight.run import Run
    from bridge.rules.rule import RuleFinding


def plan_run(run: Run, precision: PrecisionConfig | None = None) -> PrecisionPlan:
    """Return the precision plan of a run, or of the same run in another precision.

    The number of its GPUs does not matter.
    """
    from bridge.plan.precision_plan import make_plan

    prediction = run.prediction
    if precision is not None:
        prediction = prediction.with_precision(precision)
    return make_plan(prediction)


def collect_decisive_findings(run: Run) -> list[RuleFinding]:
    """Return the findings that every answer about a run has: errors, and those of overrides."""
    from bridge.precision.fields import COMMAND_LINE
    from bridge.preflight.check import get_report

    decisive = []
    for finding in get_report(run).findings:
        if finding.severity == "error" or finding.where == COMMAND_LINE:
            decisive.append(finding)
    return decisive


def compute_exit_code(run: Run) -> int:
    """Return the exit code of an answer with decisive findings: 2 with an error, else 0."""
    if any(finding.severity == "error" for finding in collect_decisive_findings(run)):
        return 2
    return 0


def answer_run(args: argparse.Namespace, run: Run, content: Any, table: RenderableType) -> int:
    """Print an answer about one run as JSON or as a table, and return the exit code."""
    if args.json:
        print_checked_json(run, content)
    else:
        print_report(table)
        print_check_notes(run)
    return compute_exit_code(run)


def answer_branches(
    args: argparse.Namespace,
    answer_of: Callable[[Run], Mapping[str, Any]],
    show_run: Callable[[Run], None],
) -> int:
    """Print the answer about a run and about its other branches, and return the exit code.

    The answer is JSON, or a text for people.

    A branch whose mode is not stated has the refusal in the place of its answer. The other branches
    stand below `branches` in the JSON of the first.
    """
    answers, codes = [], [0]
    runs = read_branches(args)
    for run in runs:
        if len(runs) > 1 and not args.json:
            print_branch_title(run)
        try:
            run.require_mode()
            if args.json:
                answers.append(checked_answer_to_dict(run, answer_of(run)))
            else:
                show_run(run)
            codes.append(compute_exit_code(run))
        except RunConfigError as error:
            if len(runs) == 1:
                raise
            answers.append(answer_to_dict(run, {"refused": str(error)}))
            if not args.json:
                print(f"  {error}")
    if args.json:
        print_branches_json(answers)
    return max(codes)


def print_branches_json(answers: list[dict[str, Any]]) -> None:
    """Print the answers about a run and about its other branches as JSON.

    The other branches stand below `branches`.
    """
    first, *branches = answers
    content = first
    if branches:
        content = {**first, "branches": branches}
    print_json(content)


def answer_to_dict(run: Run, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer about a run as plain data, with the notes on its file and its release."""
    return {**content, "read": run.reading.to_dict()}


def checked_answer_to_dict(run: Run, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer that foresees a run as plain data, with the decisive findings."""
    from bridge.report.findings import finding_to_dict

    findings = list(map(finding_to_dict, collect_decisive_findings(run)))
    return answer_to_dict(run, {**content, "check": findings})


def print_checked_json(run: Run, content: Mapping[str, Any]) -> None:
    """Print an answer that foresees a run as JSON, with the decisive findings of its check too."""
    print_json(checked_answer_to_dict(run, content))


def print_branch_title(run: Run) -> None:
    """Print which run of its file the following answer is about."""
    print(f"run {run.reading.number}: {run.reading.runs[run.reading.number - 1]}")


def print_check_notes(run: Run, shown: Collection[str] = ()) -> None:
    """Print the decisive findings of a run's check and the notes on its file, a line for each.

    Findings of the rules `shown` stand in the answer already.
    """
    for finding in collect_decisive_findings(run):
        if finding.id not in shown:
            print(f"  {finding.severity} {finding.id} {finding}")
    print_reading(run)


def print_assumptions(unknown: Mapping[str, str]) -> None:
    """Print the settings that an answer rests on and that nothing states.

    Nothing where all of them are known.
    """
    if unknown:
        from bridge.rules.unknown_settings import format_deciders, format_unknown_settings

        deciders = format_deciders(unknown)
        settings = format_unknown_settings(unknown)
        print(f"  Rests on values that nothing states: {settings}; {deciders} may set them.")


def print_reading(run: Run) -> None:
    """Print what has to be said of a run's file and its release, a sentence on each line."""
    for line in run.reading.lines:
        print(f"  {line}")
    if run.reading.mode_decided_by is not None:
        print(f"  The mode is not stated. {'; or '.join(run.mode_remedies)}.")
