"""One YAML file that holds a run's sections, read with the overrides of a command line over it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.precision.fields import COMMAND_LINE
from bridge.precision.statements import get_recipe_name
from bridge.preflight.file_reading import MEGATRON_LM, PRECISION_BRIDGE, FileReading, RunChoice
from bridge.preflight.origins import Origins, flatten_leaves
from bridge.preflight.problems import Problems
from bridge.read.recipe_sources import get_trusted_sources, parse_recipe_sources
from bridge.read.run_file import MAPPING_SECTIONS, read_run_file
from bridge.read.run_input import RunInput
from bridge.read.run_keys import (
    NON_SECTION_KEYS,
    OWNER_SECTIONS,
    PRECISION_KEY,
    RECIPES_KEY,
    RUN_CONFIG_KEYS,
    SECTION_CLASSES,
)
from bridge.read.startup_values import apply_startup_values
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY, is_auto, load_recipes_from
from bridge.rules.facts.near_names import find_near_names
from bridge.rules.topics.precision.mode import MODE_NAMES
from bridge.target.declaration import parse_target
from bridge.target.fields import OWNER_FIELDS
from bridge.target.target import Target

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

ENVIRONMENT_SECTION = "environment"
"""Section of an override that sets a variable of the run: `environment.NVTE_FUSED_ATTN=1`."""
VARIABLE_PATTERN = re.compile(r"[A-Za-z_]\w*")


def read_config_file(
    path: Path, overrides: Sequence[str], *, trust: bool, choice: RunChoice | None = None
) -> ConfigFile:
    """Read a file of sections and write overrides over it.

    Only with `trust`, or among the overrides, the names in `recipes_from` are run; else they are a
    `BridgeWarning`.
    """
    file = ConfigFile(read_run_file(path, choice), path.name, trust=trust)
    if overrides:
        file.write_overrides(overrides)
    file.start()
    return file


class ConfigFile:
    """A file's sections while overrides are written over them."""

    def __init__(self, reading: FileReading, name: str, *, trust: bool) -> None:
        self.reading = reading
        self.whole: dict[str, Any] = {}
        for key, value in reading.sections.items():
            self.whole[key] = value
            if isinstance(value, dict):
                self.whole[key] = dict(value)
        self.name = name
        self.by_key = dict.fromkeys(flatten_leaves(self.whole, ""), name)
        for path, file in reading.origins.items():
            if path in self.by_key:
                self.by_key[path] = file
        self.choice: str | None = None
        """The recipe's name, or the request for a choice, where one is given for
        `mixed_precision`."""
        self.recipe: MixedPrecisionConfig | None = None
        """That recipe as the registry made it."""
        load_recipes_from(get_trusted_sources(name, self.whole.pop(RECIPES_KEY, None), trust=trust))
        self._choose_recipe()

    def given(self, name: str) -> RunInput:
        """Return the run as it was read; `name` is the file's in messages."""
        named = []
        if self.recipe is not None:
            named.append(f"recipe {get_recipe_name(self.recipe)}")
        values = {key: {origin: None} for key, origin in self.by_key.items()}
        origins = Origins(values=values, order=(*named, self.name), recipe_origins=frozenset(named))
        return RunInput(
            sections=self.whole, choice=self.choice, recipe=self.recipe, origins=origins, name=name
        )

    def write_overrides(self, overrides: Sequence[str]) -> None:
        """Write overrides over the sections.

        RunConfigError with everything that is wrong with them.
        """
        from bridge.front.compose import parse_overrides  # Hydra is heavy

        parsed = parse_overrides(overrides)
        keys = [self.reading.translate_key(override.key_or_group) for override in parsed]
        problems = Problems(Origins.from_keys(keys, COMMAND_LINE))
        # The overrides of whole groups are written first, as Hydra does.
        for override in sorted(parsed, key=lambda override: "." in override.key_or_group):
            self.write(override, problems)
        problems.raise_any()

    def write(self, override: Override, problems: Problems) -> None:
        """Write one override over the sections, or add to the problems what is wrong with it."""
        key = self.reading.translate_key(override.key_or_group)
        section, _, field = key.partition(".")
        text = (override.input_line or "").partition("=")[2]
        if section == ENVIRONMENT_SECTION and section not in self.reading.sections:
            self._write_variable(field, text, problems, is_delete=override.is_delete())
            return
        if section not in RUN_CONFIG_KEYS and section not in self.reading.sections:
            sections = (*RUN_CONFIG_KEYS, *self.reading.sections)
            problems.unknown(key, text, "no such section", sections, word=section)
            return
        if override.is_sweep_override():
            problems.add(key, "takes one value", text)
            return
        value = None
        if not override.is_delete():
            value = override.value()
        if not field and section in MAPPING_SECTIONS and not isinstance(value, dict | None):
            rule = "a file has no options to choose from"
            problems.add(key, rule, value, f"Write {key}.FIELD=VALUE.")
            return
        known = self._known(section)
        if field and field.partition(".")[0] not in known:
            near = find_near_names(field, known)
            if near or (self.reading.framework == PRECISION_BRIDGE and section in SECTION_CLASSES):
                problems.unknown(key, text, "no such field", near or known)
                return
        for path in self._together(key):
            self._set(path, value, delete=override.is_delete())
        if section == RECIPES_KEY:
            load_recipes_from(parse_recipe_sources(self.whole.pop(RECIPES_KEY, None)))
        if key == PRECISION_KEY:
            self.choice = self.recipe = None
            self._choose_recipe()

    def _write_variable(self, name: str, text: str, problems: Problems, *, is_delete: bool) -> None:
        """Set an environment variable of the run, or take it away."""
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
            self.reading = dataclasses.replace(self.reading, environment=variables)

    def start(self) -> None:
        """Write what the file's framework sets at start.

        The file's release is written into a target that states none.
        """
        target = self.whole.get("target")
        if isinstance(target, list):  # target=[h100x8,te2.8], which Hydra takes without quotes
            target = ",".join(map(str, target))
        place = Target()
        if target is not None:
            place = parse_target(str(target))
        self.reading = apply_startup_values(self.reading, self.whole, place)
        for row in self.reading.derived:
            self.by_key[row.path] = f"{row.set_by or self.reading.settings_of} at start"
        if self._is_mode_overridden():  # on every branch of a script
            self.reading = dataclasses.replace(self.reading, mode_decided_by=None, branches=())
        if place.mcore is None and self.reading.release is not None:
            self.whole["target"] = f"{target or ''},mcore{self.reading.release}".lstrip(",")
        elif place.mcore is not None:
            self.reading = dataclasses.replace(self.reading, release=None)

    def _is_mode_overridden(self) -> bool:
        """Return whether the command line states the mode."""
        if self.choice is not None:
            return True
        stated = {}
        for section, modes in ((PRECISION_KEY, MODE_NAMES), ("model", MODE_NAMES[1:])):
            fields = self.whole.get(section)
            if not isinstance(fields, dict):
                continue
            for name in modes:
                if self.by_key.get(f"{section}.{name}") == COMMAND_LINE:
                    stated[f"{section}.{name}"] = fields.get(name)
        return True in stated.values() or stated == {"model.fp16": False, "model.bf16": False}

    def _known(self, section: str) -> set[str]:
        """Return the fields that a section is known to have.

        The set is empty for a section whose fields are judged with the file's.
        """
        fields = self.whole.get(section) or {}
        if section in (PRECISION_KEY, *OWNER_SECTIONS, *NON_SECTION_KEYS) or not isinstance(
            fields, dict
        ):
            return set()
        known = {*map(str, fields), *OWNER_FIELDS.get(section, ())}
        if section in SECTION_CLASSES:
            for field in dataclasses.fields(SECTION_CLASSES[section]):
                known.add(field.name)
        return known

    def _together(self, key: str) -> tuple[str, ...]:
        """Return the settings that an override of one of them states.

        One argument of Megatron-LM is several fields.
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
        *parents, last = key.split(".")
        holder = self.whole
        for name in parents:
            if not isinstance(holder.get(name), dict):
                holder[name] = {}
            holder = holder[name]
        for known in list(self.by_key):
            if f"{known}.".startswith(f"{key}."):
                del self.by_key[known]
        if delete:
            holder.pop(last, None)
            return
        holder[last] = value
        self.by_key.update(dict.fromkeys(flatten_leaves(value, key), COMMAND_LINE))

    def _choose_recipe(self) -> None:
        """Put the fields that a recipe states in the place of its name, as Hydra's group does."""
        name = self.whole.get(PRECISION_KEY)
        if not isinstance(name, str):
            return
        if is_auto(name):
            self.whole[PRECISION_KEY], self.choice = {}, name
            return
        self.recipe, self.choice = REGISTRY.get(name), name
        self.whole[PRECISION_KEY] = self.recipe.to_dict()
        self.by_key.pop(PRECISION_KEY, None)
        source = f"recipe {get_recipe_name(self.recipe)}"
        self.by_key.update(
            dict.fromkeys(flatten_leaves(self.whole[PRECISION_KEY], PRECISION_KEY), source)
        )
