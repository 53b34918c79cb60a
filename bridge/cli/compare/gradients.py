"""`precision-bridge compare --gradients A B`: do one batch's activations and gradients differ by roundings alone?"""

import argparse
import logging

from bridge.cli.output import print_json, show
from bridge.cli.run_arguments import RunWords, read_run
from bridge.errors import RunConfigError
from bridge.extras import require_extra
from bridge.precision.mode import label_of

EXIT_CODES = {"inside": 0, "outside": 1, "cannot tell": 3}


def check_gradients(chosen: argparse.Namespace) -> int:
    """Print where one batch differs by more than roundings; return 1 where it does, 3 where that is not decided."""
    require_extra("train", "precision-bridge compare --gradients")
    from bridge.front.decode import container
    from bridge.report.gradients import band_dict, band_sentence, band_table
    from bridge.training.passes import check_gradients as check

    logging.getLogger("megatron").setLevel(logging.ERROR)
    recipes = [word for word in RunWords.of(chosen).overrides if "=" not in word.partition(" ")[0]]
    if len(recipes) != 2:
        remedy = "Write precision-bridge compare --gradients bf16_mixed fp8_current."
        raise RunConfigError.of("--gradients", "compares two recipes", recipes, remedy)
    others = [word for word in chosen.overrides if word not in recipes]
    runs = []
    for name, *values in map(str.split, recipes):
        words = [
            *others,
            f"mixed_precision={name}",
            *(f"mixed_precision.{value}" for value in values),
        ]
        runs.append(read_run(argparse.Namespace(**{**vars(chosen), "overrides": words})))
    labels = [label_of(run.precision) if run.precision is not None else "no recipe" for run in runs]
    found = check(*map(container, runs))
    if chosen.json:
        print_json({"recipes": labels, **band_dict(found)})
    else:
        show(band_table(found, title=f"{labels[1]} against {labels[0]}"))
        print(band_sentence(found))
    return EXIT_CODES[found.verdict]
