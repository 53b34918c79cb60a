"""`read_config_file`: a file that describes a run, with the overrides of a command line over it.

    file = read_config_file(Path("train.sh"), ["model.num_layers=8"], trust=False)
    file.to_run_input("train.sh"), file.reading

The file is read first. Then the overrides are written over its sections, and last the values that
its framework sets when the run starts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.precision.stated_field import COMMAND_LINE
from bridge.precision.statements import get_recipe_name
from bridge.preflight.file_reading import MEGATRON_LM, PRECISION_BRIDGE, FileReading
from bridge.preflight.megatron_release import MegatronRelease
from bridge.preflight.origins import Origins, flatten_leaves
from bridge.preflight.problems import Problems
from bridge.preflight.run_choice import RunChoice
from bridge.read.recipe_sources import get_trusted_sources, parse_recipe_sources
from bridge.read.run_file import MAPPING_SECTIONS, load_file_reading
from bridge.read.run_input import RunInput
from bridge.read.run_keys import (
    MAPPING_REMEDY,
    NON_SECTION_KEYS,
    OWNER_SECTIONS,
    PRECISION_KEY,
    RECIPES_KEY,
    RUN_CONFIG_KEYS,
    SECTION_CLASSES,
)
from bridge.read.startup_values import apply_startup_values
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY, is_auto, load_recipes_from
from bridge.rules.facts.near_names import find_near_names
from bridge.rules.topics.precision.mode import MODE_NAMES
from bridge.target.declaration import format_target_text, parse_target
from bridge.target.fields import OWNER_FIELDS
from bridge.target.target import Target

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

ENVIRONMENT_SECTION = "environment"
"""Section of an override that sets a variable of the run: `environment.NVTE_FUSED_ATTN=1`."""
VARIABLE_PATTERN = re.compile(r"[A-Za-z_]\w*")
"""The name of an environment variable."""


def read_config_file(
    path: Path, overrides: Sequence[str], *, trust: bool, choice: RunChoice | None = None
) -> ConfigFile:
    """Read a file that describes a run, and write overrides over its sections.

    Args:
        path: The file.
        overrides: Overrides in Hydra's spelling.
        trust: Whether to run the Python that `recipes_from` of the file names. If not, a
            `BridgeWarning` reports that it was left out. Python that an override names is run.
        choice: The run of a file that has several, and the variables of a script.

    Raises:
        UnreadFileError: The file cannot be read, or does not describe a run.
        RunConfigError: A section or an override cannot be used.
    """
    file = ConfigFile(load_file_reading(path, choice), path.name, trust=trust)
    if overrides:
        file.write_overrides(overrides)
    file.apply_start()
    return file


class ConfigFile:
    """The sections of a file, while overrides are written over them.

    Args:
        reading: The file as it was read.
        name: The name of the file, as an origin of its values.
        trust: Whether to run the Python that `recipes_from` of the file names.
    """

    def __init__(self, reading: FileReading, name: str, *, trust: bool) -> None:
        self.reading = reading
        self.name = name
        self.sections: dict[str, Any] = {}
        """Key of the run -> its value, with the overrides so far."""
        for key, value in reading.sections.items():
            self.sections[key] = value
            if isinstance(value, dict):
                self.sections[key] = dict(value)
        self.origins = dict.fromkeys(flatten_leaves(self.sections, ""), name)
        """Dotted key -> the origin of its value."""
        for path, file in reading.origins.items():
            if path in self.origins:
                self.origins[path] = file
        self.choice: str | None = None
        """The recipe's name, or the request such as ``auto``, that `mixed_precision` states."""
        self.recipe: MixedPrecisionConfig | None = None
        """The recipe of that name, as the registry made it."""
        sources = self.sections.pop(RECIPES_KEY, None)
        load_recipes_from(get_trusted_sources(name, sources, trust=trust))
        self._replace_recipe_name()

    def to_run_input(self, name: str) -> RunInput:
        """Return the sections, the recipe and the origins.

        Args:
            name: The name of the file in messages.
        """
        recipe_origins = []
        if self.recipe is not None:
            recipe_origins.append(f"recipe {get_recipe_name(self.recipe)}")
        values = {key: {origin: None} for key, origin in self.origins.items()}
        origins = Origins(
            values=values,
            order=(*recipe_origins, self.name),
            recipe_origins=frozenset(recipe_origins),
        )
        return RunInput(
            sections=self.sections,
            choice=self.choice,
            recipe=self.recipe,
            origins=origins,
            name=name,
        )

    def write_overrides(self, overrides: Sequence[str]) -> None:
        """Write overrides over the sections.

        Raises:
            RunConfigError: All overrides that cannot be used.
        """
        from bridge.front.compose import parse_overrides  # Hydra is heavy

        parsed = parse_overrides(overrides)
        keys = [self.reading.translate_key(override.key_or_group) for override in parsed]
        problems = Problems(Origins.from_keys(keys, COMMAND_LINE))
        # Overrides of whole groups come before overrides of their fields, as in Hydra.
        for override in sorted(parsed, key=lambda override: "." in override.key_or_group):
            self.write_override(override, problems)
        problems.raise_any()

    def write_override(self, override: Override, problems: Problems) -> None:
        """Write one override over the sections, or add its faults to the problems."""
        key = self.reading.translate_key(override.key_or_group)
        section, _, field = key.partition(".")
        value_text = (override.input_line or "").partition("=")[2]
        if section == ENVIRONMENT_SECTION and section not in self.reading.sections:
            self._write_variable(field, value_text, problems, is_delete=override.is_delete())
            return
        value = None
        if not override.is_delete() and not override.is_sweep_override():
            value = override.value()
        if self._has_override_fault(override, key, value, problems):
            return
        for path in self._list_fields_of_argument(key):
            self._set(path, value, delete=override.is_delete())
        if section == RECIPES_KEY:
            load_recipes_from(parse_recipe_sources(self.sections.pop(RECIPES_KEY, None)))
        if key == PRECISION_KEY:
            self.choice = self.recipe = None
            self._replace_recipe_name()

    def _has_override_fault(
        self, override: Override, key: str, value: object, problems: Problems
    ) -> bool:
        """Add the fault of an override to the problems, and return whether it has one."""
        section, _, field = key.partition(".")
        value_text = (override.input_line or "").partition("=")[2]
        if section not in RUN_CONFIG_KEYS and section not in self.reading.sections:
            sections = (*RUN_CONFIG_KEYS, *self.reading.sections)
            problems.unknown(key, value_text, "no such section", sections, word=section)
            return True
        if override.is_sweep_override():
            problems.add(key, "takes one value", value_text)
            return True
        if not field and section in MAPPING_SECTIONS and not isinstance(value, dict | None):
            rule = "a file has no options to choose from"
            problems.add(key, rule, value, MAPPING_REMEDY.format(section=key))
            return True
        known_fields = self._list_known_fields(section)
        if not field or field.partition(".")[0] in known_fields:
            return False
        near = find_near_names(field, known_fields)
        is_own_section = self.reading.framework == PRECISION_BRIDGE and section in SECTION_CLASSES
        if near or is_own_section:
            problems.unknown(key, value_text, "no such field", near or known_fields)
            return True
        return False

    def _write_variable(self, name: str, text: str, problems: Problems, *, is_delete: bool) -> None:
        """Set or remove an environment variable of the run, or add a fault to the problems."""
        key = f"{ENVIRONMENT_SECTION}.{name}".removesuffix(".")
        variables = dict(self.reading.environment)
        if not VARIABLE_PATTERN.fullmatch(name):
            remedy = f"Write {ENVIRONMENT_SECTION}.NAME=VALUE."
            problems.add(key, "names no environment variable", text, remedy)
        elif is_delete and not variables:
            problems.add(key, "the file sets no variable", name, "Remove the override.")
        elif is_delete and name not in variables:
            problems.unknown(key, text, "no such variable in the file", variables, word=name)
        else:
            variables.pop(name, None)
            if not is_delete:
                variables[name] = text.strip("'\"")
            self.reading = replace(self.reading, environment=variables)

    def apply_start(self) -> None:
        """Write the values that the file's framework sets at the start of the run.

        If the target states no release, it gets the release of the file. Otherwise the target's
        release replaces the release of the file.
        """
        stated = self.sections.get("target")
        target = Target()
        if stated is not None:
            stated = format_target_text(stated)
            target = parse_target(stated)
        self.reading = apply_startup_values(self.reading, self.sections, target)
        for row in self.reading.derived:
            self.origins[row.path] = f"{row.set_by or self.reading.settings_of} at start"
        if self._is_mode_overridden():
            self._drop_open_mode()
        release = self.reading.release.version
        if target.mcore is None and release is not None:
            self.sections["target"] = f"{stated or ''},mcore{release}".lstrip(",")
        elif target.mcore is not None:
            self.reading = replace(self.reading, release=MegatronRelease())

    def _drop_open_mode(self) -> None:
        """Note that the mode is known.

        The command line states the mode for every branch of a script, so this branch is no longer
        open.
        """
        uncertainty = replace(self.reading.uncertainty, mode_decider=None)
        launches = replace(self.reading.launches, branches=())
        self.reading = replace(self.reading, uncertainty=uncertainty, launches=launches)

    def _is_mode_overridden(self) -> bool:
        """Return whether the command line states the mode."""
        if self.choice is not None:
            return True
        stated = {}
        for section, modes in ((PRECISION_KEY, MODE_NAMES), ("model", MODE_NAMES[1:])):
            fields = self.sections.get(section)
            if not isinstance(fields, dict):
                continue
            for name in modes:
                if self.origins.get(f"{section}.{name}") == COMMAND_LINE:
                    stated[f"{section}.{name}"] = fields.get(name)
        return True in stated.values() or stated == {"model.fp16": False, "model.bf16": False}

    def _list_known_fields(self, section: str) -> set[str]:
        """Return the fields that a section can have.

        The result is empty for a section whose fields are checked later, together with the fields
        of the file.
        """
        fields = self.sections.get(section) or {}
        is_judged_later = section in (PRECISION_KEY, *OWNER_SECTIONS, *NON_SECTION_KEYS)
        if is_judged_later or not isinstance(fields, dict):
            return set()
        known_fields = {*map(str, fields), *OWNER_FIELDS.get(section, ())}
        if section in SECTION_CLASSES:
            known_fields.update(field.name for field in fields_of(SECTION_CLASSES[section]))
        return known_fields

    def _list_fields_of_argument(self, key: str) -> tuple[str, ...]:
        """Return the settings that an override states.

        An argument of Megatron-LM may set several fields. An override of one of them sets them all.
        """
        if self.reading.settings_of != MEGATRON_LM:
            return (key,)
        from bridge.read.megatron_lm.flags import get_argument_fields  # few files are Megatron-LM's

        section, _, name = key.partition(".")
        if section not in OWNER_SECTIONS:
            return (key,)
        paths = get_argument_fields(name)
        if key not in paths:
            return (key,)
        return tuple(paths)

    def _set(self, key: str, value: Any, *, delete: bool) -> None:
        """Write a value, with its origin, or delete a key."""
        *parents, last = key.split(".")
        parent = self.sections
        for name in parents:
            if not isinstance(parent.get(name), dict):
                parent[name] = {}
            parent = parent[name]
        for path in list(self.origins):
            if f"{path}.".startswith(f"{key}."):
                del self.origins[path]
        if delete:
            parent.pop(last, None)
            return
        parent[last] = value
        self.origins.update(dict.fromkeys(flatten_leaves(value, key), COMMAND_LINE))

    def _replace_recipe_name(self) -> None:
        """Replace the name of a recipe by the fields that the recipe states, as Hydra does."""
        name = self.sections.get(PRECISION_KEY)
        if not isinstance(name, str):
            return
        self.choice = name
        if is_auto(name):
            self.sections[PRECISION_KEY] = {}
            return
        self.recipe = REGISTRY.get(name)
        fields = self.recipe.to_dict()
        self.sections[PRECISION_KEY] = fields
        self.origins.pop(PRECISION_KEY, None)
        origin = f"recipe {get_recipe_name(self.recipe)}"
        self.origins.update(dict.fromkeys(flatten_leaves(fields, PRECISION_KEY), origin))
