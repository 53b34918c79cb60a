"""`precision-bridge plan [FILE ...] [OVERRIDES]`: the formats that a run computes and stores in."""

from __future__ import annotations

import argparse

from bridge.cli.parser import add_json, require_option
from bridge.cli.run_arguments import add_debug_features, add_run_arguments
from bridge.cli.several import add_several_arguments, paths_of_several
from bridge.errors import RunConfigError

DEBUG_FEATURES_OPTIONS = ("--purpose", "--every")
"""Options that act with --write-debug-features alone."""
MODULES_OPTIONS = ("--file", "--write")
"""Options that act with --modules alone."""
ABOUT_ONE = ("align", "modules", "against", "csv", "picture", "write_debug_features")
"""Options that choose another answer than the table; each is about one run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_run_arguments(parser)
    add_debug_features(parser)
    add_several_arguments(parser)
    add_json(parser, "print JSON, equal layers folded")
    answer = parser.add_mutually_exclusive_group()
    text = "check every GEMM's dimensions, and say what to pad tokens to, instead"
    answer.add_argument("--align", action="store_true", help=text)
    text = (
        "show which modules each row of modules, or each matcher of Megatron's file, takes, instead"
    )
    answer.add_argument("--modules", action="store_true", help=text)
    answer.add_argument(
        "--against", metavar="NAME", help="compare with another recipe, or with a YAML file"
    )
    text = "print CSV, one line per layer, module and GEMM or tensor"
    answer.add_argument("--csv", action="store_true", help=text)
    text = "draw it: layers down, tensors across (png, svg or pdf)"
    answer.add_argument("--picture", metavar="FILE", help=text)
    text = "write a features file for Transformer Engine's debugger instead"
    answer.add_argument("--write-debug-features", metavar="FILE", help=text)
    text = (
        "with --write-debug-features: measure the operands, disable FP8 and FP4 where the plan "
        "has high precision, or fake the plan's rounding in a run in BF16 (default: measure)"
    )
    parser.add_argument("--purpose", choices=("measure", "disable", "fake"), help=text)
    text = "with --write-debug-features: steps between two measurements (default: 100)"
    parser.add_argument("--every", type=int, metavar="STEPS", help=text)
    text = (
        "with --modules: a file for --te-precision-config-file, as it stands, "
        "in a run without rows of modules"
    )
    parser.add_argument("--file", metavar="FILE", help=text)
    text = "with --modules: write that file for this run, one per stage where they differ"
    parser.add_argument("--write", metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    """Print the answer; return 2 where it is shown with an error of the run's check, else 0."""
    require_option(args, "--modules", MODULES_OPTIONS)
    require_option(args, "--write-debug-features", DEBUG_FEATURES_OPTIONS)
    for name in ABOUT_ONE:
        if args.brief and getattr(args, name):
            option = name.replace("_", "-")
            raise RunConfigError(
                f"--{option}: is about one run, and --brief about several. Leave one of them out."
            )
    if args.modules:
        from bridge.cli.plan.modules import show_modules

        return show_modules(args)
    if args.align:
        from bridge.cli.plan.alignment import show_alignment

        return show_alignment(args)
    if args.write_debug_features:
        from bridge.cli.plan.debug_features import write_features

        write_features(args)
        return 0
    from bridge.cli.plan import table

    if args.picture:
        table.draw_plan(args)
    elif args.csv:
        table.print_csv(args)
    elif args.against:
        table.show_difference(args)
    else:
        paths = paths_of_several(args)
        if not paths:
            return table.show_plan(args)
        from bridge.cli.plan.share import show_shares

        return show_shares(args, paths)
    return 0
