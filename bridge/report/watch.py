"""A run in progress on a terminal: how far it is, its last figures, and the early warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from bridge.audit.early_warnings import Signs, early_warnings
from bridge.report.table import Column, table

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rich.console import RenderableType

    from bridge.audit.run_folder import RunFolder

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40
"""Characters of a curve."""


def watch_view(run: RunFolder, *, silenced: Collection[str] = ()) -> RenderableType:
    """Return the state of a run.

    Args:
        run: Its folder; the run may go on, have ended or not have taken a step.
        silenced: Names of warnings that are left out.
    """
    train, validation = run.metrics("train"), run.metrics("validation")
    steps = run.config.get("train", {}).get("train_iters")
    rows = [("step", f"{train[-1]['step'] if train else 0} of {steps}")]
    if train:
        last = train[-1]
        rows += [
            ("loss", f"{_number(last['loss'])}  {curve([one['loss'] for one in train])}"),
            ("loss scale", f"{last['loss_scale']:g}"),
            ("gradient norm", _number(last["grad_norm"])),
            ("tokens/s", f"{last['tokens_per_second']:,.0f}"),
            ("skipped steps", str(last["skipped_steps"])),
        ]
    if validation:
        rows.append(("validation loss", f"{_number(validation[-1]['loss'])}, step {validation[-1]['step']}"))
    rows += [("findings of the check", str(len(run.findings.get("findings", ()))))]
    rows += [("ended", run.summary.get("failure") or "yes")] if run.summary else []
    warnings = [
        Text(f"{name}: {sentence}", style="yellow")
        for name, sentence in early_warnings(Signs.of(run, silenced=silenced))
    ]
    title = f"{run.findings.get('precision') or run.path.name}: {run.path}"
    return Group(table(("", Column(wraps=True)), rows, title=title), *warnings)


def curve(values: Sequence[float | None]) -> str:
    """Return values as a line of bars, the lowest and highest of them at its ends; None leaves a gap."""
    count = min(WIDTH, len(values))
    picked = [values[(index * (len(values) - 1)) // max(1, count - 1)] for index in range(count)]
    known = [value for value in picked if value is not None]
    low, span = min(known, default=0), max(known, default=0) - min(known, default=0)
    bars = ("·" if value is None else BARS[round((value - low) / span * 7) if span else 0] for value in picked)
    return "".join(bars)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
