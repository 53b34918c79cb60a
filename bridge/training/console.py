"""Display of a run in progress: a progress bar on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from bridge.megatron.audit import format_gemms
from bridge.report.quantisation import worst_table
from bridge.report.table import show
from bridge.training.metrics import TrainRecord, ValidationRecord
from bridge.training.summary import RunSummary, census_table, result_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bridge.megatron.telemetry import QuantisationRow

__all__ = ["Display", "LogLines", "ProgressBar", "display", "show_summary"]

logger = logging.getLogger("bridge.training")


class Display:
    """Display of a run in progress; this one, of the ranks that show nothing, does nothing."""

    def note(self, sentence: str) -> None:
        """Show one sentence."""

    def stepped(self, step: int) -> None:
        """Count a finished step."""

    def logged(self, record: TrainRecord | ValidationRecord) -> None:
        """Show a record."""


def _line(record: TrainRecord | ValidationRecord) -> str:
    """Return a record as one line, without the step."""
    if isinstance(record, ValidationRecord):
        return f"validation loss {record.loss:.4f}"
    grad_norm = "-" if record.grad_norm is None else f"{record.grad_norm:.3f}"
    parts = [
        f"loss {record.loss:.4f}",
        f"{record.tokens_per_second:,.0f} tokens/s",
        f"grad norm {grad_norm}",
        f"loss scale {record.loss_scale:g}",
        f"lr {record.learning_rate:.2e}",
    ]
    if record.skipped:
        parts.append(f"SKIPPED: the gradients overflowed ({record.skipped_steps} so far)")
    return "  ".join(parts)


class LogLines(Display):
    """One log line per record."""

    def __init__(self, total: int) -> None:
        self._total = total

    def note(self, sentence: str) -> None:
        """Log one sentence."""
        logger.info(sentence)

    def logged(self, record: TrainRecord | ValidationRecord) -> None:
        """Log a record."""
        logger.info("step %*d/%d  %s", len(str(self._total)), record.step, self._total, _line(record))


class ProgressBar(Display):
    """A bar with the last record next to it; skipped steps and validations stay above it."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def note(self, sentence: str) -> None:
        """Print one sentence above the bar."""
        self._progress.console.print(sentence, highlight=False)

    def stepped(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)

    def logged(self, record: TrainRecord | ValidationRecord) -> None:
        """Show a record next to the bar, and above it one that must not be overwritten."""
        if isinstance(record, ValidationRecord) or record.skipped:
            self.note(f"step {record.step}  {_line(record)}")
        if isinstance(record, TrainRecord):
            self._progress.update(self._task, record=_line(record))


@contextmanager
def display(*, total: int, start: int, progress: bool, console: Console | None = None) -> Iterator[Display]:
    """Yield a progress bar if it is wanted and there is a terminal, else log lines.

    Args:
        total: Steps of the whole run.
        start: Steps done before.
        progress: Whether a bar is wanted.
        console: Where to draw; None: standard output.
    """
    console = console or Console()
    if not (progress and console.is_terminal):
        yield LogLines(total)
        return
    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[record]}"),
    )
    with Progress(*columns, console=console) as bar:
        yield ProgressBar(bar, bar.add_task("training", total=total, completed=start, record=""))


def show_summary(
    summary: RunSummary, console: Console | None = None, *, quantisation: Sequence[QuantisationRow] = ()
) -> None:
    """Print the closing tables."""
    console = console or Console()
    show(result_table(summary), console, least=0)
    if summary.census:
        show(census_table(summary.census), console, least=0)
    if summary.gemms:
        console.print(f"Matmuls of the first step: {format_gemms(summary.gemms)}.", highlight=False, soft_wrap=True)
    if quantisation:
        show(worst_table(quantisation), console, least=0)
    console.print(f"Files of this run: {summary.run_dir}", highlight=False, soft_wrap=True)
