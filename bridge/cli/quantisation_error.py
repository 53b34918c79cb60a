"""`precision-bridge quantisation-error NAME`: the quantisation errors of GEMM operands."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.cli.debug_log import DEBUG_LOG_TITLE, print_debug_log
from bridge.cli.output import print_answer, write_file
from bridge.cli.parser import add_json_option
from bridge.cli.run_arguments import add_run_arguments, get_file_argument, read_run
from bridge.errors import RunConfigError
from bridge.extras import require_extra
from bridge.precision.mode import format_label, get_scheme
from bridge.precision.precision_config import FIELDS
from bridge.precision.schemes import FP8_SCHEMES
from bridge.precision.yaml_text import to_yaml
from bridge.runtime.audit.quantisation import QUANTISATION_FILE, replace_non_finite, write_rows

if TYPE_CHECKING:
    from bridge.preflight.run import Run
    from bridge.registry.mixed_precision_config import MixedPrecisionConfig
    from bridge.runtime.audit.quantisation import QuantisationRow

DEFAULT_STEPS = 20
"""Optimizer steps before the measurement, if there is no checkpoint.

The gradients of fresh weights differ from the gradients of a trained model.
"""
MEASUREMENT_OPTIONS = ("checkpoint", "steps", "propose")
"""Options that have no effect with ``--debug-log``."""
HEAT_MAP_FILE = "quantisation.png"
STORAGE_FIELDS = tuple(name for name, field in FIELDS.items() if field.stores_weights)
"""Fields that a proposed recipe switches off.

Weights that are stored in low precision have one format, so rows of `modules` cannot change it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_run_arguments(parser)
    add_json_option(parser)
    parser.add_argument(
        "--checkpoint", metavar="FOLDER", help="weights to measure, as a run saved them"
    )
    help_text = (
        f"optimizer steps to take first "
        f"(default: {DEFAULT_STEPS}, or 0 with a checkpoint: its weights as they are)"
    )
    parser.add_argument("--steps", type=int, help=help_text)
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        help="write quantisation.csv and quantisation.png there",
    )
    help_text = (
        "read what Transformer Engine's debugger logged in a run, instead of measuring; "
        "1 where an early warning stands"
    )
    parser.add_argument("--debug-log", metavar="FOLDER", type=Path, help=help_text)
    help_text = (
        "write the recipe with a row of modules for each module whose operands lose more than a bit"
    )
    parser.add_argument("--propose", metavar="FILE", help=help_text)


def run(args: argparse.Namespace) -> int:
    """Measure a run, or read a log, and print a row for each layer and operand.

    Returns:
        1 if a log has an early warning, else 0.
    """
    if args.debug_log is not None:
        return _print_log(args)
    _measure_run(args)
    return 0


def _print_log(args: argparse.Namespace) -> int:
    """Print the rows of a debugger's log.

    Returns:
        1 if there is an early warning, else 0.

    Raises:
        RunConfigError: The command line has an option of a measurement.
    """
    from bridge.read.debug_log import read_debug_log

    for option in MEASUREMENT_OPTIONS:
        if getattr(args, option) is not None:
            raise RunConfigError(f"--{option}: has no effect with --debug-log. Leave one out.")
    plan = None
    if get_file_argument(args) is not None or args.overrides:
        plan = read_run(args).plan
    rows = read_debug_log(args.debug_log, plan)
    if args.out is not None:
        _write_files(args.out, rows, DEBUG_LOG_TITLE)
    return print_debug_log(args, rows)


def _write_files(folder: Path, rows: Sequence[QuantisationRow], title: str) -> None:
    """Write the rows as CSV, and their heat map."""
    from bridge.report.quantisation_picture import plot_quantisation

    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / QUANTISATION_FILE, rows)
    require_extra("train", "precision-bridge quantisation-error --out")
    plot_quantisation(folder / HEAT_MAP_FILE, rows, title=title)


def _measure_run(args: argparse.Namespace) -> None:
    """Measure a run on this machine, print its rows, and write a proposed recipe if asked for."""
    require_extra("train", "precision-bridge quantisation-error")
    from bridge.front.container import build_container, require_startable
    from bridge.report.quantisation_table import make_quantisation_table
    from bridge.training.measurements import measure_quantisation

    logging.getLogger("megatron").setLevel(logging.ERROR)
    if args.checkpoint is not None:
        args.overrides.append(f"checkpoint.load={Path(args.checkpoint).resolve()}")
    run = read_run(args)
    title = "no recipe"
    if run.precision is not None:
        title = format_label(run.precision)
    elif args.propose is not None:
        raise RunConfigError("--propose: needs a recipe. Add mixed_precision=NAME.")
    config = build_container(run)
    require_startable(config, run)
    rows = measure_quantisation(config, steps=_count_steps(args))
    if args.out is not None:
        _write_files(args.out, rows, title)
    content = [replace_non_finite(dataclasses.asdict(row)) for row in rows]
    print_answer(args, content, make_quantisation_table(rows, title=title))
    if args.out is not None and not args.json:
        print(f"Heat map and rows: {args.out}")
    if args.propose is not None and run.precision is not None:
        lines = _write_proposal(args.propose, rows, run, run.precision)
        stream = sys.stderr if args.json else sys.stdout
        print("\n".join(lines), file=stream)


def _count_steps(args: argparse.Namespace) -> int:
    """Return the optimizer steps before the measurement."""
    if args.steps is not None:
        return int(args.steps)
    if args.checkpoint is None:
        return DEFAULT_STEPS
    return 0


def _write_proposal(
    path: str, rows: list[QuantisationRow], run: Run, precision: MixedPrecisionConfig
) -> list[str]:
    """Write the recipe with the proposed rows of `modules`, and return lines about it.

    No file is written if no row is proposed.
    """
    from bridge.runtime.compare.proposal import (
        SCHEMES_BY_FINENESS,
        make_module_rows,
        propose_precisions,
    )

    capability = run.prediction.target.capability
    schemes = []
    for name in SCHEMES_BY_FINENESS:
        if capability is None or FP8_SCHEMES[name].runs_on(capability):
            schemes.append(name)
    proposed = propose_precisions(
        rows,
        scheme=get_scheme(precision),
        fp8_format=precision.fp8,
        num_layers=int(run.model["num_layers"]),
        schemes=schemes,
    )
    if not proposed:
        return [
            "Every operand is near the ratio of its format: "
            "no row is proposed, and no file is written."
        ]
    values = precision.to_dict()
    for name in STORAGE_FIELDS:
        if values.get(name):
            values[name] = False
    values["modules"] = [*make_module_rows(proposed), *values.get("modules", [])]
    recipe = type(precision).from_dict(values)
    recipe.finalize()
    title = (
        f"{format_label(precision)}, with rows for the modules whose operands lost more than a bit"
    )
    comment = f"# {title}.\n"
    write_file(path, comment + to_yaml(recipe), "--propose")
    return [*map(str, proposed), f"Recipe: {path}"]
