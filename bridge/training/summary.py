"""Summary of a run: its figures, as JSON and as tables for the terminal."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.report.table import Column, table

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from bridge.megatron.audit import GemmRecord
    from bridge.megatron.census import CensusRow

__all__ = ["RunSummary", "census_table", "result_table"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """The result of `pretrain`; equal on all ranks except for the census, which is each rank's own."""

    run_dir: Path
    precision: str
    """The recipe's name, or the dtype that the weights train in."""
    iteration: int
    """Steps done, including those before a resumed checkpoint."""
    steps: int
    """Steps done in this process."""
    skipped_steps: int
    """Steps whose gradients overflowed and that updated nothing, including those before a resumed checkpoint."""
    stopped_early: bool
    """Whether Ctrl-C or a termination signal ended the run before its last step."""
    train_loss: float | None
    """Mean over the last `logging.log_interval` steps, in nats per token; None without a step."""
    validation_loss: float | None
    """Of the last validation; None without one."""
    validation_step: int | None
    """Step after which that was."""
    unigram_entropy: float
    """Loss of the best model without context on the validation tokens, in nats per token."""
    tokens_per_second: float | None
    """Over all steps but the first, without validation and checkpoints; None with fewer than two steps."""
    seconds: float
    """From the start of `pretrain` to its end."""
    parameters: int
    """Parameters of the whole model, padding of the vocabulary included."""
    gemms: tuple[GemmRecord, ...]
    """GEMMs of the transformer's linear layers in the first step; empty under Transformer Engine."""
    census: tuple[CensusRow, ...]
    """Dtypes and sizes of this rank's tensors."""

    def write(self, path: Path) -> None:
        """Write the summary as JSON."""
        content = dataclasses.asdict(self) | {"run_dir": str(self.run_dir)}
        path.write_text(json.dumps(content, indent=2) + "\n")


def _number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def result_table(summary: RunSummary) -> RenderableType:
    """Return the figures of a run as a table for the terminal."""
    is_old = summary.validation_step not in (None, summary.iteration)
    resumed = f" of {summary.iteration:,}" if summary.steps != summary.iteration else ""
    rows = [
        ("training loss (nats/token)", _number(summary.train_loss)),
        (f"validation loss{f', step {summary.validation_step}' * is_old}", _number(summary.validation_loss)),
        ("unigram entropy", _number(summary.unigram_entropy)),
        ("tokens/s", _number(summary.tokens_per_second, ",.0f")),
        ("parameters", f"{summary.parameters:,}"),
        ("steps", f"{summary.steps:,}{resumed}"),
        ("skipped steps", f"{summary.skipped_steps:,}"),
        ("seconds", f"{summary.seconds:,.0f}"),
    ]
    if summary.stopped_early:
        rows.append(("ended", "early, on request"))
    return table(("", Column(number=True)), rows, title=f"{summary.precision}: step {summary.iteration}")


def census_table(rows: tuple[CensusRow, ...]) -> RenderableType:
    """Return the dtypes and sizes of the tensors as a table for the terminal."""
    columns = ("tensors", "dtype", Column(heading="MiB", number=True), "read from")
    lines = [(row.kind, row.dtype, f"{row.bytes / 2**20:.1f}", row.read_from) for row in rows]
    return table(columns, lines, title="Tensors of the run (first rank)")
