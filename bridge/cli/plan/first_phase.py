"""`plan_first_phase`: the plan of a run for the forms of `plan` that show one plan only."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from bridge.cli.run_answer import plan_run

if TYPE_CHECKING:
    from bridge.plan.precision_plan import PrecisionPlan
    from bridge.preflight.run import Run


def plan_first_phase(run: Run) -> PrecisionPlan:
    """Return the plan of a run, or of the first phase if the run has a precision schedule.

    In the second case a line on stderr names the phase. Standard output has only the answer.
    """
    plan = plan_run(run)
    if len(run.phases) > 1:
        print("Phase 1 of the precision schedule.", file=sys.stderr)
    return plan
