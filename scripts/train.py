"""Train a model in the precision of a recipe.

    python scripts/train.py mixed_precision=bf16_mixed
    python scripts/train.py mixed_precision=bf16_with_fp8_current_scaling_mixed mixed_precision.fp8=e4m3 --cfg job
    python scripts/train.py --multirun mixed_precision=bf16_mixed,fp16_mixed

`--help` lists the groups and their options. The run folder, ``outputs/<date>/<time>``, holds everything about the run.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.front import main
from bridge.front.checked import require_checked
from bridge.front.record import record
from bridge.training.config import runtime_config_update

if TYPE_CHECKING:
    from bridge.training.config import ConfigContainer

STOPPED = 130
"""Exit code of a run that Ctrl-C or a termination signal ended before its last step; everything is written."""
CONF = Path(__file__).resolve().parents[1] / "conf"

log = logging.getLogger("train")


def train(config: ConfigContainer, run_dir: Path) -> None:
    """Check the run, write its precision into the configs, keep what was done, and train."""
    require_checked(config, run_dir, log)
    report = runtime_config_update(config)
    if report is not None:
        report.log(log, file=run_dir / "sync.txt")
    record(run_dir, config, report)
    from bridge.training.loop import pretrain  # imports torch and Megatron, which `--help` and `--cfg` can do without

    if pretrain(config, run_dir=run_dir).stopped_early:
        sys.exit(STOPPED)  # not 0: who waits for the run has to see that it is not done


if __name__ == "__main__":
    main(train, config_path=CONF)
