"""`read_saved_container`: a run from Megatron Bridge's YAML of a `ConfigContainer`.

Such a YAML is saved with a run, or is the ``run_config.yaml`` of a checkpoint. Each object in it is a
mapping whose ``_target_`` names its class. No class is imported or instantiated. Sections for which
this project has no name keep those of Megatron Bridge: `comm_overlap`, `peft`,
`rerun_state_machine`, `dist`, ...
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.errors import RunConfigError
from bridge.precision import strict_yaml
from bridge.preflight.file_reading import MEGATRON_BRIDGE, FileReading
from bridge.preflight.uncertainty import Uncertainty
from bridge.read.assumed_release import infer_release
from bridge.read.debug_features import FEATURES, SECTION
from bridge.read.framework_fields import (
    get_framework_fields,
    has_language_model,
    list_framework_fields,
    list_newer_fields,
)
from bridge.read.layer_source import find_spec_no_plan_reason, get_layer_settings
from bridge.read.run_keys import (
    OWNER_SECTIONS,
    PRECISION_KEY,
    SECTION_CLASSES,
)
from bridge.registry.saved_entry import drop_references
from bridge.target.fields import ENCODERS, OWNER_DEFAULTS, OWNER_FIELDS

TARGET_KEY = "_target_"
NAME_KEY = "_name_"
ARGUMENTS_KEY = "_args_"
CALL_KEY = "_call_"
PARTIAL_KEY = "_partial_"
DATASET_SECTION = "dataset"
MODEL_SECTION = "model"
ADAPTER_SECTION = "peft"
NESTED_CONFIG_KEY = "transformer"
ENVIRONMENT_SECTION = "env_vars"
CLASS_PREFIXES = ("megatron.bridge.", "megatron.core.")
"""Prefixes of the import paths of the classes whose fields such a file has."""
MAPPING_SECTIONS = (*OWNER_SECTIONS, *SECTION_CLASSES, ENVIRONMENT_SECTION)
"""Sections that have to be mappings of fields."""
CONTAINER_NAME = "ConfigContainer"
"""Name of the class of a whole run. Projects have classes of their own under this name."""
MOVED_FIELDS = {
    ("rerun_state_machine", "check_for_nan_in_loss"): ("train", "check_for_nan_in_loss")
}
"""Section and field of Megatron Bridge -> ours."""
FREEZE_FIELDS = frozenset(
    ("freeze_language_model", "freeze_vision_projection", *(f"freeze_{part}" for part in ENCODERS))
)
"""Fields of a multimodal model that freeze a part of it."""
FROZEN_PARTS_OF_CLASS = {
    "megatron.bridge.models.qwen_vl.qwen3_vl_provider.Qwen3VLMoEModelProvider": (
        *("freeze_language_model", "freeze_vision_model"),
    )
}
"""Class of a model -> the parts that it freezes by default. The other classes freeze none."""
FREEZE_FIELD_OF_CONFIG = {
    "vision_config": "freeze_vision_model",
    "audio_config": "freeze_audio_model",
    "sound_config": "freeze_sound_encoder",
}
"""Field with the config of a part before the language model -> the field that freezes the part."""
CONTENT_IS_LOST = "{path}: the file names a {kind} without its content."
FIELDS_ARE_NEWER = (
    "{fields}: no known release of Megatron Core has these fields, and nothing here reads them."
)


def is_saved_container(config: Mapping[str, object]) -> bool:
    """Return whether the contents of a file are a whole run of Megatron Bridge, or sections of its classes."""
    sections = {str(key).removesuffix("_config"): value for key, value in config.items()}
    if TARGET_KEY in config:
        target = str(config[TARGET_KEY])
        is_container = (
            target.startswith(CLASS_PREFIXES) or target.rpartition(".")[2] == CONTAINER_NAME
        )
        has_sections = not sections.keys().isdisjoint((*OWNER_SECTIONS, *SECTION_CLASSES))
        return is_container and has_sections and ARGUMENTS_KEY not in config
    for name in (PRECISION_KEY, *OWNER_SECTIONS, *SECTION_CLASSES):
        section = sections.get(name)
        if isinstance(section, Mapping) and str(section.get(TARGET_KEY)).startswith(CLASS_PREFIXES):
            return True
    return False


def read_saved_container(config: Mapping[str, object], path: Path) -> FileReading:
    """Return the run of a saved container.

    Args:
        config: The contents of the file.
        path: Path of the file. Files that it names are also searched in its folder.

    Raises:
        RunConfigError: The run is one of a diffusion model, or a section is no mapping.
    """
    container = _SavedContainer(config)
    if not has_language_model(MEGATRON_BRIDGE, container.model_class):
        rule = "a diffusion model has no layers of a language model"
        remedy = "Give a run of a language model."
        raise RunConfigError.of("model", rule, container.model_class, remedy)
    sections = container.sections
    environment = sections.pop(ENVIRONMENT_SECTION, None)
    model = sections.get(MODEL_SECTION)
    if isinstance(model, dict):
        _write_freeze_defaults(model, container.classes.get(MODEL_SECTION, ()))
    owners = _select_owners(sections)
    is_complete = _has_most_model_fields(owners)
    own_fields = _pop_framework_fields(owners, container.classes)
    newer_fields: list[str] = []
    if is_complete:
        newer_fields = _pop_newer_fields(owners)
    release = infer_release(owners, is_complete=is_complete)
    unknown = list(container.lost)
    if newer_fields:
        unknown.append(FIELDS_ARE_NEWER.format(fields=", ".join(newer_fields)))
    opened: dict[str, str] = {}
    no_plan_reason = find_spec_no_plan_reason(own_fields)
    if no_plan_reason is not None:
        spec_field = no_plan_reason.partition(":")[0]
        opened = dict.fromkeys(get_layer_settings(), spec_field)
    read_too = _load_features(sections, path.parent)
    return FileReading(
        framework=MEGATRON_BRIDGE,
        sections=sections,
        names=container.names,
        environment=_build_environment(environment),
        own_fields=own_fields,
        notes=read_too,
        release=release,
        uncertainty=Uncertainty(
            open_points=tuple(unknown), no_plan_reason=no_plan_reason, unread_sources=opened
        ),
    )


def _build_environment(section: object) -> dict[str, str]:
    """Return the environment variables of a section; none without the section."""
    if not isinstance(section, Mapping):
        return {}
    return {str(name): str(value) for name, value in section.items()}


def _select_owners(sections: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Return the sections of Megatron's configs that are mappings."""
    owners: dict[str, dict[str, object]] = {}
    for owner_name in OWNER_SECTIONS:
        fields = sections.get(owner_name)
        if isinstance(fields, dict):
            owners[owner_name] = fields
    return owners


