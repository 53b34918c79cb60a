"""`RunInput`: the sections of a run as a tree of YAML files or one file has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.preflight.origins import Origins
from bridge.registry.config import MixedPrecisionConfig


@dataclass(frozen=True, kw_only=True)
class RunInput:
    """The sections of a run as they were read, with the recipe that was chosen."""

    sections: Mapping[str, Any]
    """Key of the run -> plain values; `mixed_precision` has fields, or is a recipe's name."""
    choice: str | None = None
    """The option of the group `mixed_precision`, a recipe's name or a request for a choice."""
    recipe: MixedPrecisionConfig | None = None
    """The recipe as the registry made it, or None for a recipe from a YAML file.

    Its fields stand in `mixed_precision` too."""
    origins: Origins = field(default_factory=Origins)
    name: str = "config"
    """The file, or the primary config, that was read."""
