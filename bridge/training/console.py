"""`Display` shows a run in progress, and `RunSummary` has the metrics at its end.

A run is shown on the terminal or in the log. Its summary is printed and written as JSON.
"""

import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from bridge.report.quantisation_table import make_worst_table
from bridge.report.table import (
    format_cell,
    format_mib,
    make_facts_table,
    make_table,
    print_renderable,
)
from bridge.runtime.audit.gemm_formats import format_gemms
from bridge.runtime.audit.quantisation import QuantisationRow
from bridge.runtime.audit.record import CensusRow, GemmRow
from bridge.training.metrics import TrainRecord, ValidationRecord
from bridge.training.run import PhaseRecord

logger = logging.getLogger("bridge.training")


def _format_record(record: TrainRecord | ValidationRecord) -> str:
    """Return a record as the text of a log line."""
    if isinstance(record, ValidationRecord):
        return f"validation loss {record.loss:.4f}"
    grad_norm = "-"
    if record.grad_norm is not None:
        grad_norm = f"{record.grad_norm:.3f}"
    parts = [
        f"loss {record.loss:.4f}",
        f"{record.tokens_per_second:,.0f} tokens/s",
        f"grad norm {grad_norm}",
        f"loss scale {record.loss_scale:g}",
        f"lr {record.learning_rate:.2e}",
    ]
    if record.skipped:
        parts.append(f"SKIPPED: NaN or Inf in the gradients ({record.skipped_steps} so far)")
    return "  ".join(parts)


class Display:
    """Shows a run in progress: a progress bar with the last record, or a log line per record.

    Skipped steps and validations stay above the bar.
    """

    def __init__(self, total: int = 0, *, start: int = 0, progress: Progress | None = None) -> None:
        """Show the start of a run.

        Args:
            total: Steps of the run. 0 shows nothing; all ranks except the first show nothing.
            start: Steps that are done already.
            progress: The progress bar. None writes log lines.
        """
        self._total = total
        self._bar = progress
        self._task = TaskID(0)
        if progress is not None:
            self._task = progress.add_task("", total=total, completed=start, record="")

    def note(self, sentence: str) -> None:
        """Show a sentence."""
        if self._bar is not None:
            self._bar.console.print(sentence, highlight=False)
        elif self._total:
            logger.info(sentence)

    def advance_to(self, step: int) -> None:
        """Move the bar to a finished step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def show_record(self, record: TrainRecord | ValidationRecord) -> None:
        """Show the record of a step or a validation."""
        if self._bar is None:
            width = len(str(self._total))
            step = f"step {record.step:{width}}/{self._total}"
            self.note(f"{step}  {_format_record(record)}")
            return
        if isinstance(record, ValidationRecord) or record.skipped:
            self.note(f"step {record.step}  {_format_record(record)}")
        if isinstance(record, TrainRecord):
            self._bar.update(self._task, record=_format_record(record))


@contextmanager
def open_display(
    *, total: int, start: int, progress: bool, console: Console | None = None
) -> Iterator[Display]:
    """Yield a display with a progress bar, or with log lines.

    Args:
        total: Steps of the run.
        start: Steps that are done already.
        progress: Whether a progress bar is wanted. Without a terminal there are log lines.
        console: The console. None: the console of the standard output.
    """
    console = console or Console()
    if not (progress and console.is_terminal):
        yield Display(total)
        return
    record = TextColumn("{task.fields[record]}")
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn(), record)
    with Progress(*columns, console=console) as bar:
        yield Display(total, start=start, progress=bar)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """The result of `pretrain`, equal on all ranks except for the census of the rank's tensors."""

    run_dir: Path
    precision: str
    """The recipe's name, or the dtype that the weights train in."""
    iteration: int
    """Steps done, including those before a resumed checkpoint."""
    steps: int
    """Steps done in this process."""
    skipped_steps: int
    """Steps with NaN or Inf in the gradients, which updated nothing, with those before a resumed
    checkpoint."""
    failure: str | None
    """The reason why a completed run has failed: most steps were skipped. None: a success."""
    stop_signal: int | None
    """Number of the signal that ended the run before its last step, for example 2 of Ctrl-C. The
    exit code is 128 + the number. None: no signal did."""
    train_loss: float | None
    """Mean over the last `logging.log_interval` steps, in nats per token. None: no step was taken."""
    validation_loss: float | None
    """Loss of the last validation, in nats per token. None: there was no validation."""
    validation_step: int | None
    """The last step before the last validation. None: there was no validation."""
    unigram_entropy: float
    """Loss of the best model that reads no context, on the validation tokens, in nats per token."""
    tokens_per_second: float | None
    """Speed over all steps except the first, without the time of validations and checkpoints. None:
    there were fewer than two steps."""
    seconds: float
    """Time from the start of `pretrain` to its end."""
    peak_memory_bytes: int | None
    """Peak memory of this rank: allocated on its GPU or, without a GPU, resident in its process.
    None: it is not known."""
    parameters: int
    """Parameters of the whole model, with the padding of the vocabulary."""
    gemms: tuple[GemmRow, ...]
    """GEMMs of the first step, on all ranks."""
    phases: tuple[PhaseRecord, ...]
    """Phases of the precision schedule that this process was in; empty without a schedule."""
    census: tuple[CensusRow, ...]
    """Dtypes and sizes of this rank's tensors."""

    def write(self, path: Path) -> None:
        """Write the summary as JSON. The GEMMs are left out, since ``record.json`` has them."""
        content = dataclasses.asdict(self) | {"run_dir": str(self.run_dir)}
        del content["gemms"]
        path.write_text(json.dumps(content, indent=2) + "\n")


