"""The keys of a run's config: its sections, and the settings next to them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
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
"""Key of the precision: a section, or a recipe's name."""
RECIPES_KEY = "recipes_from"
"""Key of the modules and files from which recipes are loaded."""
RECIPE_NAME_KEY = "_recipe_"
"""Key in `mixed_precision` of a run's config.yaml: the name of the recipe that the fields are from."""
SECTION_CLASSES = {
    "data": DataConfig,
    "train": TrainConfig,
    "checkpoint": CheckpointConfig,
    "resume": ResumeConfig,
    "logging": LoggingConfig,
}
"""Name of a section with a class of ours -> the class."""
OWNER_SECTIONS = ("model", "optimizer", "ddp")
"""Sections with classes of Megatron Core, which are imported only when a run needs them."""
NON_SECTION_KEYS = ("precision_backend", "precision_schedule", "target", "silence")
"""Keys of a run that are no sections."""
RUN_CONFIG_KEYS = (PRECISION_KEY, *NON_SECTION_KEYS, *OWNER_SECTIONS, *SECTION_CLASSES, RECIPES_KEY)
MAPPING_RULE = "must be a mapping of fields"
"""Rule of a section that is not a mapping."""
MAPPING_REMEDY = "Write {section}.FIELD=VALUE."


@functools.cache
def get_section_fields(section: str) -> frozenset[str]:
    """Return the fields that a section of a run can have, in any release of Megatron Core."""
    names = set(OWNER_FIELDS.get(section, ()))
    if section in SECTION_CLASSES:
        names.update(field.name for field in dataclasses.fields(SECTION_CLASSES[section]))
    return frozenset(names)


def add_malformed_sections(
    sections: Mapping[str, Any], keys: Iterable[str], problems: Problems
) -> None:
    """Add a fault for each section that is stated and is not a mapping of fields.

    Args:
        sections: Key of the run -> its value.
        keys: The keys whose values are mappings of fields.
        problems: It gets the faults.
    """
    for key in keys:
        section = sections.get(key)
        if section is not None and not isinstance(section, dict):
            problems.add(key, MAPPING_RULE, section, MAPPING_REMEDY.format(section=key))


def refuse_unknown_sections(sections: Mapping[str, Any], problems: Problems) -> None:
    """Refuse the problems so far, and then add each unknown section of a run to them.

    Args:
        problems: The problems so far.

    Raises:
        RunConfigError: There is a `_target_` anywhere in the sections, or there were problems.
    """
    problems.add_instantiations(sections)
    problems.raise_any()
    for key, value in sections.items():
        if key not in RUN_CONFIG_KEYS:
            problems.add_unknown(str(key), value, "no such section", RUN_CONFIG_KEYS)
