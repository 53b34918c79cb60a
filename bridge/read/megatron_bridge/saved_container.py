"""Megatron Bridge's YAML of a run: a saved `ConfigContainer`, or the ``run_config.yaml`` of a checkpoint.

Each object is a mapping whose ``_target_`` names its class; nothing in it is imported or
instantiated. The sections keep Megatron Bridge's names where we have none for them: `comm_overlap`,
`peft`, `rerun_state_machine`, `dist`, ...
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.errors import RunConfigError
from bridge.precision import strict_yaml
from bridge.preflight.file_reading import MEGATRON_BRIDGE, FileReading
from bridge.read.assumed_release import infer_release
from bridge.read.debug_features import FEATURES, SECTION
from bridge.read.framework_fields import (
    get_framework_fields,
    has_language_model,
    list_framework_fields,
    list_newer_fields,
)
from bridge.read.layer_source import find_spec_no_plan_reason, get_layer_settings
from bridge.read.run_keys import OWNER_SECTIONS, PRECISION_KEY, SECTION_CLASSES
from bridge.registry.config import drop_references
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
"""Beginnings of the import paths of the classes whose fields such a file has."""
CONTAINER_NAME = "ConfigContainer"
"""Class of a whole run, also where a project has its own under this name."""
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
"""Class of a model -> the parts that it freezes by default; the other classes freeze none."""
FREEZE_FIELD_OF_CONFIG = {
    "vision_config": "freeze_vision_model",
    "audio_config": "freeze_audio_model",
    "sound_config": "freeze_sound_encoder",
}
"""Field with the config of a part in front of the language model -> the field that freezes that
part."""
CONTENT_IS_LOST = "{path}: the file names a {kind} without its content."
FIELDS_ARE_NEWER = (
    "{fields}: no known release of Megatron Core has these fields, and nothing here reads them."
)


def is_saved_container(config: Mapping[str, Any]) -> bool:
    """Return whether a file of these contents is Megatron Bridge's: a whole run, or sections of its classes."""
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


def read_saved_container(config: Mapping[str, Any], path: Path) -> FileReading:
    """Return what a file of these contents says of a run.

    RunConfigError for a run of a diffusion model.

    `path` is the file's, next to which other files are looked up.
    """
    container = _SavedContainer(config)
    if not has_language_model(MEGATRON_BRIDGE, container.model_class):
        rule = "a diffusion model has no layers of a language model"
        raise RunConfigError.of(
            "model", rule, container.model_class, "Give a run of a language model."
        )
    sections = container.sections
    environment = sections.pop(ENVIRONMENT_SECTION, None) or {}
    if isinstance(sections.get(MODEL_SECTION), dict):
        _write_freeze_defaults(sections[MODEL_SECTION], container.classes.get(MODEL_SECTION, ()))
    owners = {
        owner_name: sections[owner_name]
        for owner_name in OWNER_SECTIONS
        if isinstance(sections.get(owner_name), dict)
    }
    known = owners.get(MODEL_SECTION, {}).keys() & OWNER_FIELDS[MODEL_SECTION].keys()
    is_whole = 2 * len(known) > len(OWNER_FIELDS[MODEL_SECTION])
    own: dict[str, Any] = {}
    newer: list[str] = []
    for owner_name, fields in owners.items():
        for name in list_framework_fields(
            MEGATRON_BRIDGE, container.classes.get(owner_name, ()), fields, owner_name
        ):
            own[f"{owner_name}.{name}"] = fields.pop(name)
        if is_whole:
            for name in list_newer_fields(fields, owner_name):
                newer.append(f"{owner_name}.{name}")
                del fields[name]
    release, reason = infer_release(owners, is_complete=is_whole)
    unknown = [*container.lost]
    if newer:
        unknown.append(FIELDS_ARE_NEWER.format(fields=", ".join(newer)))
    opened: dict[str, str] = {}
    no_plan_reason = find_spec_no_plan_reason(own)
    if no_plan_reason is not None:
        opened = dict.fromkeys(get_layer_settings(), no_plan_reason.partition(":")[0])
    read_too = _load_features(sections, path.parent)
    return FileReading(
        framework=MEGATRON_BRIDGE,
        sections=sections,
        names=container.names,
        environment={str(key): str(value) for key, value in environment.items()},
        own_fields=own,
        unknown=tuple(unknown),
        no_plan_reason=no_plan_reason,
        opened=opened,
        read_too=read_too,
        release=release,
        release_reason=reason,
    )


