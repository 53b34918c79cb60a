"""The modules and files with recipes that a run's config names in `recipes_from`."""

from __future__ import annotations

import warnings
from typing import Any

from bridge.errors import BridgeWarning, RunConfigError
from bridge.read.run_keys import RECIPES_KEY


def get_trusted_sources(config_name: str, value: object, *, trust: bool) -> tuple[str, ...]:
    """Return the modules and files that a config's `recipes_from` names, if it is trusted.

    They are Python, and to load them runs their code. Without trust a `BridgeWarning` names them.

    Args:
        config_name: The name of the config in the warning.
        value: The value of `recipes_from`.
        trust: Whether the user trusts the config (`--trust`).

    Returns:
        Nothing without trust.

    Raises:
        RunConfigError: The value is no name or list of names.
    """
    sources = parse_recipe_sources(value)
    if trust or not sources:
        return sources
    names = f"{', '.join(sources):.200}"
    text = f"{config_name}: {RECIPES_KEY} names {names}, which is Python and was not run"
    warnings.warn(f"{text}. Give --trust to run it.", BridgeWarning, stacklevel=2)
    return ()


def parse_recipe_sources(value: object) -> tuple[str, ...]:
    """Return the modules and files that a value of `recipes_from` names; none for null.

    Raises:
        RunConfigError: The value is no name or list of names.
    """
    if value is None:
        return ()
    names: list[Any] = [value]
    if isinstance(value, list):
        names = value
    if not all(isinstance(name, str) for name in names):
        remedy = f"Write {RECIPES_KEY}=acme.recipes or {RECIPES_KEY}=[acme.recipes,lab/recipes.py]."
        raise RunConfigError.of(
            RECIPES_KEY, "must be a module or file, or a list of them", value, remedy
        )
    return tuple(names)
