"""`precision-bridge plan [FILE ...] [OVERRIDES]`: the formats that a run computes and stores in."""

from __future__ import annotations

import argparse

from bridge.cli.many_runs import add_brief_option, get_many_paths
from bridge.cli.parser import add_json_option, refuse_options_without
from bridge.cli.run_arguments import add_debug_features_option, add_run_arguments
from bridge.errors import RunConfigError

DEBUG_FEATURES_OPTIONS = ("--purpose", "--every")
"""Options that have an effect only with ``--write-debug-features``."""
MODULES_OPTIONS = ("--file", "--write")
"""Options that have an effect only with ``--modules``."""
ONE_RUN_OPTIONS = ("align", "modules", "against", "csv", "picture", "write_debug_features")
"""Options that choose another form than the table. Each form shows one run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_run_arguments(parser)
    add_debug_features_option(parser)
    add_brief_option(parser)
    add_json_option(parser, "print JSON, equal layers folded")
    answer = parser.add_mutually_exclusive_group()
    help_text = "check every GEMM's dimensions, and say what to pad tokens to, instead"
    answer.add_argument("--align", action="store_true", help=help_text)
    help_text = (
        "show which modules each row of modules, or each matcher of Megatron's file, takes, instead"
    )
    answer.add_argument("--modules", action="store_true", help=help_text)
    answer.add_argument(
        "--against", metavar="NAME", help="compare with another recipe, or with a YAML file"
    )
    help_text = "print CSV, one line per layer, module and GEMM or tensor"
    answer.add_argument("--csv", action="store_true", help=help_text)
    help_text = "draw it: layers down, tensors across (png, svg or pdf)"
    answer.add_argument("--picture", metavar="FILE", help=help_text)
    help_text = "write a features file for Transformer Engine's debugger instead"
    answer.add_argument("--write-debug-features", metavar="FILE", help=help_text)
    help_text = (
        "with --write-debug-features: measure the operands, disable FP8 and FP4 where the plan "
        "has high precision, or fake the plan's rounding in a run in BF16 (default: measure)"
    )
    parser.add_argument("--purpose", choices=("measure", "disable", "fake"), help=help_text)
    help_text = "with --write-debug-features: steps between two measurements (default: 100)"
    parser.add_argument("--every", type=int, metavar="STEPS", help=help_text)
    help_text = (
        "with --modules: a file for --te-precision-config-file, as it stands, "
        "in a run without rows of modules"
    )
    parser.add_argument("--file", metavar="FILE", help=help_text)
    help_text = "with --modules: write that file for this run, one per stage where they differ"
    parser.add_argument("--write", metavar="FILE", help=help_text)


def run(args: argparse.Namespace) -> int:
    """Print or write the form of the plan that the options choose.

    Returns:
        2 if the answer is about a run whose check has an error, else 0.
    """
    _refuse_options_without_effect(args)
    if args.modules:
        from bridge.cli.plan.modules import print_modules

        return print_modules(args)
    if args.align:
        from bridge.cli.plan.alignment import print_alignment

        return print_alignment(args)
    if args.write_debug_features:
        from bridge.cli.plan.debug_features import write_features

        write_features(args)
        return 0
    if args.picture:
        from bridge.cli.plan.picture import write_picture

        write_picture(args)
        return 0
    if args.csv:
        from bridge.cli.plan.csv_rows import print_csv

        print_csv(args)
        return 0
    if args.against:
        from bridge.cli.plan.difference import print_difference

        print_difference(args)
        return 0
    paths = get_many_paths(args)
    if paths:
        from bridge.cli.plan.shares import print_shares

        return print_shares(args, paths)
    from bridge.cli.plan.table import print_plan

    return print_plan(args)


def _refuse_options_without_effect(args: argparse.Namespace) -> None:
    """Refuse options that have no effect in the chosen form.

    Raises:
        RunConfigError: The command line has such an option.
    """
    refuse_options_without(args, "--modules", MODULES_OPTIONS)
    refuse_options_without(args, "--write-debug-features", DEBUG_FEATURES_OPTIONS)
    if not args.brief:
        return
    for name in ONE_RUN_OPTIONS:
        if getattr(args, name):
            option = name.replace("_", "-")
            raise RunConfigError(
                f"--{option}: is about one run, and --brief about several. Leave one of them out."
            )