def _has_most_model_fields(owners: Mapping[str, Mapping[str, object]]) -> bool:
    """Return whether a file has more than half of the fields of Megatron's model config.

    Such a file is a saved run, which has every field of its release.
    """
    model_fields = OWNER_FIELDS[MODEL_SECTION].keys()
    known = owners.get(MODEL_SECTION, {}).keys() & model_fields
    return 2 * len(known) > len(model_fields)


def _pop_framework_fields(
    owners: Mapping[str, dict[str, object]], classes: Mapping[str, Sequence[str]]
) -> dict[str, object]:
    """Remove the fields of Megatron Bridge's own classes from the owners' sections.

    Args:
        owners: Section -> fields.
        classes: Section -> import paths of the classes whose fields it has.

    Returns:
        Dotted key of a removed field -> its value.
    """
    own_fields: dict[str, object] = {}
    for owner_name, fields in owners.items():
        owner_classes = classes.get(owner_name, ())
        names = list_framework_fields(MEGATRON_BRIDGE, owner_classes, fields, owner_name)
        for name in names:
            own_fields[f"{owner_name}.{name}"] = fields.pop(name)
    return own_fields


def _pop_newer_fields(owners: Mapping[str, dict[str, object]]) -> list[str]:
    """Remove the fields that no known release of Megatron Core has, and return their dotted keys."""
    removed: list[str] = []
    for owner_name, fields in owners.items():
        for name in list_newer_fields(fields, owner_name):
            removed.append(f"{owner_name}.{name}")
            del fields[name]
    return removed


