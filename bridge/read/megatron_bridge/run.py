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
from bridge.read.assumed_release import release_of
from bridge.read.debug_features import FEATURES, SECTION
from bridge.read.framework_fields import fields_of, has_text, newer_fields, own_fields
from bridge.read.keys import OWNERS, PRECISION, SECTIONS
from bridge.read.layer_source import layer_settings, unplanned_spec
from bridge.registry.config import without_references
from bridge.target.fields import DEFAULTS, ENCODERS, FIELDS

TARGET = "_target_"
NAME = "_name_"
ARGUMENTS = "_args_"
CALL = "_call_"
PARTIAL = "_partial_"
DATA = "dataset"
MODEL = "model"
ADAPTER = "peft"
NESTED = "transformer"
ENVIRONMENT = "env_vars"
CLASSES = ("megatron.bridge.", "megatron.core.")
"""Beginnings of the import paths of the classes whose fields such a file has."""
CONTAINER = "ConfigContainer"
"""Class of a whole run, also where a project has its own under this name."""
ELSEWHERE = {("rerun_state_machine", "check_for_nan_in_loss"): ("train", "check_for_nan_in_loss")}
"""Section and field of Megatron Bridge -> ours."""
FREEZES = frozenset(
    ("freeze_language_model", "freeze_vision_projection", *(f"freeze_{part}" for part in ENCODERS))
)
"""Fields of a multimodal model that freeze a part of it."""
FROZEN = {
    "megatron.bridge.models.qwen_vl.qwen3_vl_provider.Qwen3VLMoEModelProvider": (
        *("freeze_language_model", "freeze_vision_model"),
    )
}
"""Class of a model -> the parts that it freezes by default; the other classes freeze none."""
CONFIGS_OF_ENCODERS = {
    "vision_config": "freeze_vision_model",
    "audio_config": "freeze_audio_model",
    "sound_config": "freeze_sound_encoder",
}
"""Field with the config of a part in front of the language model -> the field that freezes that
part."""
LOST = "{path}: the file names a {kind} without its content."
NEWER = "{fields}: no known release of Megatron Core has these fields, and nothing here reads them."


def is_of(whole: Mapping[str, Any]) -> bool:
    """Return whether a file of these contents is Megatron Bridge's: a whole run, or sections of its classes."""
    sections = {str(key).removesuffix("_config"): value for key, value in whole.items()}
    if TARGET in whole:
        target = str(whole[TARGET])
        is_container = target.startswith(CLASSES) or target.rpartition(".")[2] == CONTAINER
        has_sections = not sections.keys().isdisjoint((*OWNERS, *SECTIONS))
        return is_container and has_sections and ARGUMENTS not in whole
    for name in (PRECISION, *OWNERS, *SECTIONS):
        section = sections.get(name)
        if isinstance(section, Mapping) and str(section.get(TARGET)).startswith(CLASSES):
            return True
    return False


def read(whole: Mapping[str, Any], path: Path) -> FileReading:
    """Return what a file of these contents says of a run.

    RunConfigError for a run of a diffusion model.

    `path` is the file's, next to which other files are looked up.
    """
    container = _Container(whole)
    if not has_text(MEGATRON_BRIDGE, container.model_class):
        rule = "a diffusion model has no layers of a language model"
        raise RunConfigError.of(
            "model", rule, container.model_class, "Give a run of a language model."
        )
    sections = container.sections
    environment = sections.pop(ENVIRONMENT, None) or {}
    if isinstance(sections.get(MODEL), dict):
        _freeze(sections[MODEL], container.classes.get(MODEL, ()))
    owners = {role: sections[role] for role in OWNERS if isinstance(sections.get(role), dict)}
    known = owners.get(MODEL, {}).keys() & FIELDS[MODEL].keys()
    is_whole = 2 * len(known) > len(FIELDS[MODEL])
    own: dict[str, Any] = {}
    newer: list[str] = []
    for role, fields in owners.items():
        for name in own_fields(MEGATRON_BRIDGE, container.classes.get(role, ()), fields, role):
            own[f"{role}.{name}"] = fields.pop(name)
        if is_whole:
            for name in newer_fields(fields, role):
                newer.append(f"{role}.{name}")
                del fields[name]
    release, reason = release_of(owners, is_whole=is_whole)
    unknown = [*container.lost]
    if newer:
        unknown.append(NEWER.format(fields=", ".join(newer)))
    opened: dict[str, str] = {}
    unplanned = unplanned_spec(own)
    if unplanned is not None:
        opened = dict.fromkeys(layer_settings(), unplanned.partition(":")[0])
    read_too = _read_features(sections, path.parent)
    return FileReading(
        framework=MEGATRON_BRIDGE,
        sections=sections,
        names=container.names,
        environment={str(key): str(value) for key, value in environment.items()},
        own_fields=own,
        unknown=tuple(unknown),
        unplanned=unplanned,
        opened=opened,
        read_too=read_too,
        release=release,
        release_reason=reason,
    )


