"""Answers that foresee a run: with the decisive findings of its check, and what has to be said of its file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from bridge.cli.output import print_json, show
from bridge.cli.run_arguments import read_branches
from bridge.errors import RunConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.precision.config import PrecisionConfig
    from bridge.preflight.run import Run
    from bridge.rules.rule import RuleFinding


def plan_of(run: Run, precision: PrecisionConfig | None = None) -> PrecisionPlan:
    """Return the precision plan of a run, or of the same run in another precision, whatever the number of its GPUs."""
    from bridge.plan.precision_plan import plan_of

    return plan_of(run.prediction if precision is None else run.prediction.under(precision))


def decisive_findings(run: Run) -> list[RuleFinding]:
    """Return the findings of the check that every answer about a run has: errors, and those of overrides."""
    from bridge.precision.fields import COMMAND_LINE
    from bridge.preflight.check import report_of

    return [
        one
        for one in report_of(run).findings
        if one.severity == "error" or one.where == COMMAND_LINE
    ]


def planned_code(run: Run) -> int:
    """Return the exit code of an answer that shows a run's decisive findings: 2 with an error, as `check`, else 0."""
    if any(one.severity == "error" for one in decisive_findings(run)):
        return 2
    return 0


def answer_planned(
    chosen: argparse.Namespace, run: Run, content: Any, table: RenderableType
) -> int:
    """Print an answer about one run as JSON or as a table, and return the exit code."""
    if chosen.json:
        print_planned(run, content)
    else:
        show(table)
        show_planned(run)
    return planned_code(run)


def answer_runs(
    chosen: argparse.Namespace,
    answer_of: Callable[[Run], Mapping[str, Any]],
    show_run: Callable[[Run], None],
) -> int:
    """Print the answer about a run and about its other branches, as JSON or for people, and return the exit code.

    A branch whose mode is not stated has the refusal in the place of its answer. The other branches stand below
    `branches` in the JSON of the first.
    """
    answers, codes = [], [0]
    runs = read_branches(chosen)
    for run in runs:
        if len(runs) > 1 and not chosen.json:
            print_branch(run)
        try:
            run.require_mode()
            if chosen.json:
                answers.append(planned_dict(run, answer_of(run)))
            else:
                show_run(run)
            codes.append(planned_code(run))
        except RunConfigError as error:
            if len(runs) == 1:
                raise
            answers.append(answer_dict(run, {"refused": str(error)}))
            if not chosen.json:
                print(f"  {error}")
    if chosen.json:
        print_first(answers)
    return max(codes)


def print_first(answers: list[dict[str, Any]]) -> None:
    """Print the answers about a run and about its other branches as JSON: these stand below `branches`."""
    first, *branches = answers
    print_json({**first, "branches": branches} if branches else first)


def answer_dict(run: Run, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer about a run as plain data, with what has to be said of its file and its release."""
    return {**content, "read": run.reading.to_dict()}


def planned_dict(run: Run, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer that foresees a run as plain data, with the decisive findings of its check too."""
    from bridge.report.findings import finding_dict

    return answer_dict(
        run, {**content, "check": [finding_dict(one) for one in decisive_findings(run)]}
    )


def print_planned(run: Run, content: Mapping[str, Any]) -> None:
    """Print an answer that foresees a run as JSON, with the decisive findings of its check too."""
    print_json(planned_dict(run, content))


def print_branch(run: Run) -> None:
    """Print which run of its file the following answer is about."""
    print(f"run {run.reading.number}: {run.reading.runs[run.reading.number - 1]}")


def show_planned(run: Run, shown: Collection[str] = ()) -> None:
    """Print the decisive findings of a run's check, and what has to be said of its file, a sentence on each line.

    Findings of the rules `shown` stand in the answer already.
    """
    for one in decisive_findings(run):
        if one.id not in shown:
            print(f"  {one.severity} {one.id} {one}")
    show_reading(run)


def show_assumed(unknown: Mapping[str, str]) -> None:
    """Print the settings that an answer rests on and that nothing states; nothing where all of them are known."""
    if unknown:
        from bridge.rules.unknown import deciders_text, settings_text

        deciders = deciders_text(unknown)
        print(
            f"  Rests on values that nothing states: {settings_text(unknown)}; {deciders} may set them."
        )


def show_reading(run: Run) -> None:
    """Print what has to be said of a run's file and its release, a sentence on each line."""
    for line in run.reading.lines:
        print(f"  {line}")
    if run.reading.mode_decided_by is not None:
        print(f"  The mode is not stated. {'; or '.join(run.ways_to_state_the_mode)}.")
