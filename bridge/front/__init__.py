"""The command line of a run: Hydra over the registry of recipes, decoded into a `ConfigContainer`.

Configs are data. Nothing in them is instantiated; every key is checked against the real field of the class it is for.
"""

from collections.abc import Sequence
from pathlib import Path

from bridge.front.compose import Search, composed
from bridge.front.loader import container, run_of
from bridge.front.main import main
from bridge.training.config import ConfigContainer

__all__ = ["compose", "container", "main"]


def compose(
    overrides: Sequence[str] = (),
    *,
    config_path: Path | str,
    config_name: str = "config",
    config_dir: Path | str | None = None,
) -> ConfigContainer:
    """Return the run that ``python scripts/train.py OVERRIDES`` describes.

    Args:
        overrides: As on the command line, ``mixed_precision=bf16_mixed`` say.
        config_path: Folder of the primary config.
        config_name: The primary config, without ``.yaml``.
        config_dir: Another folder, as with ``--config-dir``.

    Raises:
        RunConfigError: Keys, options or values that cannot be used.
        UnknownRecipeError: No such recipe.
        PrecisionConfigError: The precision can never be right.
        RecipeSourceError: A module or file of `recipes_from` cannot be loaded.
    """
    search = Search(str(Path(config_path).resolve()), config_name, config_dir)
    with composed(search, overrides) as composition:
        return container(run_of(composition, name=config_name, missing=False))
