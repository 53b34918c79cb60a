"""What a run came to."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from pathlib import Path

    from bridge.megatron.audit import GemmRecord
    from bridge.megatron.census import CensusRow

__all__ = ["RunSummary", "census_table", "result_table"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """The result of `pretrain`; equal on all ranks except for the census, which is each rank's own."""

    run_dir: Path
    precision: str
    """The recipe's name, or what the weights train in."""
    iteration: int
    """Steps done, including those before a resumed checkpoint."""
    steps: int
    """Steps done in this process."""
    skipped_steps: int
    """Steps among them whose gradients overflowed and that updated nothing."""
    stopped_early: bool
    """Whether Ctrl-C or a termination signal ended the run before its last step."""
    train_loss: float | None
    """Mean over the last `logging.log_interval` steps, in nats per token; None without a step."""
    validation_loss: float | None
    """Of the last validation; None without one."""
    unigram_entropy: float
    """What a model without context reaches on the validation tokens, in nats per token."""
    tokens_per_second: float | None
    """Over all steps but the first, without validation and checkpoints; None with fewer than two steps."""
    seconds: float
    """From the start of `pretrain` to its end."""
    parameters: int
    """Parameters of the whole model, padding of the vocabulary included."""
    gemms: tuple[GemmRecord, ...]
    """What the linear layers of the transformer multiplied in, in the first step; empty under Transformer Engine."""
    census: tuple[CensusRow, ...]
    """What the tensors of this rank really were."""

    def write(self, path: Path) -> None:
        """Write the summary as JSON."""
        content = dataclasses.asdict(self) | {"run_dir": str(self.run_dir)}
        path.write_text(json.dumps(content, indent=2) + "\n")


def _number(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def result_table(summary: RunSummary) -> Table:
    """Return the figures of a run as a table for the terminal."""
    table = Table(title=f"{summary.precision}: step {summary.iteration}", show_header=False, title_justify="left")
    table.add_column("what", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    rows = (
        ("training loss (nats/token)", _number(summary.train_loss)),
        ("validation loss", _number(summary.validation_loss)),
        ("unigram entropy", _number(summary.unigram_entropy)),
        ("tokens/s", _number(summary.tokens_per_second, ",.0f")),
        ("parameters", f"{summary.parameters:,}"),
        ("steps", f"{summary.steps:,}"),
        ("skipped steps", f"{summary.skipped_steps:,}"),
        ("seconds", f"{summary.seconds:,.0f}"),
    )
    for name, value in rows:
        table.add_row(name, value)
    if summary.stopped_early:
        table.add_row("ended", "early, on request")
    return table


def census_table(rows: tuple[CensusRow, ...]) -> Table:
    """Return what the tensors really were, as a table for the terminal."""
    table = Table(title="What the tensors were (first rank)", title_justify="left")
    table.add_column("tensors", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    table.add_column("MiB", justify="right", no_wrap=True)
    table.add_column("read from", overflow="fold")
    for row in rows:
        table.add_row(row.kind, row.dtype, f"{row.bytes / 2**20:.1f}", row.read_from)
    return table
