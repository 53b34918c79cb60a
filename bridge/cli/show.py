"""`precision-bridge show NAME`: every field of a recipe, stated or default."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from bridge.cli.named_recipe import add_config_dir, named_recipe
from bridge.precision.field_docs import field_docs
from bridge.registry.config import MixedPrecisionConfig

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("show", help="show every field of a recipe, stated or default")
    parser.add_argument("name", help="recipe, in any spelling, or an alias")
    add_config_dir(parser)
    parser.add_argument("--stated", action="store_true", help="only the fields the recipe states")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Print the recipe, and its faults if it has any."""
    named = named_recipe(chosen.name, chosen.config_dir)
    config = named.config
    faults = [str(fault) for fault in config.faults()]
    if chosen.json:
        recipe = {
            "name": named.name,
            "place": named.place,
            "aliases": list(named.aliases),
            "mode": config.mode,
            "scheme": config.scheme,
            "fields": config.to_dict(full=not chosen.stated),
            "stated": [name for name in config.field_names() if config.is_stated(name)],
            "faults": faults,
        }
        print(json.dumps(recipe, indent=2))
        return
    print(f"{named.name}\n")
    print(f"{named.description or 'No docstring.'}\n")
    docs = field_docs(MixedPrecisionConfig)
    for name, value in config.to_dict(full=True).items():
        stated = config.is_stated(name)
        if stated or not chosen.stated:
            text = value if isinstance(value, str) else repr(value)
            print(f"  {name:<33} {text:<12} {'stated ' if stated else 'default'}  {docs.get(name, '')}")
    for fault in faults:
        print(f"fault: {fault}")
