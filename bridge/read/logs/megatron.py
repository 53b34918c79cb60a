"""Reads the log that Megatron-LM or Megatron Bridge prints: a line after each `log_interval` steps.

    [2026-08-22 15:22:22.1] iteration       10/     100 | consumed samples:          320 | ...
      elapsed time per iteration (ms): 512.3 | learning rate: 3.000000E-05 | ...
      lm loss: 1.037923E+01 | loss scale: 1.0 | grad norm: 1.192 | ...
      number of skipped iterations:   0 | number of nan iterations:   0 |

Three facts of the trainer's code decide the meaning of a line:

- The loss is the mean over the steps since the last line that were not skipped.
- A loss that is NaN is not printed (`if avg >= 0.0`).
- If every step was skipped, the loss is not printed, or is printed as zero.

So a line without a loss is a NaN, unless all its steps were skipped.

Newer releases also print an extra line for the first step of a run. The next line then counts this
step again, among the skipped steps and in the mean of the loss.

Source: Megatron-LM d98e8a64 megatron/training/training.py training_log; Megatron Bridge 067f987d
src/megatron/bridge/training/utils/train_utils.py training_log.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bridge.read.logs.series import make_run_log, parse_number
from bridge.read.megatron_lm.printed_arguments import BLOCK_START, parse_printed_arguments
from bridge.runtime.audit.run_log import RunLog

ITERATION_LINE_PATTERN = re.compile(r"\biteration\s+(\d{1,12})/\s*(\d{1,12}) \|(.*)")
CELL_PATTERN = re.compile(r"\s*(.+?):\s+(\S+)\s*$")
VALIDATION_PATTERN = re.compile(
    r"validation loss at iteration (\d{1,12})(?: on validation set)? +\|.*?\blm loss value: (\S+)"
)
"""The line about a validation. The line about the test set differs only in the name of the set."""
MAX_CELL_LENGTH = 120
"""The most characters of a cell. A longer piece of a line is not a metric."""
LOSS = "lm loss"
SKIPPED = "number of skipped iterations"
BATCH = "global batch size"
ELAPSED = "elapsed time per iteration (ms)"
TOKENS_METRIC = "throughput/tokens_per_sec"
ARGUMENTS_TITLE = " arguments --------"
"""A part of the line above the printed arguments."""
BRIDGE_LINE_PATTERN = re.compile(r"^.*Step Time : \S+s GPU utilization: ", re.MULTILINE)
"""A line that only Megatron Bridge prints, in front of each line about an iteration."""


def is_of(text: str) -> bool:
    """Return whether a text has Megatron-LM's line about an iteration, or printed arguments."""
    return ITERATION_LINE_PATTERN.search(text) is not None or BLOCK_START.search(text) is not None


def read(text: str, path: Path) -> RunLog:
    """Return the run of a printed log.

    Raises:
        UnreadFileError: No line has a loss.
    """
    iterations = _parse_iterations(text)
    _correct_skipped_steps(iterations.cells_by_step)
    arguments = _parse_arguments(text)
    series: dict[str, dict[int, float]] = {}
    for step, cells in iterations.cells_by_step.items():
        _add_tokens(cells, arguments)
        for name, value in cells.items():
            series.setdefault(name, {})[step] = value
    for match in VALIDATION_PATTERN.finditer(text):
        loss = parse_number(match[2])
        if loss is not None:
            series.setdefault("lm loss validation", {})[int(match[1])] = loss
    source = "a log of Megatron-LM"
    if BRIDGE_LINE_PATTERN.search(text):
        source = "a log of Megatron Bridge"
    described_by = path if arguments else None
    return make_run_log(
        series,
        path=path,
        source=source,
        is_sampled=False,
        train_iters=iterations.train_iters,
        arguments=arguments,
        described_by=described_by,
        notes=_describe_repeated_steps(iterations.repeated_steps),
    )


class _Iterations(NamedTuple):
    """The lines about iterations."""

    cells_by_step: dict[int, dict[str, float]]
    """Step -> name of a metric in its line -> value."""
    train_iters: int | None
    """The planned number of steps of the run. None: the log has no line about an iteration."""
    repeated_steps: set[int]
    """Steps that were run again after a restart from a checkpoint."""