def _read_features(sections: dict[str, Any], folder: Path) -> tuple[str, ...]:
    """Put the content of the debugger's file of features in the place of its path.

    Return what was read, as a sentence.
    """
    section = sections.get(SECTION)
    if not isinstance(section, Mapping):
        return ()
    name = section.get(FEATURES)
    if not isinstance(name, str) or not name.isprintable():
        return ()
    for place in (folder / name, Path(name)):
        if os.path.isfile(place):  # noqa: PTH113  a path may be too long for Path.is_file
            text = strict_yaml.decoded(
                strict_yaml.read_bytes(place, error=RunConfigError), str(place)
            )
            (content, *_) = strict_yaml.load_all(text, str(place), error=RunConfigError) or (None,)
            sections[SECTION] = {**section, FEATURES: content}
            return (f"{SECTION}.{FEATURES}: read from {place}.",)
    return ()


def _freeze(model: dict[str, Any], classes: Sequence[str]) -> None:
    """Write the defaults of the fields that freeze a part of a multimodal model into its section."""
    frozen: set[str] = set()
    for model_class in classes:
        frozen.update(FROZEN.get(model_class, ()))
    for name in fields_of(MEGATRON_BRIDGE, classes) & FREEZES:
        model.setdefault(name, name in frozen)
    for name, switch in CONFIGS_OF_ENCODERS.items():
        if model.get(name) is not None:
            model.setdefault(switch, False)


class _Container:
    """A container's sections under our names while they are read."""

    def __init__(self, whole: Mapping[str, Any]) -> None:
        self.sections: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        """Key of the file -> ours, where they differ."""
        self.classes: dict[str, tuple[str, ...]] = {}
        """Section -> import paths of the classes whose fields it has."""
        self.lost: list[str] = []
        """A sentence for each object whose content is not in the file."""
        for key, value in whole.items():
            if key != TARGET:
                self._add(str(key), value)
        for (section, field), (ours, name) in ELSEWHERE.items():
            theirs = self.sections.get(section)
            if isinstance(theirs, dict) and field in theirs:
                fields = self.sections.get(ours) or {}
                self.sections[ours] = {**fields, name: theirs[field]}
                self.names[f"{section}.{field}"] = f"{ours}.{name}"

    @property
    def model_class(self) -> str:
        """Import path of the model's class, empty where the file names none."""
        classes = self.classes.get(MODEL, ())
        return classes[0] if classes else ""

    def _add(self, key: str, value: Any) -> None:
        """Add a section; releases before 0.2 write ``_config`` behind its name."""
        theirs = key.removesuffix("_config")
        ours = "data" if theirs == DATA else theirs
        if ours != key:
            self.names[key] = ours
        if not isinstance(value, Mapping):
            if value is not None and ours in (*OWNERS, *SECTIONS, ENVIRONMENT):
                raise RunConfigError.of(
                    key, "must be a mapping of fields", value, f"Write {ours}.FIELD=VALUE."
                )
            self.sections[ours] = self._plain(value, ours)
            return
        parts: list[Mapping[Any, Any]] = [value]
        if isinstance(value.get(NESTED), Mapping):
            outer = dict(value)
            parts = [outer, outer.pop(NESTED)]
            self.names[f"{ours}.{NESTED}"] = ours
        if ours == PRECISION:
            parts = [without_references(value)]
        self.classes[ours] = tuple(str(part[TARGET]) for part in parts if TARGET in part)
        merged: dict[str, Any] = {}
        for part in parts:
            fields = {name: self._plain(inner, f"{ours}.{name}") for name, inner in _fields(part)}
            merged.update(_without_nulls(ours, fields))
        if ours == ADAPTER and self.classes[ours]:
            merged["type"] = self.classes[ours][0].rpartition(".")[2]
        self.sections[ours] = merged

    def _plain(self, value: Any, path: str) -> Any:
        """Return a value as plain data: names of functions, classes and dtypes, values or names of enums."""
        if isinstance(value, list):
            return [self._plain(item, path) for item in value]
        if not isinstance(value, Mapping):
            return value
        if TARGET not in value:
            return {str(key): self._plain(item, f"{path}.{key}") for key, item in value.items()}
        if value.get(CALL) is False or value.get(PARTIAL):
            return value[TARGET]
        if isinstance(value.get(ARGUMENTS), list) and value[ARGUMENTS]:
            member = value[ARGUMENTS][-1]  # an enum's value; the attribute that getattr reads
            if isinstance(member, str):
                return member
            return value.get(NAME, member)
        if value.get(CALL) and not dict(_fields(value)):
            self.lost.append(LOST.format(path=path, kind=str(value[TARGET]).rpartition(".")[2]))
            return None
        return {key: self._plain(item, f"{path}.{key}") for key, item in _fields(value)}


def _fields(value: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """Return the fields of an object, without the keys that say how it is made."""
    return [(str(key), inner) for key, inner in value.items() if not str(key).startswith("_")]


def _without_nulls(role: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields without nulls where Megatron's field takes none.

    A switch is off there, and a number has its default.
    """
    rows = FIELDS.get(role, {})
    defaults = DEFAULTS.get(role, {})
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        takes_null = defaults.get(name) is None or rows[name].kind in ("name", "dtype", "any")
        if value is not None or takes_null:
            kept[name] = value
        elif rows[name].kind == "bool":
            kept[name] = False
    return kept
