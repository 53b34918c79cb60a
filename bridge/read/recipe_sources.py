"""The modules and files of recipes that a run's config names in `recipes_from`."""

from __future__ import annotations

import warnings
from typing import Any

from bridge.errors import BridgeWarning, RunConfigError
from bridge.read.run_keys import RECIPES_KEY


def get_trusted_sources(name: str, named: Any, *, trust: bool) -> tuple[str, ...]:
    """Return the modules and files that a config's `recipes_from` names.

    Without `trust` a `BridgeWarning` names them, and none is returned.
    """
    sources = parse_recipe_sources(named)
    if trust or not sources:
        return sources
    text = f"{name}: {RECIPES_KEY} names {', '.join(sources):.200}, which is Python and was not run"
    warnings.warn(f"{text}. Give --trust to run it.", BridgeWarning, stacklevel=2)
    return ()


def parse_recipe_sources(named: Any) -> tuple[str, ...]:
    """Return the modules and files that a value of `recipes_from` names."""
    if named is None:
        return ()
    names = named if isinstance(named, list) else [named]
    if not all(isinstance(name, str) for name in names):
        remedy = f"Write {RECIPES_KEY}=acme.recipes or {RECIPES_KEY}=[acme.recipes,lab/recipes.py]."
        raise RunConfigError.of(
            RECIPES_KEY, "must be a module or file, or a list of them", named, remedy
        )
    return tuple(names)
