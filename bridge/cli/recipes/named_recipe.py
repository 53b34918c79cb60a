"""`NamedRecipe`: a recipe by the name on a command line, of the registry or of a team's folder."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from pathlib import Path

from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY


@dataclass(frozen=True, kw_only=True)
class NamedRecipe:
    """A recipe by its name: a registered one, or a YAML file of a team's folder."""

    name: str
    config: MixedPrecisionConfig
    place: str
    """``file:line`` of the function, or the YAML file."""
    description: str
    """The function's docstring, or the comment that the YAML file begins with."""
    aliases: tuple[str, ...] = ()

    @classmethod
    def from_name(cls, name: str, config_dir: str | None) -> NamedRecipe:
        """Return the recipe of a name. A file of the folder comes before a registered recipe.

        Args:
            config_dir: A team's folder; None: only the registry.

        Raises:
            UnknownRecipeError: Neither the registry nor the folder has the recipe.
        """
        if config_dir is not None:
            of_folder = cls._maybe_from_folder(name, config_dir)
            if of_folder is not None:
                return of_folder
        recipe, config = REGISTRY.recipe(name), REGISTRY.get(name)
        description = inspect.getdoc(recipe.function) or ""
        return cls(
            name=recipe.name,
            config=config,
            place=recipe.place,
            description=description,
            aliases=recipe.aliases,
        )

    @classmethod
    def _maybe_from_folder(cls, name: str, config_dir: str) -> NamedRecipe | None:
        """Return the recipe of a team's folder. None if only the registry has it.

        Raises:
            UnknownRecipeError: Neither the registry nor the folder has the recipe.
        """
        path = Path(config_dir) / "mixed_precision" / f"{name}.yaml"
        if name in REGISTRY and not path.is_file():
            return None
        from bridge.front.folders import find_shipped_folder
        from bridge.front.loader import load_run  # Hydra is heavy

        # The recipe is composed as for a run, so that its defaults list has an effect.
        overrides = [f"mixed_precision={name}"]
        run = load_run(overrides, find_shipped_folder(), config_dir=config_dir, strict=False)
        if run.precision is None or not path.is_file():
            return None
        description = read_first_comment(path)
        return cls(name=name, config=run.precision, place=str(path), description=description)


def read_first_comment(path: Path) -> str:
    """Return the comment at the beginning of a YAML file, without its number signs."""
    from bridge.precision import strict_yaml  # only recipes of a folder need it

    lines = strict_yaml.decode_text(strict_yaml.read_bytes(path), str(path)).splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return "\n".join(line.lstrip("# ") for line in comment)
