"""The keys of a run's config: its sections, and the settings next to them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from bridge.preflight.problems import Problems
from bridge.target.fields import OWNER_FIELDS
from bridge.training.config import (
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ResumeConfig,
    TrainConfig,
)

PRECISION_KEY = "mixed_precision"
"""Section of the precision, or a recipe's name."""
RECIPES_KEY = "recipes_from"
"""Key of the modules and files that recipes are loaded from."""
RECIPE_NAME_KEY = "_recipe_"
"""Key of `mixed_precision` in the config.yaml of a run: the recipe that its fields are from."""
SECTION_CLASSES = {
    "data": DataConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "resume": ResumeConfig,
    "logging": LoggingConfig,
}
"""Sections with classes of our own; they are listed with their defaults."""
OWNER_SECTIONS = ("model", "optimizer", "ddp")
"""Sections with classes of Megatron Core, which are imported only when a run needs them."""
NON_SECTION_KEYS = ("precision_backend", "precision_schedule", "target", "silence")
"""Keys of a run that are no sections."""
RUN_CONFIG_KEYS = (PRECISION_KEY, *NON_SECTION_KEYS, *OWNER_SECTIONS, *SECTION_CLASSES, RECIPES_KEY)


@functools.cache
def get_section_fields(section: str) -> frozenset[str]:
    """Return the fields that a section of a run can have."""
    names = set(OWNER_FIELDS.get(section, ()))
    if section in SECTION_CLASSES:
        names.update(field.name for field in dataclasses.fields(SECTION_CLASSES[section]))
    return frozenset(names)


def refuse_unknown_sections(sections: Mapping[str, Any], problems: Problems) -> None:
    """Raise for a ``_target_`` anywhere in a run, and add each unknown key to the problems."""
    problems.refuse_targets(sections)
    problems.raise_any()
    for key, value in sections.items():
        if key not in RUN_CONFIG_KEYS:
            problems.unknown(str(key), value, "no such section", RUN_CONFIG_KEYS)
