"""`precision-bridge recipes [NAME [OTHER]]`: the list of recipes, one recipe, or a difference."""

from __future__ import annotations

import argparse

from bridge.cli.output import print_json
from bridge.cli.parser import add_json_option, refuse_options_without
from bridge.cli.recipes.difference import print_difference
from bridge.cli.recipes.recipe_list import print_recipe_list
from bridge.cli.recipes.show import format_fields_by_subject, print_recipe
from bridge.errors import RunConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    help_text = (
        "recipe, in any spelling, or an alias: show the fields that it states, "
        "and those that follow from them"
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help=help_text)
    help_text = "another recipe: show the fields in which the two differ"
    parser.add_argument("other", metavar="OTHER", nargs="?", help=help_text)
    add_json_option(parser)
    parser.add_argument("--tag", help="list only the recipes with this tag (fp8, bf16, mxfp8, ...)")
    parser.add_argument(
        "--config-dir", metavar="FOLDER", help="a folder with YAML recipes in mixed_precision/"
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--stated", action="store_true", help="of one recipe: only the fields that it states"
    )
    shown.add_argument("--all", action="store_true", help="of one recipe: every field, by subject")
    help_text = "show which recipe runs on which GPU, with which CUDA and Transformer Engine"
    parser.add_argument("--support", action="store_true", help=help_text)
    help_text = "with --support: one target only (h100x8,te2.8,cuda12.9), with the reasons"
    parser.add_argument("--target", metavar="TARGET", help=help_text)
    parser.add_argument(
        "--markdown", action="store_true", help="with --support: print a Markdown table"
    )
    help_text = "print the JSON Schema of a recipe in YAML, or of a run's file, for editors"
    parser.add_argument(
        "--schema", choices=("recipe", "run"), nargs="?", const="recipe", help=help_text
    )
    parser.epilog = format_fields_by_subject()


def run(args: argparse.Namespace) -> None:
    """Print the list, a recipe, the difference of two recipes, their GPUs, or a JSON schema."""
    refuse_options_without(args, "--support", ("--target", "--markdown"))
    _refuse_arguments_without_effect(args)
    if args.schema is not None:
        from bridge.front.json_schema import SCHEMAS  # only editors need a schema

        print_json(SCHEMAS[args.schema]())
        return
    if args.support:
        from bridge.cli.recipes.support import print_support  # evaluates every rule for every GPU

        print_support(args)
    elif args.other is not None:
        print_difference(args.name, args.other, config_dir=args.config_dir, as_json=args.json)
    elif args.name is not None:
        print_recipe(args, args.name)
    else:
        print_recipe_list(args)


def _refuse_arguments_without_effect(args: argparse.Namespace) -> None:
    """Refuse options and names of recipes that would have no effect.

    Raises:
        RunConfigError: The command line has such an argument.
    """
    is_about_one = args.name is not None and args.other is None and not args.support
    for option in ("stated", "all"):
        if getattr(args, option) and not is_about_one:
            raise RunConfigError(
                f"--{option}: is about one recipe. Write precision-bridge recipes NAME --{option}."
            )
    list_option = "--tag"
    if args.support:
        list_option = "--support"
    if args.name is not None and (args.support or args.tag is not None):
        raise RunConfigError(
            f"{list_option}: lists recipes, got the name {args.name!r} too. Leave one of them out."
        )
    if args.schema is not None and (args.name is not None or args.support):
        raise RunConfigError(
            "--schema: is about no recipe by its name. Write precision-bridge recipes --schema."
        )
    if args.support and args.tag is not None:
        raise RunConfigError("--tag: has no effect with --support. Leave it out.")
    if args.support and args.config_dir is not None:
        raise RunConfigError("--config-dir: has no effect with --support. Leave it out.")
