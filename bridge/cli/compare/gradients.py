"""`precision-bridge compare --gradients A B`: one batch in two precisions, compared with bounds."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.cli.output import print_json, print_report
from bridge.cli.run_arguments import RunArguments, read_run
from bridge.errors import RunConfigError
from bridge.extras import require_extra
from bridge.precision.mode import format_label

if TYPE_CHECKING:
    from bridge.training.config import ConfigContainer

EXIT_CODES = {"inside": 0, "outside": 1, "cannot tell": 3}
"""Verdict -> the exit code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _LabelledConfig:
    """The run of the command line in one of the two precisions."""

    label: str
    """The precision as a short text."""
    config: ConfigContainer


def compare_gradients(args: argparse.Namespace) -> int:
    """Print where the activations and gradients of a batch differ by more than roundings.

    Returns:
        1 if they differ by more, 3 if the comparison cannot decide, else 0.

    Raises:
        RunConfigError: The command line does not name two recipes.
    """
    require_extra("train", "precision-bridge compare --gradients")
    from bridge.report.gradient_band import band_to_dict, describe_band, make_band_table
    from bridge.training.measurements import check_gradients

    logging.getLogger("megatron").setLevel(logging.ERROR)
    recipes = _find_recipes(args)
    reference = _read_config(args, recipes, recipes[0])
    tested = _read_config(args, recipes, recipes[1])
    band = check_gradients(reference.config, tested.config)
    if args.json:
        print_json({"recipes": [reference.label, tested.label], **band_to_dict(band)})
    else:
        print_report(make_band_table(band, title=f"{tested.label} against {reference.label}"))
        print(describe_band(band))
    return EXIT_CODES[band.verdict]


def _find_recipes(args: argparse.Namespace) -> list[str]:
    """Return the two arguments that name a recipe, with the values that follow it in quotes.

    Raises:
        RunConfigError: There are fewer or more than two.
    """
    recipes = []
    for argument in RunArguments.from_args(args).overrides:
        name = argument.partition(" ")[0]
        if "=" not in name:
            recipes.append(argument)
    if len(recipes) != 2:
        remedy = "Write precision-bridge compare --gradients bf16_mixed fp8_current."
        raise RunConfigError.of("--gradients", "compares two recipes", recipes, remedy)
    return recipes


def _read_config(args: argparse.Namespace, recipes: Sequence[str], recipe: str) -> _LabelledConfig:
    """Return the config of the run in one of the recipes.

    Args:
        args: The parsed command line.
        recipes: Both arguments that name a recipe. All other arguments are overrides of both runs.
        recipe: The argument of this run, such as "fp8_delayed fp8_margin=8".
    """
    from bridge.front.container import build_container

    overrides = [argument for argument in args.overrides if argument not in recipes]
    name, *values = recipe.split()
    overrides.append(f"mixed_precision={name}")
    for value in values:
        overrides.append(f"mixed_precision.{value}")
    run = read_run(argparse.Namespace(**{**vars(args), "overrides": overrides}))
    label = "no recipe"
    if run.precision is not None:
        label = format_label(run.precision)
    return _LabelledConfig(label=label, config=build_container(run))