def _parse_iterations(text: str) -> _Iterations:
    """Return the lines about iterations. If a step was run again, its last line counts."""
    cells_by_step: dict[int, dict[str, float]] = {}
    train_iters = None
    repeated_steps: set[int] = set()
    previous = 0
    for match in ITERATION_LINE_PATTERN.finditer(text):
        step = int(match[1])
        if step < previous:
            for later in [known_step for known_step in cells_by_step if known_step >= step]:
                repeated_steps.add(later)
                del cells_by_step[later]
        cells_by_step[step] = _parse_cells(match[3])
        train_iters = int(match[2])
        previous = step
    return _Iterations(cells_by_step, train_iters, repeated_steps)


def _parse_cells(text: str) -> dict[str, float]:
    """Return name of a metric -> value.

    The text is the part of a line after the number of the iteration.
    """
    cells: dict[str, float] = {}
    for part in text.split("|"):
        match = None
        if len(part) <= MAX_CELL_LENGTH:
            match = CELL_PATTERN.match(part)
        if match is None:
            continue
        value = parse_number(match[2])
        if value is not None:
            cells[match[1]] = value
    return cells


def _correct_skipped_steps(rows: dict[int, dict[str, float]]) -> None:
    """Correct the losses and the counts of skipped steps, as the module docstring explains.

    If all steps of a line were skipped, a loss of zero is removed. A NaN that was not printed is
    added.

    Args:
        rows: Step -> the metrics of its line, which are changed.
    """
    steps = list(rows)
    for index, step in enumerate(steps):
        cells = rows[step]
        skipped = cells.get(SKIPPED, 0)
        if LOSS not in cells and skipped < _get_interval(steps, index):
            cells[LOSS] = math.nan
        elif skipped and not cells.get(LOSS):
            cells.pop(LOSS, None)
    if len(steps) > 1 and _counts_first_again(rows, steps):
        rows[steps[0]][SKIPPED] = 0


def _get_interval(steps: list[int], index: int) -> int:
    """Return the number of steps that a line is about.

    If a run continues from a checkpoint, its first line does not show this number. Then the
    interval of the second line is used.
    """
    if index > 0:
        return steps[index] - steps[index - 1]
    if len(steps) > 1:
        return min(steps[0], steps[1] - steps[0])
    return steps[0]


def _counts_first_again(rows: Mapping[int, Mapping[str, float]], steps: list[int]) -> bool:
    """Return whether the second line counts the skipped steps of the first line again.

    It does if the first line is an extra line, or if the second line has more skipped steps than
    steps.

    Args:
        rows: Step -> the metrics of its line.
        steps: The steps of the lines.
    """
    interval = steps[1] - steps[0]
    if rows[steps[1]].get(SKIPPED, 0) > interval:
        return True
    if len(steps) < 3:
        return False
    return steps[0] % (steps[2] - steps[1]) != 0


def _add_tokens(cells: dict[str, float], arguments: Mapping[str, Any]) -> None:
    """Add the tokens per second to the metrics of a line, if the length of a sample is known."""
    length = arguments.get("seq_length")
    if isinstance(length, int) and cells.get(BATCH) and cells.get(ELAPSED):
        cells[TOKENS_METRIC] = cells[BATCH] * length / (cells[ELAPSED] / 1000)


def _parse_arguments(text: str) -> dict[str, Any]:
    """Return name of an argument of the last run in the log -> its value. Empty if it has none."""
    if ARGUMENTS_TITLE not in text:  # this search is 100 times faster than the parser
        return {}
    blocks = parse_printed_arguments(text)
    if not blocks:
        return {}
    return dict(blocks[-1].arguments)


def _describe_repeated_steps(repeated_steps: set[int]) -> tuple[str, ...]:
    """Return the note about steps that were run again. Empty if there are no such steps."""
    if not repeated_steps:
        return ()
    steps = f"{min(repeated_steps)} to {max(repeated_steps)}"
    return (f"The run was started again: of steps {steps} the last record counts.",)
