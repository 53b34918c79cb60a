"""`precision-bridge show NAME`: every field of a recipe, stated or default."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

from bridge.precision.field_docs import field_docs
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("show", help="show every field of a recipe, stated or default")
    parser.add_argument("name", help="recipe, in any spelling, or an alias")
    parser.add_argument("--stated", action="store_true", help="only the fields the recipe states")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Print the recipe; its faults too, should it have any."""
    recipe = REGISTRY.recipe(chosen.name)
    config = REGISTRY.get(chosen.name)
    faults = [str(fault) for fault in config.faults()]
    if chosen.json:
        shown = {
            "name": recipe.name,
            "place": recipe.place,
            "aliases": list(recipe.aliases),
            "mode": config.mode,
            "scheme": config.scheme,
            "fields": config.to_dict(full=not chosen.stated),
            "stated": [name for name in config.field_names() if config.is_stated(name)],
            "faults": faults,
        }
        print(json.dumps(shown, indent=2))
        return
    print(f"{recipe.name}\n")
    print(f"{inspect.getdoc(recipe.function) or 'No docstring.'}\n")
    docs = field_docs(MixedPrecisionConfig)
    for name, value in config.to_dict(full=True).items():
        stated = config.is_stated(name)
        if stated or not chosen.stated:
            print(f"  {name:<33} {_shown(value):<12} {'stated ' if stated else 'default'}  {docs.get(name, '')}")
    for fault in faults:
        print(f"fault: {fault}")


def _shown(value: object) -> str:
    return value if isinstance(value, str) else repr(value)
