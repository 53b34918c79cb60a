"""The words of a command line that set keys of a run, and the key `recipes_from`, whoever sets it.

Hydra's parser is imported where there are words to parse.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeWarning, RunConfigError
from bridge.front.problems import KEYS, RECIPES, RUN_KEYS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hydra.core.override_parser.types import Override


def parsed_overrides(overrides: Sequence[str]) -> list[Override]:
    """Return the overrides as Hydra parses them; RunConfigError for a word that is none."""
    if not overrides:
        return []
    from hydra.core.override_parser.overrides_parser import OverridesParser  # heavy

    from bridge.front.errors import COMPOSITION_ERRORS, translated

    try:
        return OverridesParser.create().parse_overrides(as_hydra_reads(overrides))
    except COMPOSITION_ERRORS as error:
        raise translated(error, overrides) from error


def as_hydra_reads(overrides: Sequence[str]) -> list[str]:
    """Return overrides with ``SECTION=null`` as ``~SECTION``: Hydra takes no null for a group."""
    nulls = {f"{key}=null": f"~{key}" for key in KEYS if key not in RUN_KEYS}
    return [nulls.get(word, word) for word in overrides]


def warn_of_recipes(name: str, sources: Sequence[str]) -> None:
    """Warn that what `recipes_from` names in a config was not run, where it names anything."""
    if sources:
        named = f"{name}: {RECIPES} names {', '.join(sources):.200}, which is Python and was not run"
        warnings.warn(f"{named}. Give --trust to run it.", BridgeWarning, stacklevel=2)


def recipe_sources(named: Any) -> tuple[str, ...]:
    """Return the modules and files that a value of `recipes_from` names."""
    if named is None:
        return ()
    names = named if isinstance(named, list) else [named]
    if not all(isinstance(name, str) for name in names):
        raise RunConfigError.of(
            RECIPES,
            "must be a module or file, or a list of them",
            named,
            f"Write {RECIPES}=acme.recipes or {RECIPES}=[acme.recipes,lab/recipes.py].",
        )
    return tuple(names)
