"""The log that Megatron-LM or Megatron Bridge prints: a line each `log_interval` steps.

    [2026-08-22 15:22:22.1] iteration       10/     100 | consumed samples:          320 | ...
      elapsed time per iteration (ms): 512.3 | learning rate: 3.000000E-05 | ...
      lm loss: 1.037923E+01 | loss scale: 1.0 | grad norm: 1.192 | ...
      number of skipped iterations:   0 | number of nan iterations:   0 |

Three facts of the code decide what a line means. The loss is the mean over the steps since the line
before that were not skipped. A loss that is NaN is not printed (`if avg >= 0.0`). Where every step
was skipped, the loss is left out, or printed as zero. So a line without a loss is a NaN, unless its
steps were all skipped.

Newer releases print the first step of a run by itself too, and count it again in the next line:
its skipped steps, and its loss in the mean.

Source: Megatron-LM d98e8a64 megatron/training/training.py training_log; Megatron Bridge 067f987d
src/megatron/bridge/training/utils/train_utils.py training_log.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.read.logs.series import make_run_log
from bridge.read.megatron_lm.printed_arguments import BLOCK_START, parse_printed_arguments
from bridge.runtime.audit.run_log import RunLog

ITERATION_LINE_PATTERN = re.compile(r"\biteration\s+(\d{1,12})/\s*(\d{1,12}) \|(.*)")
CELL_PATTERN = re.compile(r"\s*(.+?):\s+(\S+)\s*$")
VALIDATION_PATTERN = re.compile(
    r"validation loss at iteration (\d{1,12})(?: on validation set)? +\|.*?\blm loss value: (\S+)"
)
"""The line about the test set has the same words, but for the name of the set."""
MAX_CELL_LENGTH = 120
"""Characters; a longer piece of a line is no figure."""
LOSS, SKIPPED = "lm loss", "number of skipped iterations"
BATCH, ELAPSED = "global batch size", "elapsed time per iteration (ms)"
TOKENS_METRIC = "throughput/tokens_per_sec"
ARGUMENTS_TITLE = " arguments --------"
"""In the line above the arguments."""
BRIDGE_LINE_PATTERN = re.compile(r"^.*Step Time : \S+s GPU utilization: ", re.MULTILINE)
"""A line of Megatron Bridge alone, in front of each line about an iteration."""


def is_of(text: str) -> bool:
    """Return whether a text has a line as Megatron-LM prints it, or the arguments before the first."""
    return ITERATION_LINE_PATTERN.search(text) is not None or BLOCK_START.search(text) is not None


def read(text: str, path: Path) -> RunLog:
    """Return the run of a printed log.

    Raises:
        UnreadFileError: No line has a loss.
    """
    rows: dict[int, dict[str, float]] = {}
    train_iters = None
    repeated = set()
    previous = 0
    for match in ITERATION_LINE_PATTERN.finditer(text):
        step = int(match[1])
        if step < previous:
            # A run that was started again from a checkpoint: its later records count.
            for later in [other for other in rows if other >= step]:
                repeated.add(later)
                del rows[later]
        rows[step] = _parse_cells(match[3])
        train_iters = int(match[2])
        previous = step
    _correct_skipped_steps(rows)
    arguments = _parse_arguments(text)
    series: dict[str, dict[int, float]] = {}
    for step, cells in rows.items():
        _add_tokens(cells, arguments)
        for name, value in cells.items():
            series.setdefault(name, {})[step] = value
    for match in VALIDATION_PATTERN.finditer(text):
        loss = _parse_number(match[2])
        if loss is not None:
            series.setdefault("lm loss validation", {})[int(match[1])] = loss
    source = "a log of Megatron-LM"
    if BRIDGE_LINE_PATTERN.search(text):
        source = "a log of Megatron Bridge"
    described_by = None
    if arguments:
        described_by = path
    return make_run_log(
        series,
        path=path,
        source=source,
        is_sampled=False,
        train_iters=train_iters,
        arguments=arguments,
        described_by=described_by,
        notes=_format_repeated_note(repeated),
    )


def _parse_cells(text: str) -> dict[str, float]:
    cells = {}
    for part in text.split("|"):
        match = None
        if len(part) <= MAX_CELL_LENGTH:
            match = CELL_PATTERN.match(part)
        if match is None:
            continue
        value = _parse_number(match[2])
        if value is not None:
            cells[match[1]] = value
    return cells


def _parse_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _correct_skipped_steps(rows: dict[int, dict[str, float]]) -> None:
    """Take out the zero of a line whose steps were all skipped; add the NaN that was not printed."""
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
    """Return the steps that a line is about.

    The first line of a run that goes on from a checkpoint does not show it, and the next one does.
    """
    if index > 0:
        return steps[index] - steps[index - 1]
    if len(steps) > 1:
        return min(steps[0], steps[1] - steps[0])
    return steps[0]


def _counts_first_again(rows: Mapping[int, Mapping[str, float]], steps: list[int]) -> bool:
    """Return whether the second line counts the skipped steps of the first one again.

    It does where the first line is none of the regular ones, or the second has too many.
    """
    interval = steps[1] - steps[0]
    if rows[steps[1]].get(SKIPPED, 0) > interval:
        return True
    if len(steps) < 3:
        return False
    return steps[0] % (steps[2] - steps[1]) != 0


def _add_tokens(cells: dict[str, float], arguments: Mapping[str, Any]) -> None:
    """Add the tokens per second, where the arguments have the length of a sample."""
    length = arguments.get("seq_length")
    if isinstance(length, int) and cells.get(BATCH) and cells.get(ELAPSED):
        cells[TOKENS_METRIC] = cells[BATCH] * length / (cells[ELAPSED] / 1000)


def _parse_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of the last run that the log shows; empty without any."""
    if ARGUMENTS_TITLE not in text:  # a long log is searched in a hundredth of the time
        return {}
    blocks = parse_printed_arguments(text)
    if not blocks:
        return {}
    return dict(blocks[-1].arguments)


def _format_repeated_note(repeated: set[int]) -> tuple[str, ...]:
    if not repeated:
        return ()
    steps = f"{min(repeated)} to {max(repeated)}"
    return (f"The run was started again: of steps {steps} the last record counts.",)
