"""`NamedRecipe`: a recipe that a command line names, of the registry or of a team's folder."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from pathlib import Path

from bridge.registry.config import MixedPrecisionConfig
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
        """Return the recipe of a name.

        UnknownRecipeError where neither the registry nor the folder has it.
        """
        path = Path(config_dir or "") / "mixed_precision" / f"{name}.yaml"
        if config_dir is not None and (name not in REGISTRY or path.is_file()):
            from bridge.front.folders import find_shipped_folder
            from bridge.front.loader import load_run  # Hydra is heavy

            run = load_run(
                [f"mixed_precision={name}"],
                find_shipped_folder(),
                config_dir=config_dir,
                strict=False,
            )
            if run.precision is not None and path.is_file():
                return cls(
                    name=name,
                    config=run.precision,
                    place=str(path),
                    description=read_first_comment(path),
                )
        recipe, config = REGISTRY.recipe(name), REGISTRY.get(name)
        description = inspect.getdoc(recipe.function) or ""
        return cls(
            name=recipe.name,
            config=config,
            place=recipe.place,
            description=description,
            aliases=recipe.aliases,
        )


def read_first_comment(path: Path) -> str:
    """Return the comment that a YAML file begins with."""
    from bridge.precision import strict_yaml  # for the recipes of a folder alone

    lines = strict_yaml.decode_text(strict_yaml.read_bytes(path), str(path)).splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return "\n".join(line.lstrip("# ") for line in comment)
