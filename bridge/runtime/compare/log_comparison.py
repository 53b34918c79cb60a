"""`compare_logs`: the comparison of runs that are known only by their logs.

The folder of a run of this project has every field, and so proves that the run is the twin of
another run. A log has losses, and perhaps arguments. So a comparison of logs has notes about the
equal arguments, about the steps at which the losses were compared, and about the facts that no log
has.
"""

from collections.abc import Sequence
from dataclasses import replace

from bridge.runtime.compare.comparison import Comparison, RecipeRow, compare_arms
from bridge.runtime.compare.gap import DEFAULT_GATE
from bridge.runtime.compare.log_notes import make_log_notes
from bridge.runtime.compare.logged_run import IDENTITY_KEYS, LoggedRun, make_log_arms

LOG_INTERVAL_FLAG = "--log-interval"
"""Megatron-LM's setting that decides how often a loss is printed."""
POLICY_LOSS_REASON = (
    "The loss of a policy gradient need not fall, and its gap is no measure of the policy. "
    "Compare the rewards."
)
"""The reason why the loss of a policy is not judged."""


def compare_logs(runs: Sequence[LoggedRun], *, gate: float = DEFAULT_GATE) -> Comparison:
    """Return the comparison of logs. The first log is the baseline.

    Logs of equal precision and different seeds are one recipe. If a seed is unknown, each log is a
    separate recipe.
    """
    arms = make_log_arms(runs)
    comparison = compare_arms(arms, gate=gate, interval_setting=LOG_INTERVAL_FLAG)[0]
    rows = []
    for row in comparison.rows:
        rows.append(_adapt_row(row, runs))
    notes = make_log_notes(runs, comparison, rows, gate=gate)
    return replace(comparison, rows=tuple(rows), notes=tuple(notes))


def _adapt_row(row: RecipeRow, runs: Sequence[LoggedRun]) -> RecipeRow:
    """Return a row as it is shown, without keys that are not fields and a policy's verdict."""
    differs_in = []
    for name in row.differs_in:
        if name not in IDENTITY_KEYS:
            differs_in.append(name)
    gap = row.gap
    is_policy = any(run.log.is_policy for run in runs)
    # A gap without a window has a loss that is not finite. It is outside for a policy too.
    if is_policy and gap is not None and gap.window is not None:
        gap = replace(gap, verdict="cannot tell", reason=POLICY_LOSS_REASON)
    return replace(row, differs_in=tuple(differs_in), gap=gap)