def print_summary(
    summary: RunSummary,
    console: Console | None = None,
    *,
    quantisation: Sequence[QuantisationRow] = (),
) -> None:
    """Print the tables at the end of a run.

    Args:
        console: The console. None: the console of the standard output.
        quantisation: Quantisation errors, of which the worst are printed.
    """
    console = console or Console()
    print_renderable(_make_result_table(summary), console)
    if summary.census:
        print_renderable(_make_census_table(summary), console)
    gemms_by_label = {}
    for phase in summary.phases:
        gemms_by_label[f"from step {phase.first}, {phase.precision}"] = phase.gemms
    if summary.gemms and not summary.phases:
        gemms_by_label["of the first step"] = summary.gemms
    for label, gemms in gemms_by_label.items():
        console.print(f"Matmuls {label}: {format_gemms(gemms)}.", highlight=False, soft_wrap=True)
    if quantisation:
        print_renderable(make_worst_table(quantisation), console)
    console.print(f"Files of this run: {summary.run_dir}", highlight=False, soft_wrap=True)


def _make_census_table(summary: RunSummary) -> RenderableType:
    """Return the table of the dtypes and sizes of the first rank's tensors."""
    rows = []
    for row in summary.census:
        size = format_mib(row.bytes)
        rows.append(
            {"tensors": row.kind, "dtype": row.dtype, "MiB": size, "read from": row.read_from}
        )
    return make_table(rows, title="Tensors of the run (first rank)", numbers=("MiB",))


def _make_result_table(summary: RunSummary) -> RenderableType:
    """Return the table of losses, speed, sizes and steps."""
    validation = "validation loss"
    if summary.validation_step not in (None, summary.iteration):
        validation = f"validation loss, step {summary.validation_step}"
    steps = f"{summary.steps:,}"
    if summary.steps != summary.iteration:
        steps = f"{steps} of {summary.iteration:,}"
    rows = [
        ("training loss (nats/token)", format_cell(summary.train_loss)),
        (validation, format_cell(summary.validation_loss)),
        ("unigram entropy", format_cell(summary.unigram_entropy)),
        ("tokens/s", format_cell(summary.tokens_per_second, ",.0f")),
        ("parameters", f"{summary.parameters:,}"),
        ("steps", steps),
        ("skipped steps", f"{summary.skipped_steps:,}"),
        ("seconds", f"{summary.seconds:,.0f}"),
    ]
    if summary.stop_signal is not None:
        rows.append(("ended", "early, on request"))
    return make_facts_table(
        rows, title=f"{summary.precision}: step {summary.iteration}", numbers=True
    )
