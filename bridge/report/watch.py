"""A run in progress as a view for a terminal: its last metrics and the early warnings."""

from collections.abc import Collection, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.report.table import format_cell, make_facts_table
from bridge.runtime.audit.early_warnings import WarningInputs, find_early_warnings
from bridge.runtime.audit.quantisation import group_by_operand, select_last_step
from bridge.runtime.audit.run_folder import RunFolder

Record = dict[str, Any]

BAR_CHARACTERS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40
"""The width of a curve in characters."""


def make_watch_view(run: RunFolder, *, silenced: Collection[str] = ()) -> RenderableType:
    """Return the last metrics of a run, and its early warnings.

    Args:
        silenced: Names of early warnings that are left out.
    """
    title = f"{run.findings.get('precision') or run.path.name}: {run.path}"
    parts = [make_facts_table(_list_facts(run), title=title)]
    inputs = WarningInputs.from_run_folder(run, silenced=silenced)
    for name, sentence in find_early_warnings(inputs):
        parts.append(Text(f"{name}: {sentence}", style="yellow"))
    return Group(*parts)


def _list_facts(run: RunFolder) -> list[tuple[str, str]]:
    """Return the state of a run as names with values."""
    train, validation = run.read_metrics("train"), run.read_metrics("validation")
    iterations = run.config.get("train", {}).get("train_iters")
    step = 0
    if train:
        step = train[-1]["step"]
    rows = [("step", f"{step} of {iterations}")]
    if train:
        rows += _list_last_step(run, train)
    if validation:
        last = validation[-1]
        rows.append(("validation loss", f"{format_cell(last['loss'])}, step {last['step']}"))
    rows += _list_quantisation(run)
    rows.append(("audit", _describe_audit(run)))
    rows.append(("findings of the check", str(len(run.findings.get("findings", ())))))
    if run.summary:
        rows.append(("ended", run.summary.get("failure") or run.stopped or "yes"))
    return rows


def _list_last_step(run: RunFolder, train: Sequence[Record]) -> list[tuple[str, str]]:
    """Return the metrics of the last training step."""
    last = train[-1]
    losses = [record["loss"] for record in train]
    rows = [
        ("loss", f"{format_cell(last['loss'])}  {draw_bars(losses)}"),
        ("loss scale", f"{last['loss_scale']:g}"),
        ("gradient norm", format_cell(last["grad_norm"])),
        ("tokens/s", f"{last['tokens_per_second']:,.0f}"),
    ]
    speed = last["tokens_per_second"]
    batch = run.config.get("train", {}).get("global_batch_size")
    length = run.config.get("model", {}).get("seq_length")
    if batch and length and speed:
        rows.append(("seconds per step", f"{batch * length / speed:.3g}"))
    rows.append(("skipped steps", str(last["skipped_steps"])))
    return rows


def _describe_audit(run: RunFolder) -> str:
    """Return whether the recorded step ran as planned, with the first mismatch."""
    record = run.record
    if record is None:
        return "no step was recorded yet"
    if record.audit:
        return f"{len(record.audit)} mismatches, {record.audit[0]}, step {record.step}"
    return f"as planned, step {record.step}"


def _list_quantisation(run: RunFolder) -> list[tuple[str, str]]:
    """Return the largest shares of zeros and saturated elements of each operand."""
    rows = []
    for operand, measured in group_by_operand(select_last_step(run.quantisation)).items():
        underflow = 100 * max(row.underflow for row in measured)
        saturated = 100 * max(row.saturated for row in measured)
        shares = (
            f"{underflow:.2g} % to zero, {saturated:.2g} % saturated, at most; "
            f"step {measured[0].step}"
        )
        rows.append((operand, shares))
    return rows


def draw_bars(values: Sequence[float | None]) -> str:
    """Return values as a line of at most `CURVE_WIDTH` bars.

    The lowest value has the lowest bar, and the highest value the highest bar. None is a dot.
    """
    count = min(CURVE_WIDTH, len(values))
    picked = []
    for index in range(count):
        picked.append(values[(index * (len(values) - 1)) // max(1, count - 1)])
    known = [value for value in picked if value is not None]
    low, high = min(known, default=0), max(known, default=0)
    span = (high - low) or 1  # equal values would divide by 0
    highest_bar = len(BAR_CHARACTERS) - 1
    bars = []
    for value in picked:
        if value is None:
            bars.append("·")
        else:
            bars.append(BAR_CHARACTERS[round((value - low) / span * highest_bar)])
    return "".join(bars)
