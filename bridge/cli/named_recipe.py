"""A recipe by its name: a registered one, or a YAML file of the group `mixed_precision` in a team's folder."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.registry.registry import REGISTRY

if TYPE_CHECKING:
    from bridge.registry.config import MixedPrecisionConfig

__all__ = ["NamedRecipe", "add_config_dir", "named_recipe"]


@dataclass(frozen=True, kw_only=True)
class NamedRecipe:
    """A recipe and where it is written."""

    name: str
    config: MixedPrecisionConfig
    place: str
    """``file:line`` of the function, or the YAML file."""
    description: str
    """The function's docstring, or the comment that the YAML file begins with."""
    aliases: tuple[str, ...] = ()


def add_config_dir(parser: Any) -> None:
    """Add the option that names a team's folder."""
    parser.add_argument("--config-dir", metavar="FOLDER", help="a folder with YAML recipes in mixed_precision/")


def named_recipe(name: str, config_dir: str | None = None) -> NamedRecipe:
    """Return the recipe of that name.

    Raises:
        UnknownRecipeError: There is none.
        BridgeError: The YAML file cannot be used.
    """
    if config_dir is None or name in REGISTRY:
        recipe = REGISTRY.recipe(name)
        description = inspect.getdoc(recipe.function) or ""
        config = REGISTRY.get(name)
        return NamedRecipe(
            name=recipe.name, config=config, place=recipe.place, description=description, aliases=recipe.aliases
        )
    from bridge.front.loader import load_run, shipped_folder  # Hydra is heavy

    run = load_run([f"mixed_precision={name}"], shipped_folder(), config_dir=config_dir, strict=False)
    if run.precision is None:
        return named_recipe(name)
    path = Path(config_dir) / "mixed_precision" / f"{name}.yaml"
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = [line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
    return NamedRecipe(name=name, config=run.precision, place=str(path), description="\n".join(comment))
