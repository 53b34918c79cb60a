"""Answers about a run that has not begun: each with the decisive findings and notes on its file.

A finding is decisive if it is an error, or about an override of the command line.
"""

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
    from bridge.precision.precision_config import PrecisionConfig
    from bridge.preflight.run import Run
    from bridge.rules.rule import RuleFinding


def plan_run(run: Run, precision: PrecisionConfig | None = None) -> PrecisionPlan:
    """Return the precision plan of a run, or of the same run in another precision.

    The plan does not depend on the number of GPUs. So a run with too few GPUs has a plan too.
    """
    from bridge.plan.precision_plan import make_plan

    prediction = run.prediction
    if precision is not None:
        prediction = prediction.with_precision(precision)
    return make_plan(prediction)


def collect_decisive_findings(run: Run) -> list[RuleFinding]:
    """Return the decisive findings of a run's check: errors, and findings about overrides."""
    from bridge.precision.stated_field import COMMAND_LINE
    from bridge.preflight.rule_check import get_report

    decisive = []
    for finding in get_report(run).findings:
        if finding.severity == "error" or finding.where == COMMAND_LINE:
            decisive.append(finding)
    return decisive


def compute_exit_code(run: Run) -> int:
    """Return the exit code of an answer about a run: 2 if its check has an error, else 0."""
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
    make_content: Callable[[Run], Mapping[str, Any]],
    print_text: Callable[[Run], None],
) -> int:
    """Print the answers about a run and its other branches, as JSON or as text.

    A branch whose mode is not stated has the refusal instead of its answer.

    Args:
        args: The parsed command line.
        make_content: Returns the answer about a run as plain data.
        print_text: Prints the answer about a run as text.

    Returns:
        The largest exit code of the answered branches. If all branches are refused, the exit code
        of a refusal.
    """
    answers: list[dict[str, Any]] = []
    codes: list[int] = []
    refused_codes: list[int] = []
    runs = read_branches(args)
    for run in runs:
        if len(runs) > 1 and not args.json:
            print_branch_title(run)
        try:
            run.require_mode()
            if args.json:
                answers.append(checked_answer_to_dict(run, make_content(run)))
            else:
                print_text(run)
            codes.append(compute_exit_code(run))
        except RunConfigError as error:
            if len(runs) == 1:
                raise
            refused_codes.append(error.exit_code)
            answers.append(answer_to_dict(run, {"refused": str(error)}))
            if not args.json:
                print(f"  {error}")
    if args.json:
        print_branches_json(answers)
    return max(codes or refused_codes)


def print_branches_json(answers: list[dict[str, Any]]) -> None:
    """Print the answers about a run and its other branches as one JSON document.

    The answers about the other branches are below `branches` of the first.
    """
    first, *branches = answers
    content = first
    if branches:
        content = {**first, "branches": branches}
    print_json(content)


def answer_to_dict(run: Run, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer about a run as plain data, with the notes on its file."""
    return {**content, "read": run.reading.to_dict()}


def checked_answer_to_dict(run: Run, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer about a run as plain data, with the decisive findings of its check."""
    from bridge.report.findings import finding_to_dict

    findings = list(map(finding_to_dict, collect_decisive_findings(run)))
    return answer_to_dict(run, {**content, "check": findings})


def print_checked_json(run: Run, content: Mapping[str, Any]) -> None:
    """Print an answer about a run as JSON, with the decisive findings of its check."""
    print_json(checked_answer_to_dict(run, content))


def print_branch_title(run: Run) -> None:
    """Print the number and the label of the run that the next answer is about."""
    print(f"run {run.reading.launches.number}: {run.reading.launches.label}")


def print_check_notes(run: Run, shown: Collection[str] = ()) -> None:
    """Print the decisive findings of a run's check and the notes on its file, a line for each.

    Args:
        shown: Ids of the rules whose findings are already in the answer.
    """
    for finding in collect_decisive_findings(run):
        if finding.id not in shown:
            print(f"  {finding.severity} {finding.id} {finding}")
    print_reading(run)


def print_assumptions(unknown: Mapping[str, str]) -> None:
    """Print the settings that an answer assumes, since nothing states them.

    Args:
        unknown: Setting -> the source that decides it.
    """
    if unknown:
        from bridge.rules.unknown_settings import format_deciders, format_unknown_settings

        deciders = format_deciders(unknown)
        settings = format_unknown_settings(unknown)
        print(f"  Rests on values that nothing states: {settings}; {deciders} may set them.")


def print_reading(run: Run) -> None:
    """Print the notes on a run's file and its release, a sentence on each line."""
    for line in run.reading.lines:
        print(f"  {line}")
    if run.reading.uncertainty.mode_decider is not None:
        print(f"  The mode is not stated. {'; or '.join(run.mode_remedies)}.")
