"""`GivenRun`: the sections of a run as a tree or a file gave them, with the recipe that was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bridge.preflight.origins import Origins
from bridge.registry.config import MixedPrecisionConfig


@dataclass(frozen=True, kw_only=True)
class GivenRun:
    """The sections of a run as they were read from a tree or a file, with the recipe that was chosen."""

    sections: Mapping[str, Any]
    """Key of the run -> plain values; `mixed_precision` is a mapping of fields, or a recipe's name."""
    choice: str | None = None
    """The option of the group `mixed_precision`, a recipe's name or a request for a choice."""
    recipe: MixedPrecisionConfig | None = None
    """That recipe as the registry made it; None for a YAML file's. Its fields stand in `mixed_precision` too."""
    origins: Origins = field(default_factory=Origins)
    name: str = "config"
    """The file, or the primary config, that was read."""
