"""`precision-bridge gradients A B`: do one batch's activations and gradients differ by roundings alone?"""

import argparse
import logging
from typing import Any

from bridge.cli.arguments import add_run_command, print_json, read_run, show
from bridge.errors import RunConfigError
from bridge.extras import require_extra
from bridge.precision.mode import label_of

EXIT_CODES = {"inside": 0, "outside": 1, "cannot tell": 3}


def add_parsers(commands: Any) -> None:
    """Add the command."""
    text = "run one batch in two precisions, and compare every activation and gradient with a bound"
    parser = add_run_command(commands, "gradients", _gradients, text)
    parser.epilog = (
        "Two words without = are the recipes, the reference first. A recipe with other values is one word in quotes: "
        "'fp8_delayed fp8_margin=8'. Exit code: 0 inside, 1 outside, 3 cannot tell."
    )


def _gradients(chosen: argparse.Namespace) -> int:
    require_extra("train", "precision-bridge gradients")
    from bridge.front.decode import container
    from bridge.report.gradients import band_dict, band_sentence, band_table
    from bridge.training.passes import check_gradients

    logging.getLogger("megatron").setLevel(logging.ERROR)
    recipes = [word for word in chosen.overrides if "=" not in word.partition(" ")[0]]
    if len(recipes) != 2:
        remedy = "Write precision-bridge gradients bf16_mixed fp8_current."
        raise RunConfigError.of("gradients", "compares two recipes", recipes, remedy)
    others = [word for word in chosen.overrides if word not in recipes]
    runs = []
    for name, *values in map(str.split, recipes):
        words = [*others, f"mixed_precision={name}", *(f"mixed_precision.{value}" for value in values)]
        runs.append(read_run(argparse.Namespace(**{**vars(chosen), "overrides": words})))
    labels = [label_of(run.precision) if run.precision is not None else "no recipe" for run in runs]
    found = check_gradients(*map(container, runs))
    if chosen.json:
        print_json({"recipes": labels, **band_dict(found)})
    else:
        show(band_table(found, title=f"{labels[1]} against {labels[0]}"))
        print(band_sentence(found))
    return EXIT_CODES[found.verdict]
