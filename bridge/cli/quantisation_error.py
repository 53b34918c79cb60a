"""`precision-bridge quantisation-error NAME`: what a recipe's quantisation does to a model's matmul operands."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser"]

STEPS = 20
"""Steps without a checkpoint: fresh weights say little about gradients."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "quantisation-error", help="measure what FP8 or FP4 does to a model's operands, per layer"
    )
    parser.add_argument("name", help="recipe, in any spelling, or an alias")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="as for scripts/train.py, model=gpt_tiny say")
    parser.add_argument("--config-path", metavar="FOLDER", help="the configs of the training script (default: conf)")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="weights to measure, as a run saved them")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"optimizer steps to take first (default: {STEPS}, or 0 with a checkpoint: its weights as they are)",
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="write quantisation.csv and quantisation.png there")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Measure and print."""
    from bridge.cli.run_values import as_overrides
    from bridge.front import compose
    from bridge.front.loader import config_folder
    from bridge.report.quantisation import plot_quantisation, quantisation_table, write_quantisation
    from bridge.report.table import show  # rich is heavy
    from bridge.training.quantisation import measure_quantisation

    logging.getLogger("megatron").setLevel(logging.ERROR)
    words = [*as_overrides([chosen.name]), *chosen.overrides]
    if chosen.checkpoint is not None:
        words.append(f"checkpoint.load={Path(chosen.checkpoint).resolve()}")
    config = compose(words, config_path=config_folder(chosen.config_path))
    steps = chosen.steps if chosen.steps is not None else 0 if chosen.checkpoint is not None else STEPS
    rows = measure_quantisation(config, steps=steps)
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        write_quantisation(chosen.out / "quantisation.csv", rows)
        plot_quantisation(chosen.out / "quantisation.png", rows, title=chosen.name)
    if chosen.json:
        print(json.dumps([_finite(dataclasses.asdict(row)) for row in rows], indent=2))
        return
    show(quantisation_table(rows, title=chosen.name))
    if chosen.out is not None:
        print(f"Heat map and rows: {chosen.out}")


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with numbers that JSON has: None for infinity and NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }
