"""`precision-bridge manifest RUN --rollout`: compares training with rollout; configs that agree."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.cli.output import print_json, print_report
from bridge.cli.run_answer import answer_to_dict, print_reading
from bridge.cli.run_arguments import read_run
from bridge.errors import RunConfigError

if TYPE_CHECKING:
    from bridge.convert.rollout.engine import Rollout
    from bridge.preflight.run import Run

STATED_IN_THE_RUN = ""
"""Value of the option without an argument: the run's file describes the rollout."""
CONFIG_SUFFIX = ".json"
"""The suffix of an argument that is a file. Other arguments are flags."""
OTHER_ANSWER_OPTIONS = {"run_folder": "--run", "against": "--against", "out": "--out"}
"""Argument of another answer of `manifest` -> its option."""


def add_rollout_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that asks for the comparison with a rollout."""
    parser.add_argument(
        "--rollout",
        nargs="?",
        const=STATED_IN_THE_RUN,
        metavar="CONFIG|FLAGS",
        help="compare training with rollout: that of the run's file, a config.json, or 'vllm serve --quantization fp8'",
    )


def print_rollout_comparison(args: argparse.Namespace) -> int:
    """Print the differences between rollout and training, and the configs that would agree.

    Returns:
        1 if rollout differs from training, else 0.

    Raises:
        RunConfigError: The command line has an option of another answer, or states no rollout.
    """
    _refuse_options_of_other_answers(args)
    from bridge.convert.rollout.agreement import list_agreements
    from bridge.convert.rollout.comparison import DIFFERS, compare_rollout

    run = read_run(args, strict=False)
    comparison = compare_rollout(run, _read_rollout(args, run), _find_model_type(args))
    agreements = list_agreements(comparison)
    if args.json:
        agreeing = [agreement.to_dict() for agreement in agreements]
        content = {**comparison.to_dict(), "agreeing": agreeing}
        print_json(answer_to_dict(run, content))
    else:
        from bridge.convert.rollout.table import make_rollout_table

        print_report(make_rollout_table(comparison, run.name, agreements))
        print_reading(run)
    if comparison.verdict == DIFFERS:
        return 1
    return 0


def _read_rollout(args: argparse.Namespace, run: Run) -> Rollout:
    """Return the rollout of the run's file, of engine flags, or of a config.json."""
    from bridge.convert.rollout.frameworks import read_rollout
    from bridge.convert.rollout.served_rollout import (
        add_serving_config,
        make_engine_rollout,
        parse_engine_flags,
    )

    argument = args.rollout
    if argument == STATED_IN_THE_RUN:
        return read_rollout(run)
    if not argument.endswith(CONFIG_SUFFIX):
        return parse_engine_flags(argument, args.system)
    stated = make_engine_rollout(args.system)
    if run.reading.generation:
        stated = read_rollout(run)
    return add_serving_config(stated, Path(argument))


def _find_model_type(args: argparse.Namespace) -> str | None:
    """Return the `model_type` of the command line, or else of the rollout's config.json.

    None if neither states a `model_type`, or if the config.json has an unknown family.
    """
    if args.model_type is not None:
        return str(args.model_type)
    if not args.rollout.endswith(CONFIG_SUFFIX):
        return None
    from bridge.convert.rollout.served_rollout import read_model_type
    from bridge.convert.serving.module_names import FAMILY_BY_TYPE

    model_type = read_model_type(Path(args.rollout))
    if model_type in FAMILY_BY_TYPE:
        return model_type
    return None


def _refuse_options_of_other_answers(args: argparse.Namespace) -> None:
    """Refuse options of the other answers of `manifest`.

    Raises:
        RunConfigError: The command line has such an option.
    """
    for argument, option in OTHER_ANSWER_OPTIONS.items():
        value = getattr(args, argument)
        if value is not None:
            rule = "is no option of the comparison with a rollout"
            raise RunConfigError.of(option, rule, str(value), "Drop it, or drop --rollout.")
