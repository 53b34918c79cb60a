"""A run in progress on a terminal: how far it is, its last figures, and the early warnings."""

from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.report.table import cell, facts
from bridge.runtime.audit.early_warnings import Signs, early_warnings
from bridge.runtime.audit.quantisation import by_operand, last_measured
from bridge.runtime.audit.run_folder import RunFolder

Record = dict[str, Any]

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40
"""Characters of a curve."""


def watch_view(run: RunFolder, *, silenced: Collection[str] = ()) -> RenderableType:
    """Return the state of a run."""
    train, validation = run.metrics("train"), run.metrics("validation")
    iterations = run.config.get("train", {}).get("train_iters")
    step = 0
    if train:
        step = train[-1]["step"]
    rows = [("step", f"{step} of {iterations}")]
    if train:
        rows += _last_step(run, train)
    if validation:
        last = validation[-1]
        rows.append(("validation loss", f"{cell(last['loss'])}, step {last['step']}"))
    audit = _audit(run)
    rows += _quantisation(run)
    rows.append(("audit", audit))
    rows.append(("findings of the check", str(len(run.findings.get("findings", ())))))
    if run.summary:
        rows.append(("ended", run.summary.get("failure") or run.stopped or "yes"))
    title = f"{run.findings.get('precision') or run.path.name}: {run.path}"
    parts = [facts(rows, title=title)]
    for name, sentence in early_warnings(Signs.of(run, silenced=silenced)):
        parts.append(Text(f"{name}: {sentence}", style="yellow"))
    return Group(*parts)


def _last_step(run: RunFolder, train: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the figures of the last training step."""
    last = train[-1]
    losses = [record["loss"] for record in train]
    rows = [
        ("loss", f"{cell(last['loss'])}  {curve(losses)}"),
        ("loss scale", f"{last['loss_scale']:g}"),
        ("gradient norm", cell(last["grad_norm"])),
        ("tokens/s", f"{last['tokens_per_second']:,.0f}"),
    ]
    speed = last["tokens_per_second"]
    batch = run.config.get("train", {}).get("global_batch_size")
    length = run.config.get("model", {}).get("seq_length")
    if batch and length and speed:
        rows.append(("seconds per step", f"{batch * length / speed:.3g}"))
    rows.append(("skipped steps", str(last["skipped_steps"])))
    return rows


def _audit(run: RunFolder) -> str:
    record = run.record
    if record is None:
        return "no step was recorded yet"
    if record.audit:
        return f"{len(record.audit)} mismatches, {record.audit[0]}, step {record.step}"
    return f"as planned, step {record.step}"


def _quantisation(run: RunFolder) -> list[tuple[str, str]]:
    rows = []
    for operand, measured in by_operand(last_measured(run.quantisation)).items():
        underflow = 100 * max(row.underflow for row in measured)
        saturated = 100 * max(row.saturated for row in measured)
        text = (
            f"{underflow:.2g} % to zero, {saturated:.2g} % saturated, at most; "
            f"step {measured[0].step}"
        )
        rows.append((operand, text))
    return rows


def curve(values: Sequence[float | None]) -> str:
    """Return values as a line of bars; None leaves a gap.

    The lowest value has the lowest bar, and the highest value the highest.
    """
    count = min(WIDTH, len(values))
    picked = []
    for index in range(count):
        picked.append(values[(index * (len(values) - 1)) // max(1, count - 1)])
    known = [value for value in picked if value is not None]
    low, high = min(known, default=0), max(known, default=0)
    span = (high - low) or 1
    bars = []
    for value in picked:
        if value is None:
            bars.append("·")
        else:
            bars.append(BARS[round((value - low) / span * 7)])
    return "".join(bars)
