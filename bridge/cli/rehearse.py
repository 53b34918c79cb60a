"""`precision-bridge rehearse [OVERRIDES]`: a run, shrunk, in Megatron's classes on this CPU."""

import argparse
from dataclasses import replace

from bridge.cli.output import print_json, print_report
from bridge.cli.parser import add_json_option
from bridge.cli.run_answer import answer_to_dict, print_reading
from bridge.cli.run_arguments import add_run_arguments, read_run
from bridge.errors import RunConfigError
from bridge.extras import require_extra

MAX_PROCESSES = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_run_arguments(parser)
    add_json_option(parser)
    help_of_backend = (
        "te_cpu: Transformer Engine's own Python on this CPU (default); "
        "emulated: this project's layers"
    )
    parser.add_argument(
        "--backend", choices=("te_cpu", "emulated"), default="te_cpu", help=help_of_backend
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=MAX_PROCESSES,
        help="the most processes of a launch, 1 to 4",
    )
    parser.add_argument("--layers", type=int, default=8, help="the most layers that are kept")
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 where something was left out"
    )


def run(args: argparse.Namespace) -> int:
    """Print the answer.

    Return 2 where something went wrong, 1 with warnings under --strict, else 0.
    """
    if not 1 <= args.processes <= MAX_PROCESSES:
        raise RunConfigError.of(
            "--processes", f"must be from 1 to {MAX_PROCESSES}", args.processes, "Use 4."
        )
    if args.layers < 1:
        raise RunConfigError.of("--layers", "must be at least 1", args.layers, "Use 8.")
    require_extra("train", "precision-bridge rehearse")
    from bridge.rehearse.rehearsal_table import (  # rich is heavy
        make_rehearsal_table,
        rehearsal_to_dict,
    )
    from bridge.rehearse.rehearse import rehearse

    values = read_run(args)
    rehearsal = rehearse(
        values, backend=args.backend, processes=args.processes, max_layers=args.layers
    )
    values = replace(
        values, reading=values.reading.with_rehearsed_release(rehearsal.versions["mcore"])
    )
    if args.json:
        print_json(answer_to_dict(values, rehearsal_to_dict(rehearsal, strict=args.strict)))
    else:
        print_report(make_rehearsal_table(rehearsal))
        print_reading(values)
    return rehearsal.exit_code(strict=args.strict)
