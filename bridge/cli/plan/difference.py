"""`precision-bridge plan --against NAME`: the plan of a run, compared with another plan."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING

from bridge.cli.output import print_answer
from bridge.cli.plan.first_phase import plan_first_phase
from bridge.cli.run_answer import plan_run
from bridge.cli.run_arguments import read_run, read_without_overrides

if TYPE_CHECKING:
    from bridge.plan.precision_plan import PrecisionPlan

YAML_SUFFIXES = (".yaml", ".yml")
"""Suffixes of an argument of ``--against`` that is a file. Other arguments are recipes."""


def print_difference(args: argparse.Namespace) -> None:
    """Print the differences between the plan of a run and another plan."""
    from bridge.report.plan.plan_difference import make_difference_table  # rich is heavy

    plan = plan_first_phase(read_run(args))
    other_plan = _plan_other_run(args)
    differences = plan.diff(other_plan)
    content = {
        "a": plan.label,
        "b": other_plan.label,
        "differences": list(map(asdict, differences)),
    }
    print_answer(args, content, make_difference_table(plan.label, other_plan.label, differences))


def _plan_other_run(args: argparse.Namespace) -> PrecisionPlan:
    """Return the plan of the YAML file of ``--against``, or of the same run in its recipe."""
    if args.against.endswith(YAML_SUFFIXES):
        return plan_run(read_without_overrides(args, args.against))
    return plan_run(read_run(args, recipe=args.against))
