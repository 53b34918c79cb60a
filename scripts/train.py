"""Train a model in the precision of a recipe.

    python scripts/train.py mixed_precision=bf16_mixed
    python scripts/train.py mixed_precision=bf16_with_fp8_current_scaling_mixed mixed_precision.fp8=e4m3 --cfg job
    python scripts/train.py --multirun mixed_precision=bf16_mixed,fp16_mixed

`--help` lists the groups and their options. The run folder, ``outputs/<date>/<time>``, holds everything about the run.
`precision-bridge train` is the same command.
"""

from pathlib import Path

from bridge.front.train import main_train

if __name__ == "__main__":
    main_train(config_path=Path(__file__).resolve().parents[1] / "conf")
