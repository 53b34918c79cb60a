"""Tiny runs on Transformer Engine's Python: ``python -m tests.runtime.megatron.te_cpu_runs PLAN.json``.

The plan: scheme -> name of the run -> arguments of `tiny`. All schemes must run on one GPU.
"""

import json
import sys
from pathlib import Path

from bridge.preflight.gpu_for_te_cpu import declare


def main(plan: Path) -> None:
    """Make the runs, each in its folder next to the plan; places in them are relative to it."""
    schemes = json.loads(plan.read_text())
    declare(schemes=schemes)
    from bridge.training.loop import pretrain
    from tests.training.loop_tiny import tiny

    for scheme, runs in schemes.items():
        for name, arguments in runs.items():
            places = {key: str(plan.parent / value) for key, value in arguments.items() if key in ("save", "load")}
            config = tiny(low=scheme, **{**arguments, **places})
            config.precision_backend = "te_cpu"
            pretrain(config, run_dir=plan.parent / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
