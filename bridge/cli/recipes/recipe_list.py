"""`precision-bridge recipes`: the list of recipes, of the registry and of a team's folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bridge.cli.output import print_json
from bridge.cli.recipes.named_recipe import read_first_comment
from bridge.errors import RunConfigError, UnknownRecipeError, close_matches, did_you_mean
from bridge.registry.registry import REGISTRY


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedRecipe:
    """A recipe of the list. The fields are the keys of the JSON."""

    name: str
    summary: str
    """The first line of the docstring or of the comment."""
    tags: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    place: str
    """``file:line`` of the function, or the YAML file."""


def print_recipe_list(args: argparse.Namespace) -> None:
    """Print the list of recipes. The registry logs each source that it could not load.

    Raises:
        UnknownRecipeError: No recipe has the tag of ``--tag``.
        RunConfigError: There is no folder ``--config-dir``.
    """
    recipes = []
    for registered in REGISTRY.recipes():
        listed = ListedRecipe(
            name=registered.name,
            summary=registered.summary,
            tags=registered.tags,
            aliases=registered.aliases,
            place=registered.place,
        )
        recipes.append(listed)
    if args.config_dir is not None:
        recipes += _list_folder_recipes(Path(args.config_dir))
    if args.tag is not None:
        recipes = _select_tagged(recipes, args.tag)
    if args.json:
        print_json(list(map(asdict, recipes)))
        return
    width = max((len(recipe.name) for recipe in recipes), default=0)
    for recipe in recipes:
        aliases = ""
        if recipe.aliases:
            aliases = f" (also {', '.join(recipe.aliases)})"
        print(f"{recipe.name:<{width}}  {recipe.summary}{aliases}")


def _select_tagged(recipes: Sequence[ListedRecipe], tag: str) -> list[ListedRecipe]:
    """Return the recipes with a tag.

    Raises:
        UnknownRecipeError: No recipe has the tag.
    """
    tagged = [recipe for recipe in recipes if tag in recipe.tags]
    if tagged:
        return tagged
    tags: set[str] = set()
    for recipe in recipes:
        tags.update(recipe.tags)
    known = sorted(tags)
    hint = did_you_mean(close_matches(tag, known)) or f"Tags: {', '.join(known)}."
    raise UnknownRecipeError(f"--tag: no recipe has the tag {tag!r}. {hint}")


def _list_folder_recipes(folder: Path) -> list[ListedRecipe]:
    """Return the YAML recipes of a team's folder. The summary is the first comment of the file.

    Raises:
        RunConfigError: There is no such folder.
    """
    if not folder.is_dir():
        raise RunConfigError.of(
            "--config-dir", "there is no such folder", str(folder), "Give an existing one."
        )
    recipes = []
    for path in sorted((folder / "mixed_precision").glob("*.yaml")):
        summary = read_first_comment(path).partition("\n")[0] or "No comment."
        recipes.append(ListedRecipe(name=path.stem, summary=summary, place=str(path)))
    return recipes
