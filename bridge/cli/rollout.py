"""`precision-bridge manifest RUN --rollout`: training against rollout, and the config that would agree."""

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
"""Value of the option where the run's file states its rollout."""
CONFIG_SUFFIX = ".json"
"""The end of an option that names a file instead of flags."""


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
    """Print how rollout differs from training; return 1 where it does, else 0."""
    from bridge.convert.rollout.agreement import list_agreements
    from bridge.convert.rollout.comparison import DIFFERS, compare_rollout

    run = read_run(args, strict=False)
    found = compare_rollout(run, _read_rollout(args, run), _find_model_type(args))
    agreeing = list_agreements(found)
    if args.json:
        content = {**found.to_dict(), "agreeing": [one.to_dict() for one in agreeing]}
        print_json(answer_to_dict(run, content))
    else:
        from bridge.convert.rollout.table import make_rollout_table

        print_report(make_rollout_table(found, run.name, agreeing))
        print_reading(run)
    if found.verdict == DIFFERS:
        return 1
    return 0


def _read_rollout(args: argparse.Namespace, run: Run) -> Rollout:
    from bridge.convert.rollout.frameworks import read_rollout
    from bridge.convert.rollout.served_rollout import (
        add_serving_config,
        make_engine_rollout,
        parse_engine_flags,
    )

    words = args.rollout
    if words == STATED_IN_THE_RUN:
        return read_rollout(run)
    if not words.endswith(CONFIG_SUFFIX):
        return parse_engine_flags(words, args.system)
    stated = make_engine_rollout(args.system)
    if run.reading.generation:
        stated = read_rollout(run)
    return add_serving_config(stated, Path(words))


def _find_model_type(args: argparse.Namespace) -> str | None:
    """Return the `model_type` of the command line, else that of the rollout's config.json.

    It is None where neither states one, or the config.json is of a family that is not known.
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


def refuse_run_folder(args: argparse.Namespace) -> None:
    """Refuse options of the other answers of `manifest`."""
    for option in ("run_folder", "against", "out"):
        value = getattr(args, option)
        if value is not None:
            name = {"run_folder": "--run"}.get(option, f"--{option}")
            rule = "is no option of the comparison with a rollout"
            raise RunConfigError.of(name, rule, str(value), "Drop it, or drop --rollout.")