def _load_features(sections: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """Put the content of the debugger's file of features in the place of its path.

    Return what was read, as a sentence.
    """
    section = sections.get(SECTION)
    if not isinstance(section, Mapping):
        return ()
    name = section.get(FEATURES)
    if not isinstance(name, str) or not name.isprintable():
        return ()
    for file in (folder / name, Path(name)):
        if os.path.isfile(file):  # noqa: PTH113  a path may be too long for Path.is_file
            text = strict_yaml.decode_text(
                strict_yaml.read_bytes(file, error=RunConfigError), str(file)
            )
            (content, *_) = strict_yaml.load_documents(text, str(file), error=RunConfigError) or (
                None,
            )
            sections[SECTION] = {**section, FEATURES: content}
            return (f"{SECTION}.{FEATURES}: read from {file}.",)
    return ()


def _write_freeze_defaults(model: dict[str, Any], classes: Sequence[str]) -> None:
    """Write the defaults of the fields that freeze a part of a multimodal model into its section."""
    frozen: set[str] = set()
    for model_class in classes:
        frozen.update(FROZEN_PARTS_OF_CLASS.get(model_class, ()))
    for name in get_framework_fields(MEGATRON_BRIDGE, classes) & FREEZE_FIELDS:
        model.setdefault(name, name in frozen)
    for name, switch in FREEZE_FIELD_OF_CONFIG.items():
        if model.get(name) is not None:
            model.setdefault(switch, False)


class _SavedContainer:
    """A container's sections under our names while they are read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.sections: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        """Key of the file -> ours, where they differ."""
        self.classes: dict[str, tuple[str, ...]] = {}
        """Section -> import paths of the classes whose fields it has."""
        self.lost: list[str] = []
        """A sentence for each object whose content is not in the file."""
        for key, value in config.items():
            if key != TARGET_KEY:
                self._add(str(key), value)
        for (section, field), (ours, name) in MOVED_FIELDS.items():
            theirs = self.sections.get(section)
            if isinstance(theirs, dict) and field in theirs:
                fields = self.sections.get(ours) or {}
                self.sections[ours] = {**fields, name: theirs[field]}
                self.names[f"{section}.{field}"] = f"{ours}.{name}"

    @property
    def model_class(self) -> str:
        """Import path of the model's class, empty where the file names none."""
        classes = self.classes.get(MODEL_SECTION, ())
        return classes[0] if classes else ""

    def _add(self, key: str, value: Any) -> None:
        """Add a section; releases before 0.2 write ``_config`` behind its name."""
        theirs = key.removesuffix("_config")
        ours = "data" if theirs == DATASET_SECTION else theirs
        if ours != key:
            self.names[key] = ours
        if not isinstance(value, Mapping):
            if value is not None and ours in (
                *OWNER_SECTIONS,
                *SECTION_CLASSES,
                ENVIRONMENT_SECTION,
            ):
                raise RunConfigError.of(
                    key, "must be a mapping of fields", value, f"Write {ours}.FIELD=VALUE."
                )
            self.sections[ours] = self._plain(value, ours)
            return
        parts: list[Mapping[Any, Any]] = [value]
        if isinstance(value.get(NESTED_CONFIG_KEY), Mapping):
            outer = dict(value)
            parts = [outer, outer.pop(NESTED_CONFIG_KEY)]
            self.names[f"{ours}.{NESTED_CONFIG_KEY}"] = ours
        if ours == PRECISION_KEY:
            parts = [drop_references(value)]
        self.classes[ours] = tuple(str(part[TARGET_KEY]) for part in parts if TARGET_KEY in part)
        merged: dict[str, Any] = {}
        for part in parts:
            fields = {
                name: self._plain(inner, f"{ours}.{name}") for name, inner in _list_fields(part)
            }
            merged.update(_drop_nulls(ours, fields))
        if ours == ADAPTER_SECTION and self.classes[ours]:
            merged["type"] = self.classes[ours][0].rpartition(".")[2]
        self.sections[ours] = merged

    def _plain(self, value: Any, path: str) -> Any:
        """Return a value as plain data: names of functions, classes and dtypes, values or names of enums."""
        if isinstance(value, list):
            return [self._plain(item, path) for item in value]
        if not isinstance(value, Mapping):
            return value
        if TARGET_KEY not in value:
            return {str(key): self._plain(item, f"{path}.{key}") for key, item in value.items()}
        if value.get(CALL_KEY) is False or value.get(PARTIAL_KEY):
            return value[TARGET_KEY]
        if isinstance(value.get(ARGUMENTS_KEY), list) and value[ARGUMENTS_KEY]:
            member = value[ARGUMENTS_KEY][-1]  # an enum's value; the attribute that getattr reads
            if isinstance(member, str):
                return member
            return value.get(NAME_KEY, member)
        if value.get(CALL_KEY) and not dict(_list_fields(value)):
            self.lost.append(
                CONTENT_IS_LOST.format(path=path, kind=str(value[TARGET_KEY]).rpartition(".")[2])
            )
            return None
        return {key: self._plain(item, f"{path}.{key}") for key, item in _list_fields(value)}


def _list_fields(value: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Return the fields of an object, without the keys that say how it is made."""
    return [(str(key), inner) for key, inner in value.items() if not str(key).startswith("_")]


def _drop_nulls(owner_name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields without nulls where Megatron's field takes none.

    A switch is off there, and a number has its default.
    """
    rows = OWNER_FIELDS.get(owner_name, {})
    defaults = OWNER_DEFAULTS.get(owner_name, {})
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        takes_null = defaults.get(name) is None or rows[name].kind in ("name", "dtype", "any")
        if value is not None or takes_null:
            kept[name] = value
        elif rows[name].kind == "bool":
            kept[name] = False
    return kept
