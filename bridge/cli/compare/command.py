"""`precision-bridge compare`: trains a sweep, or compares runs or one batch, or writes a twin."""

from __future__ import annotations

import argparse

from bridge.cli.compare.twin import DEFAULT_TWIN_RECIPE, write_twin
from bridge.cli.parser import add_json_option
from bridge.cli.run_arguments import add_run_arguments
from bridge.errors import RunConfigError

FORMS_OF_OPTION = {
    "--base": ("--twin",),
    "--gate": ("--runs",),
    "--output": ("--twin", "--runs"),
}
"""Option -> the forms in which it has an effect."""
EPILOG = """Without --runs, --gradients and --twin the words are those of scripts/compare.py.

--runs takes two words or more, the baseline first: folders of runs of ours, or logs of Megatron-LM,
Megatron Bridge or NeMo-RL, TensorBoard folders, histories of W&B or MLflow, golden values.
Exit code: 0 within the gate, 1 outside, 3 cannot tell.

--gradients takes two words without =: the recipes, the reference first. A recipe with other values
is one word in quotes: 'fp8_delayed fp8_margin=8'. Exit code: 0 inside, 1 outside, 3 cannot tell."""
OTHER_FORMS = """
    precision-bridge compare --runs bf16.log fp8.log              finished runs, or logs of others
    precision-bridge compare --gradients bf16_mixed fp8_current   one batch in two precisions
    precision-bridge compare --twin NAME --output twin.yaml       the same run in another precision

`precision-bridge compare --gradients --help` lists the options of all three.
"""


def run_hydra_arguments(words: list[str]) -> None:
    """Train with several recipes, and compare their losses.

    A verdict with an exit code ends the process. ``--help`` prints the other forms too.

    Args:
        words: The command line after the name of the command: overrides and flags of Hydra.
    """
    from bridge.front.compare import main_compare  # Hydra is heavy

    main_compare(words)
    if {"-h", "--help"} & set(words):
        print(OTHER_FORMS, end="")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the forms that Hydra does not parse."""
    add_run_arguments(parser)
    add_json_option(parser)
    form = parser.add_mutually_exclusive_group(required=True)
    help_text = "judge the losses of runs that are there, each a folder of ours or a log of others"
    form.add_argument("--runs", action="store_true", help=help_text)
    help_text = (
        "run one batch in two precisions, and compare every activation and gradient with a bound"
    )
    form.add_argument("--gradients", action="store_true", help=help_text)
    help_text = "write the same run in another precision, and prove that it is the same"
    form.add_argument("--twin", action="store_true", help=help_text)
    parser.add_argument(
        "--base",
        metavar="NAME",
        help=f"with --twin: the twin's recipe (default: {DEFAULT_TWIN_RECIPE})",
    )
    help_text = "with --runs: the share of the baseline's loss that a gap may reach (default: 1%%)"
    parser.add_argument("--gate", metavar="SHARE", help=help_text)
    help_text = (
        "with --twin: the file to write "
        "(default: standard output; --json prints the proof and needs a file); "
        "with --runs: the folder for comparison.md, comparison.json and comparison.png"
    )
    parser.add_argument("--output", metavar="FILE", help=help_text)
    parser.epilog = EPILOG


def run(args: argparse.Namespace) -> int | None:
    """Compare runs, or the activations and gradients of one batch, or write the twin of a run.

    Returns:
        The exit code of the comparison. None if a twin was written.
    """
    _refuse_options_of_other_forms(args)
    if args.runs:
        from bridge.cli.compare.runs import compare_runs

        return compare_runs(args)
    if args.gradients:
        from bridge.cli.compare.gradients import compare_gradients

        return compare_gradients(args)
    write_twin(args)
    return None


def _refuse_options_of_other_forms(args: argparse.Namespace) -> None:
    """Refuse an option that has no effect in the chosen form.

    Raises:
        RunConfigError: The command line has such an option.
    """
    form = "--twin"
    if args.runs:
        form = "--runs"
    elif args.gradients:
        form = "--gradients"
    for option, forms in FORMS_OF_OPTION.items():
        if getattr(args, option.lstrip("-")) is not None and form not in forms:
            raise RunConfigError(
                f"{option}: acts with {' and '.join(forms)} alone, got {form}. Leave {option} out."
            )
