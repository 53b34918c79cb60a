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
    settings = run.config.get("train", {})
    rows = [("step", f"{train[-1]['step'] if train else 0} of {settings.get('train_iters')}")]
    if train:
        last = train[-1]
        rows += [
            ("loss", f"{cell(last['loss'])}  {curve([one['loss'] for one in train])}"),
            ("loss scale", f"{last['loss_scale']:g}"),
            ("gradient norm", cell(last["grad_norm"])),
            ("tokens/s", f"{last['tokens_per_second']:,.0f}"),
        ]
        batch, speed = settings.get("global_batch_size"), last["tokens_per_second"]
        length = run.config.get("model", {}).get("seq_length")
        if batch and length and speed:
            rows.append(("seconds per step", f"{batch * length / speed:.3g}"))
        rows.append(("skipped steps", str(last["skipped_steps"])))
    if validation:
        rows.append(
            ("validation loss", f"{cell(validation[-1]['loss'])}, step {validation[-1]['step']}")
        )
    record = run.record
    audit = "no step was recorded yet"
    if record is not None:
        found = (
            f"{len(record.audit)} mismatches, {record.audit[0]}" if record.audit else "as planned"
        )
        audit = f"{found}, step {record.step}"
    rows += [*_quantisation(run), ("audit", audit)]
    rows += [("findings of the check", str(len(run.findings.get("findings", ()))))]
    rows += [("ended", run.summary.get("failure") or run.stopped or "yes")] if run.summary else []
    warnings = [
        Text(f"{name}: {sentence}", style="yellow")
        for name, sentence in early_warnings(Signs.of(run, silenced=silenced))
    ]
    title = f"{run.findings.get('precision') or run.path.name}: {run.path}"
    return Group(facts(rows, title=title), *warnings)


def _quantisation(run: RunFolder) -> list[tuple[str, str]]:
    found = []
    for operand, own in by_operand(last_measured(run.quantisation)).items():
        shares = [max(getattr(row, name) for row in own) for name in ("underflow", "saturated")]
        text = f"{100 * shares[0]:.2g} % to zero, {100 * shares[1]:.2g} % saturated, at most; step {own[0].step}"
        found.append((operand, text))
    return found


def curve(values: Sequence[float | None]) -> str:
    """Return values as a line of bars, the lowest and highest of them at its ends; None leaves a gap."""
    count = min(WIDTH, len(values))
    picked = [values[(index * (len(values) - 1)) // max(1, count - 1)] for index in range(count)]
    known = [value for value in picked if value is not None]
    low, span = min(known, default=0), max(known, default=0) - min(known, default=0)
    heights = (
        None if value is None else round((value - low) / (span or 1) * 7) for value in picked
    )
    return "".join("·" if height is None else BARS[height] for height in heights)