def _load_features(sections: dict[str, object], folder: Path) -> tuple[str, ...]:
    """Replace the path of the debugger's file of features by the content of the file.

    Args:
        sections: The sections of the run. That of the debugger is changed.
        folder: Folder of the run's file, which is searched first.

    Returns:
        The sentence about the file; empty if no file is found.
    """
    section = sections.get(SECTION)
    if not isinstance(section, Mapping):
        return ()
    name = section.get(FEATURES)
    if not isinstance(name, str) or not name.isprintable():
        return ()
    for file in (folder / name, Path(name)):
        if os.path.isfile(file):  # noqa: PTH113  a path may be too long for Path.is_file
            sections[SECTION] = {**section, FEATURES: load_first_document(file)}
            return (f"{SECTION}.{FEATURES}: read from {file}.",)
    return ()


def load_first_document(file: Path) -> object:
    """Return the first YAML document of a file; None for an empty file.

    Raises:
        RunConfigError: The file cannot be read, or is no YAML.
    """
    data = strict_yaml.read_bytes(file, error=RunConfigError)
    text = strict_yaml.decode_text(data, str(file), error=RunConfigError)
    documents = strict_yaml.load_documents(text, str(file), error=RunConfigError)
    if not documents:
        return None
    return documents[0]


def _write_freeze_defaults(model: dict[str, object], classes: Sequence[str]) -> None:
    """Write the defaults of the fields that freeze a part of a multimodal model.

    Args:
        model: Fields of the model's section, which are changed.
        classes: Import paths of the model's classes.
    """
    frozen: set[str] = set()
    for model_class in classes:
        frozen.update(FROZEN_PARTS_OF_CLASS.get(model_class, ()))
    for name in get_framework_fields(MEGATRON_BRIDGE, classes) & FREEZE_FIELDS:
        model.setdefault(name, name in frozen)
    for name, switch in FREEZE_FIELD_OF_CONFIG.items():
        if model.get(name) is not None:
            model.setdefault(switch, False)


