"""`precision-bridge rehearse [OVERRIDES]`: trains a small copy of a run by Megatron on this CPU."""

import argparse
from dataclasses import replace

from bridge.cli.output import print_json, print_report
from bridge.cli.parser import add_json_option
from bridge.cli.run_answer import answer_to_dict, print_reading
from bridge.cli.run_arguments import add_run_arguments, read_run
from bridge.errors import RunConfigError
from bridge.extras import require_extra

MAX_PROCESSES = 4
"""The most processes of a rehearsal, since a small machine has to run them all."""
DEFAULT_LAYERS = 8
"""The most layers that are kept by default."""


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
        help=f"the most processes of a launch, 1 to {MAX_PROCESSES}",
    )
    parser.add_argument(
        "--layers", type=int, default=DEFAULT_LAYERS, help="the most layers that are kept"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 if something was left out"
    )


def run(args: argparse.Namespace) -> int:
    """Rehearse the run and print how the rehearsal ended.

    Returns:
        2 with errors, 1 under ``--strict`` with warnings or left-out settings, else 0.
    """
    if not 1 <= args.processes <= MAX_PROCESSES:
        rule = f"must be from 1 to {MAX_PROCESSES}"
        raise RunConfigError.of("--processes", rule, args.processes, f"Use {MAX_PROCESSES}.")
    if args.layers < 1:
        remedy = f"Use {DEFAULT_LAYERS}."
        raise RunConfigError.of("--layers", "must be at least 1", args.layers, remedy)
    require_extra("train", "precision-bridge rehearse")
    from bridge.rehearse.rehearsal_table import make_rehearsal_table, rehearsal_to_dict
    from bridge.rehearse.rehearse import rehearse

    run = read_run(args)
    rehearsal = rehearse(
        run, backend=args.backend, processes=args.processes, max_layers=args.layers
    )
    reading = run.reading.with_rehearsed_release(rehearsal.versions["mcore"])
    run = replace(run, reading=reading)
    if args.json:
        print_json(answer_to_dict(run, rehearsal_to_dict(rehearsal, strict=args.strict)))
    else:
        print_report(make_rehearsal_table(rehearsal))
        print_reading(run)
    return rehearsal.exit_code(strict=args.strict)
