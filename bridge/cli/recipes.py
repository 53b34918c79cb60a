"""`precision-bridge recipes`: every registered recipe, a line each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from bridge.errors import UnknownRecipeError, close_matches, did_you_mean
from bridge.registry.registry import REGISTRY, Recipe

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("recipes", help="list the recipes, one line each")
    parser.add_argument("--tag", help="only those with this tag (fp8, bf16, mxfp8, ...)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Print the list; the registry logs each source that it could not load."""
    tags = sorted({tag for recipe in REGISTRY.recipes() for tag in recipe.tags})
    if chosen.tag is not None and chosen.tag not in tags:
        hint = did_you_mean(close_matches(chosen.tag, tags)) or f"Tags: {', '.join(tags)}."
        raise UnknownRecipeError(f"--tag: no recipe has the tag {chosen.tag!r}. {hint}")
    listed = [recipe for recipe in REGISTRY.recipes() if chosen.tag is None or chosen.tag in recipe.tags]
    if chosen.json:
        print(json.dumps([_row(recipe) for recipe in listed], indent=2))
    else:
        for line in _lines(listed):
            print(line)


def _row(recipe: Recipe) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "summary": recipe.summary,
        "tags": list(recipe.tags),
        "aliases": list(recipe.aliases),
        "place": recipe.place,
    }


def _lines(listed: list[Recipe]) -> Iterable[str]:
    width = max((len(recipe.name) for recipe in listed), default=0)
    for recipe in listed:
        aliases = f" (also {', '.join(recipe.aliases)})" if recipe.aliases else ""
        yield f"{recipe.name:<{width}}  {recipe.summary}{aliases}"
