"""Reads the log that NeMo-RL prints: a block for each step, with a line for each metric.

    ========================= Step 3/100 =========================
    📊 Training Results:
      • Loss: 0.6931
      • Avg Reward: 0.2500
    ⏱️  Timing:
      • Total step time: 41.20s

Steps are counted from 1 in each epoch. The loss is the loss of a single step. The gradient norm and
the learning rate are not printed. NeMo-RL writes both to TensorBoard, W&B and MLflow.

Source: NeMo-RL 7ea279ab nemo_rl/algorithms/sft.py, grpo.py, grpo_sync.py, dpo.py, rm.py.
"""

import re
from pathlib import Path

from bridge.read.logs.series import make_run_log, parse_number
from bridge.runtime.audit.run_log import RunLog

STEP_PATTERN = re.compile(r"={25} Step (\d{1,12})/(-?\d{1,12}) ={25}")
EPOCH_PATTERN = re.compile(r"={25} Epoch (\d{1,12})/(-?\d{1,12}) ={25}")
RESULTS_TITLE = "Training Results:"
VALIDATION_PATTERN = re.compile(r"Validation loss: (\S+)")
FIGURE_PATTERN = re.compile(r"• ([\w ]+): (\S+?)s?(?:\s|$)")
FLOPS_PATTERN = re.compile(r"\((\S+) TFLOPS per rank\)")


def is_of(text: str) -> bool:
    """Return whether a text has a step as NeMo-RL prints it."""
    return STEP_PATTERN.search(text) is not None


def read(text: str, path: Path) -> RunLog:
    """Return the run of a printed log.

    Raises:
        UnreadFileError: No step has a loss.
    """
    series: dict[str, dict[int, float]] = {}
    step = 0
    steps_before_epoch = 0
    epoch = 1
    steps_per_epoch = 0
    is_in_results = False
    for line in text.splitlines():
        epoch_match = EPOCH_PATTERN.search(line)
        step_match = STEP_PATTERN.search(line)
        if epoch_match is not None:
            if int(epoch_match[1]) > epoch:
                steps_before_epoch = step
            epoch = int(epoch_match[1])
        elif step_match is not None:
            step = steps_before_epoch + int(step_match[1])
            steps_per_epoch = int(step_match[2])
            is_in_results = False
        elif RESULTS_TITLE in line:
            is_in_results = True
        elif is_in_results:
            _add_figure(series, line, step)
        else:
            validation_match = VALIDATION_PATTERN.search(line)
            if validation_match is not None:
                _add_value(series, "validation/val_loss", step, validation_match[1])
    train_iters = None
    if epoch == 1 and steps_per_epoch > 0:
        train_iters = steps_per_epoch
    return make_run_log(
        series, path=path, source="a log of NeMo-RL", is_sampled=True, train_iters=train_iters
    )


def _add_figure(series: dict[str, dict[int, float]], line: str, step: int) -> None:
    """Add the metric of a line to its series, if the line has a metric."""
    match = FLOPS_PATTERN.search(line)
    if match is not None:
        _add_value(series, "TFLOPS per rank", step, match[1])
        return
    match = FIGURE_PATTERN.search(line)
    if match is not None:
        _add_value(series, match[1], step, match[2])


def _add_value(series: dict[str, dict[int, float]], name: str, step: int, text: str) -> None:
    """Add a value to the series of a name, if the text is a number."""
    value = parse_number(text)
    if value is not None:
        series.setdefault(name, {})[step] = value
