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

from bridge.read.logs.series import log_of, number
from bridge.runtime.audit.run_log import RunLog

STEP = re.compile(r"={25} Step (\d{1,12})/(-?\d{1,12}) ={25}")
EPOCH = re.compile(r"={25} Epoch (\d{1,12})/(-?\d{1,12}) ={25}")
RESULTS = "Training Results:"
VALIDATION = re.compile(r"Validation loss: (\S+)")
FIGURE = re.compile(r"• ([\w ]+): (\S+?)s?(?:\s|$)")
FLOPS = re.compile(r"\((\S+) TFLOPS per rank\)")


def is_of(text: str) -> bool:
    """Return whether a text has a step as NeMo-RL prints it."""
    return STEP.search(text) is not None


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
        found = EPOCH.search(line)
        if found is not None:
            if int(found[1]) > epoch:
                before_epoch = step
            epoch = int(found[1])
            continue
        found = STEP.search(line)
        if found is not None:
            step, total = before_epoch + int(found[1]), int(found[2])
            in_results = False
        elif RESULTS in line:
            in_results = True
        elif in_results:
            _add_figure(series, line, step)
        else:
            found = VALIDATION.search(line)
            if found is not None:
                _add(series, "validation/val_loss", step, found[1])
    train_iters = None
    if epoch == 1 and total > 0:
        train_iters = total
    return log_of(
        series, path=path, source="a log of NeMo-RL", is_sampled=True, train_iters=train_iters
    )


def _add_figure(series: dict[str, dict[int, float]], line: str, step: int) -> None:
    found = FLOPS.search(line)
    if found is not None:
        _add(series, "TFLOPS per rank", step, found[1])
        return
    found = FIGURE.search(line)
    if found is not None:
        _add(series, found[1], step, found[2])


def _add(series: dict[str, dict[int, float]], name: str, step: int, word: str) -> None:
    value = number(word)
    if value is not None:
        series.setdefault(name, {})[step] = value
