"""`PrimusPresets`: the module and model files of a clone of Primus that an experiment names.

    presets = PrimusPresets(Path("examples/exp.yaml"), "megatron", variables={})
    presets.load("modules", "pre_trainer.yaml")    # what it and the files that it extends state

`extends` names files over which a file is laid. `${NAME:default}` is a variable.

Source: AMD-AGI/Primus fd1eeabb of 2026-08-22, primus/core/config/yaml_loader.py, preset_loader.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.errors import RunConfigError
from bridge.precision import strict_yaml

TRAINER_MODULES = ("pre_trainer", "post_trainer")
"""Modules that train, in the order in which Primus looks for them."""
TRAINER_KEYS = ("framework", "config", "model", "overrides", "name")
"""Keys of a trainer that are no arguments."""
CONFIGS_FOLDER = Path("primus", "configs")
"""The folder of the module and model files in a clone of Primus."""
VARIABLE_PATTERN = re.compile(r"\$\{([^:{}]+)(?::([^}]*))?\}")
INTEGER_PATTERN = re.compile(r"-?\d+")
REAL_PATTERN = re.compile(r"-?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)")
EXTENDED_KEY = "extends"
UNREAD_KEY = "bases"
"""A key with names of files in some model files, in the place of `extends`. Primus does not read it."""
NULL_TEXT = "null"
MAX_EXTENDED_FILES = 12
"""Files that extend each other."""
FILE_NOT_THERE = (
    "{name}: not there; it lies in {folder} of a clone of Primus, and what it states is not read."
)
FILE_READ = "{name}: read from {folder}."
BASES_NOT_READ = (
    "{name}: names {files} in `bases`, a key that Primus does not read, so that nothing of {files} is "
    "part of the run; Primus reads `extends` (primus/core/config/yaml_loader.py)."
)


def find_trainer(config: Mapping[str, Any], framework: str) -> Mapping[str, Any] | None:
    """Return the module of an experiment that trains on a framework; None if none does."""
    modules = config.get("modules")
    if not isinstance(modules, Mapping):
        return None
    for name in TRAINER_MODULES:
        trainer = modules.get(name)
        if isinstance(trainer, Mapping) and trainer.get("framework") == framework:
            return trainer
    return None


class PrimusPresets:
    """The module and model files of a clone of Primus, while an experiment of it is read."""

    def __init__(self, path: Path, framework: str, variables: Mapping[str, str]) -> None:
        self.framework = framework
        """Name of the framework, which is that of its folders."""
        self.stated = variables
        self.clone = find_clone(path)
        """The clone that the experiment lies in; None outside of one."""
        self.absent: list[str] = []
        """Files that are not there."""
        self.read_too: list[str] = []
        self.unknown: list[str] = []
        self.variables: dict[str, None] = {}

    def load(self, kind: str, name: str) -> dict[str, Any]:
        """Return what a module or model file and those that it extends state; none of one that is not there."""
        name = add_suffix(name)
        folder_in_clone = Path(CONFIGS_FOLDER, kind, self.framework)
        file = None
        if self.clone is not None:
            file = self.clone / folder_in_clone / name
        if file is None or not file.is_file():
            self.absent.append(name)
            self.unknown.append(FILE_NOT_THERE.format(name=name, folder=folder_in_clone))
            return {}
        self.read_too.append(FILE_READ.format(name=name, folder=folder_in_clone))
        return self._load_extended(file, MAX_EXTENDED_FILES)

    def _load_extended(self, file: Path, depth: int) -> dict[str, Any]:
        if not depth:
            raise RunConfigError.of(
                str(file),
                f"extends more than {MAX_EXTENDED_FILES} files within each other",
                file.name,
            )
        content = self.resolve_variables(_load_mapping(file))
        unread = _as_names(content.pop(UNREAD_KEY, None))
        if unread:
            self.read_too.append(BASES_NOT_READ.format(name=file.name, files=", ".join(unread)))
        merged: dict[str, Any] = {}
        for name in _as_names(content.pop(EXTENDED_KEY, None)):
            other = file.parent / name
            if other.is_file():
                merged = merge(merged, self._load_extended(other, depth - 1))
            else:
                self.absent.append(name)
        return merge(merged, content)

    def resolve_variables(self, value: Any) -> Any:
        """Return a value with its variables as Primus takes them; one that nothing sets stays as it is written."""
        if isinstance(value, Mapping):
            return {str(key): self.resolve_variables(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.resolve_variables(inner) for inner in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        return _parse_scalar(VARIABLE_PATTERN.sub(self._substitute_variable, value))

    def _substitute_variable(self, match: re.Match[str]) -> str:
        name, default = match[1], match[2]
        self.variables[name] = None
        if name in self.stated:
            return self.stated[name]
        if default is None:
            return match[0]
        return default


def find_clone(path: Path) -> Path | None:
    """Return the clone of Primus that a file lies in; None outside of one."""
    for folder in path.resolve().parents:
        if (folder / CONFIGS_FOLDER / "modules").is_dir():
            return folder
    return None


def add_suffix(reference: object) -> str:
    """Return the name of a module or model file with its suffix, which an experiment may leave out."""
    name = str(reference)
    if name.endswith((".yaml", ".yml")):
        return name
    return f"{name}.yaml"


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return two mappings with the values of the one above, mappings in them laid over each other too."""
    merged = dict(below)
    for key, value in above.items():
        lower = merged.get(key)
        if isinstance(lower, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(lower, value)
        else:
            merged[key] = value
    return merged


def replace_null_texts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping in which each text "null" is None, as a variable states that there is no value.

    Source: primus/core/utils/yaml_utils.py set_value_by_key.
    """
    replaced: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            replaced[key] = replace_null_texts(value)
        elif value == NULL_TEXT:
            replaced[key] = None
        else:
            replaced[key] = value
    return replaced


def _as_names(value: object) -> list[str]:
    """Return the names of a key with one name, or with a list of them; none for an absent key."""
    if not value:
        return []
    if isinstance(value, list):
        return [str(name) for name in value]
    return [str(value)]


def _load_mapping(file: Path) -> dict[str, Any]:
    text = strict_yaml.decode_text(
        strict_yaml.read_bytes(file, error=RunConfigError), str(file), error=RunConfigError
    )
    (content, *_) = strict_yaml.load_documents(text, str(file), error=RunConfigError) or (None,)
    if not isinstance(content, dict):
        raise RunConfigError.of(str(file), "must hold a mapping", content, "Correct it there.")
    return content


def _parse_scalar(text: str) -> Any:
    """Return a text with its variables in place as the truth value or the number that it shows."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if INTEGER_PATTERN.fullmatch(text):
        return int(text)
    if REAL_PATTERN.fullmatch(text):
        return float(text)
    return text
