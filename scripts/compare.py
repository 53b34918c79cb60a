"""Train the same model on the same data with several recipes, and say which losses are within the gate.

    python scripts/compare.py mixed_precision=bf16_mixed,fp8_current,mxfp8 seeds=3
    python scripts/compare.py mixed_precision=bf16_mixed,nvfp4 seeds=5 gate=0.5% model=gpt_tiny hydra/launcher=joblib

The first recipe is the baseline. `precision-bridge compare` is the same command.
"""

from pathlib import Path

from bridge.front.compare import main_compare

if __name__ == "__main__":
    main_compare(config_path=Path(__file__).resolve().parents[1] / "conf")
