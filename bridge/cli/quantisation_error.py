"""`precision-bridge quantisation-error NAME`: what a recipe's quantisation does to a model's matmul operands."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.arguments import add_run_command, print_json, read_run

if TYPE_CHECKING:
    import argparse

STEPS = 20
"""Steps without a checkpoint: fresh weights say little about gradients."""


def add_parsers(commands: Any) -> None:
    """Add the command."""
    text = "measure what FP8 or FP4 does to a model's operands, per layer"
    parser = add_run_command(commands, "quantisation-error", _quantisation_error, text)
    parser.add_argument("--checkpoint", metavar="FOLDER", help="weights to measure, as a run saved them")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"optimizer steps to take first (default: {STEPS}, or 0 with a checkpoint: its weights as they are)",
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="write quantisation.csv and quantisation.png there")


def _quantisation_error(chosen: argparse.Namespace) -> None:
    """Measure and print."""
    from bridge.front.loader import container
    from bridge.report.quantisation import plot_quantisation, quantisation_table, write_quantisation
    from bridge.report.table import show  # rich is heavy
    from bridge.training.metrics import finite
    from bridge.training.quantisation import measure_quantisation

    logging.getLogger("megatron").setLevel(logging.ERROR)
    if chosen.checkpoint is not None:
        chosen.overrides.append(f"checkpoint.load={Path(chosen.checkpoint).resolve()}")
    run = read_run(chosen)
    title = run.precision.label if run.precision is not None else "no recipe"
    steps = chosen.steps if chosen.steps is not None else 0 if chosen.checkpoint is not None else STEPS
    rows = measure_quantisation(container(run), steps=steps)
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        write_quantisation(chosen.out / "quantisation.csv", rows)
        plot_quantisation(chosen.out / "quantisation.png", rows, title=title)
    if chosen.json:
        print_json([finite(dataclasses.asdict(row)) for row in rows])
        return
    show(quantisation_table(rows, title=title))
    if chosen.out is not None:
        print(f"Heat map and rows: {chosen.out}")
