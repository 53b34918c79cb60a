"""`compare_logs`: runs that logs show, judged as runs of our own are, and what stays unknown of them.

A run of our own proves that it is the twin of another: its folder has every field. A log has its
losses, and perhaps arguments. So a comparison of logs says first which arguments are equal, at
which steps the losses were compared, and what no log has.
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
"""Why a loss is not judged."""


def compare_logs(runs: Sequence[LoggedRun], *, gate: float = DEFAULT_GATE) -> Comparison:
    """Return the comparison of logs; the first one is of the baseline.

    Logs of equal precision and of different seeds are of one recipe. Where a seed is unknown, each
    log is a recipe by itself.
    """
    arms = make_log_arms(runs)
    comparison = compare_arms(arms, gate=gate, interval_setting=LOG_INTERVAL_FLAG)[0]
    rows = []
    for row in comparison.rows:
        rows.append(_adapt_row(row, runs))
    notes = make_log_notes(runs, comparison, rows, gate=gate)
    return replace(comparison, rows=tuple(rows), notes=tuple(notes))


def _adapt_row(row: RecipeRow, runs: Sequence[LoggedRun]) -> RecipeRow:
    """Return a row without the keys that are no fields; the loss of a policy is not judged."""
    differs_in = []
    for name in row.differs_in:
        if name not in IDENTITY_KEYS:
            differs_in.append(name)
    gap = row.gap
    is_policy = any(run.log.is_policy for run in runs)
    # A loss that is not finite has no window, and is outside for a policy too.
    if is_policy and gap is not None and gap.window is not None:
        gap = replace(gap, verdict="cannot tell", reason=POLICY_LOSS_REASON)
    return replace(row, differs_in=tuple(differs_in), gap=gap)
