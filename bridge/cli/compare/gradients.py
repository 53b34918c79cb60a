"""`precision-bridge compare --gradients A B`: does one batch differ by roundings alone?"""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

from bridge.cli.output import print_json, print_report
from bridge.cli.run_arguments import RunArguments, read_run
from bridge.errors import RunConfigError
from bridge.extras import require_extra
from bridge.precision.mode import format_label

if TYPE_CHECKING:
    from bridge.training.config import ConfigContainer

EXIT_CODES = {"inside": 0, "outside": 1, "cannot tell": 3}


def check_gradients(args: argparse.Namespace) -> int:
    """Print where the activations and gradients of one batch differ by more than roundings.

    Return 1 where it does, 3 where that is not decided.
    """
    require_extra("train", "precision-bridge compare --gradients")
    from bridge.front.decode import build_container
    from bridge.report.gradient_band import band_to_dict, describe_band, make_band_table
    from bridge.training.measurements import check_gradients as check

    logging.getLogger("megatron").setLevel(logging.ERROR)
    recipes = []
    for word in RunArguments.from_args(args).overrides:
        if "=" not in word.partition(" ")[0]:
            recipes.append(word)
    if len(recipes) != 2:
        remedy = "Write precision-bridge compare --gradients bf16_mixed fp8_current."
        raise RunConfigError.of("--gradients", "compares two recipes", recipes, remedy)
    others = [word for word in args.overrides if word not in recipes]
    labels: list[str] = []
    configs: list[ConfigContainer] = []
    for name, *values in map(str.split, recipes):
        words = [*others, f"mixed_precision={name}"]
        for value in values:
            words.append(f"mixed_precision.{value}")
        run = read_run(argparse.Namespace(**{**vars(args), "overrides": words}))
        label = "no recipe"
        if run.precision is not None:
            label = format_label(run.precision)
        labels.append(label)
        configs.append(build_container(run))
    band = check(*configs)
    if args.json:
        print_json({"recipes": labels, **band_to_dict(band)})
    else:
        print_report(make_band_table(band, title=f"{labels[1]} against {labels[0]}"))
        print(describe_band(band))
    return EXIT_CODES[band.verdict]
