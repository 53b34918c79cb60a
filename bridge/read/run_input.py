"""`RunInput`: the sections of a run as they were read from one file or from a tree of YAML files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.preflight.origins import Origins
from bridge.registry.mixed_precision_config import MixedPrecisionConfig


@dataclass(frozen=True, kw_only=True)
class RunInput:
    """The sections of a run as they were read, with the recipe that was chosen."""

    sections: Mapping[str, Any]
    """Key of the run -> plain values. `mixed_precision` is a mapping of fields or a recipe's name."""
    choice: str | None = None
    """The chosen option of the group `mixed_precision`: a recipe's name, or `auto`."""
    recipe: MixedPrecisionConfig | None = None
    """The recipe as the registry made it; None for a recipe from a YAML file.

    Its fields are in the section `mixed_precision` too."""
    origins: Origins = field(default_factory=Origins)
    """Where each value was stated."""
    name: str = "config"
    """The file, or the primary config, that was read."""