class _SavedContainer:
    """The sections of a container under our names."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.sections: dict[str, object] = {}
        self.names: dict[str, str] = {}
        """Key of the file -> ours, if they differ."""
        self.classes: dict[str, tuple[str, ...]] = {}
        """Section -> import paths of the classes whose fields it has."""
        self.lost: list[str] = []
        """A sentence for each object whose content is not in the file."""
        for key, value in config.items():
            if key != TARGET_KEY:
                self._add_section(str(key), value)
        self._move_fields()

    @property
    def model_class(self) -> str:
        """Import path of the model's class; empty if the file names none."""
        classes = self.classes.get(MODEL_SECTION, ())
        if not classes:
            return ""
        return classes[0]

    def _add_section(self, key: str, value: object) -> None:
        """Add a section of the file under our name.

        Raises:
            RunConfigError: The section is no mapping and has to be one.
        """
        section = _get_our_section(key)
        if section != key:
            self.names[key] = section
        if isinstance(value, Mapping):
            self.sections[section] = self._merge_parts(section, self._split_parts(section, value))
            return
        if value is not None and section in MAPPING_SECTIONS:
            rule = "must be a mapping of fields"
            raise RunConfigError.of(key, rule, value, f"Write {section}.FIELD=VALUE.")
        self.sections[section] = self._convert_to_plain(value, section)

    def _split_parts(self, section: str, value: Mapping[Any, object]) -> list[Mapping[Any, object]]:
        """Return the objects whose fields a section has: its own, and a config inside it."""
        if section == PRECISION_KEY:
            return [drop_references(value)]
        if not isinstance(value.get(NESTED_CONFIG_KEY), Mapping):
            return [value]
        self.names[f"{section}.{NESTED_CONFIG_KEY}"] = section
        outer = dict(value)
        inner = outer.pop(NESTED_CONFIG_KEY)
        return [outer, inner]

    def _merge_parts(
        self, section: str, parts: Sequence[Mapping[Any, object]]
    ) -> dict[str, object]:
        """Return the fields of a section's objects together, and record the classes of the objects."""
        classes = [str(part[TARGET_KEY]) for part in parts if TARGET_KEY in part]
        self.classes[section] = tuple(classes)
        merged: dict[str, object] = {}
        for part in parts:
            fields: dict[str, object] = {}
            for name, value in _list_fields(part):
                fields[name] = self._convert_to_plain(value, f"{section}.{name}")
            merged.update(_drop_nulls(section, fields))
        if section == ADAPTER_SECTION and classes:
            merged["type"] = classes[0].rpartition(".")[2]
        return merged

    def _move_fields(self) -> None:
        """Move the fields of `MOVED_FIELDS` to our sections."""
        for (section, field), (our_section, name) in MOVED_FIELDS.items():
            file_fields = self.sections.get(section)
            if isinstance(file_fields, dict) and field in file_fields:
                our_fields = self.sections.get(our_section)
                if not isinstance(our_fields, dict):
                    our_fields = {}
                self.sections[our_section] = {**our_fields, name: file_fields[field]}
                self.names[f"{section}.{field}"] = f"{our_section}.{name}"

    def _convert_to_plain(self, value: object, path: str) -> object:
        """Return a value as plain data.

        A function, a class or a dtype becomes its import path, and the member of an enum its value or
        its name. An object without content becomes None, with a sentence in `lost`.

        Args:
            value: The value in the file.
            path: Our dotted key of it.
        """
        if isinstance(value, list):
            return [self._convert_to_plain(item, path) for item in value]
        if not isinstance(value, Mapping):
            return value
        if TARGET_KEY not in value:
            items = [(str(key), item) for key, item in value.items()]
            return self._convert_items(items, path)
        if value.get(CALL_KEY) is False or value.get(PARTIAL_KEY):
            return value[TARGET_KEY]
        arguments = value.get(ARGUMENTS_KEY)
        if isinstance(arguments, list) and arguments:
            # The value of an enum, or the name of the attribute that `getattr` reads.
            member = arguments[-1]
            if isinstance(member, str):
                return member
            return value.get(NAME_KEY, member)
        fields = _list_fields(value)
        if value.get(CALL_KEY) and not fields:
            kind = str(value[TARGET_KEY]).rpartition(".")[2]
            self.lost.append(CONTENT_IS_LOST.format(path=path, kind=kind))
            return None
        return self._convert_items(fields, path)

    def _convert_items(self, items: Sequence[tuple[str, object]], path: str) -> dict[str, object]:
        """Return the items of a mapping as plain data."""
        return {key: self._convert_to_plain(item, f"{path}.{key}") for key, item in items}


def _get_our_section(key: str) -> str:
    """Return our name of a section. Releases before 0.2 write ``_config`` after its name."""
    name = key.removesuffix("_config")
    if name == DATASET_SECTION:
        return "data"
    return name


def _list_fields(value: Mapping[Any, object]) -> list[tuple[str, object]]:
    """Return the fields of an object, without the keys that describe how it is made."""
    return [(str(key), inner) for key, inner in value.items() if not str(key).startswith("_")]


def _drop_nulls(owner_name: str, fields: dict[str, object]) -> dict[str, object]:
    """Return fields without the nulls that Megatron's fields do not take.

    The null of a switch becomes False. That of a number is left out, so that the default counts.
    """
    rows = OWNER_FIELDS.get(owner_name, {})
    defaults = OWNER_DEFAULTS.get(owner_name, {})
    kept: dict[str, object] = {}
    for name, value in fields.items():
        takes_null = defaults.get(name) is None or rows[name].kind in ("name", "dtype", "any")
        if value is not None or takes_null:
            kept[name] = value
        elif rows[name].kind == "bool":
            kept[name] = False
    return kept
