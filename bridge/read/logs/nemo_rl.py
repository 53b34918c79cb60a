"""The log that NeMo-RL prints: a block per step, a line per figure.

    ========================= Step 3/100 =========================
    📊 Training Results:
      • Loss: 0.6931
      • Avg Reward: 0.2500
    ⏱️  Timing:
      • Total step time: 41.20s

Steps are counted from 1 in each epoch. The loss is that of the step alone. Neither the gradient
norm nor the learning rate is printed; NeMo-RL writes both to TensorBoard, W&B and MLflow.

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
    step = before_epoch = 0
    epoch, total = 1, 0
    in_results = False
    for line in text.splitlines():
        found = EPOCH_PATTERN.search(line)
        if found is not None:
            if int(found[1]) > epoch:
                before_epoch = step
            epoch = int(found[1])
            continue
        found = STEP_PATTERN.search(line)
        if found is not None:
            step, total = before_epoch + int(found[1]), int(found[2])
            in_results = False
        elif RESULTS_TITLE in line:
            in_results = True
        elif in_results:
            _add_figure(series, line, step)
        else:
            found = VALIDATION_PATTERN.search(line)
            if found is not None:
                _add_value(series, "validation/val_loss", step, found[1])
    train_iters = None
    if epoch == 1 and total > 0:
        train_iters = total
    return make_run_log(
        series, path=path, source="a log of NeMo-RL", is_sampled=True, train_iters=train_iters
    )


def _add_figure(series: dict[str, dict[int, float]], line: str, step: int) -> None:
    match = FLOPS_PATTERN.search(line)
    if match is not None:
        _add_value(series, "TFLOPS per rank", step, match[1])
        return
    match = FIGURE_PATTERN.search(line)
    if match is not None:
        _add_value(series, match[1], step, match[2])


def _add_value(series: dict[str, dict[int, float]], name: str, step: int, word: str) -> None:
    value = parse_number(word)
    if value is not None:
        series.setdefault(name, {})[step] = value
