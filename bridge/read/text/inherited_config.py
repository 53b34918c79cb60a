"""`read_inherited_config`: a YAML file of OmegaConf over the files that it inherits from.

    config = composed(path, mapping)
    config.values["policy"]["precision"]      # "bfloat16"
    config.missing                            # files that `defaults` names and that are not there
    resolved(config.values)                   # the same with its interpolations in place

A file names the files below it in `defaults`, each by its path from the folder of the file.
`${policy.precision}` and `${.name}` are the values there, and `${mul:a,b}` is their product. Other
resolvers, of the environment for one, are left as they are written: only the run knows their values.
No file is run, and no file is read but those that are named.

Source: NVIDIA-NeMo/RL nemo_rl/utils/config.py at 7ea279abfbeb: load_config_with_inheritance,
merge_with_override, register_omegaconf_resolvers.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bridge.errors import PayloadError
from bridge.precision import strict_yaml

DEFAULTS_KEY = "defaults"
"""Key of a file with the names of the files below it."""
REPLACE_KEY = "_override_"
"""Key of a section that replaces the section below it, instead of being merged with it."""
MANDATORY_VALUE = "???"
"""A value that a file leaves to those above it."""
MAX_INHERITANCE = 12
"""Files that inherit from each other, and interpolations within each other."""
INTERPOLATION_PATTERN = re.compile(r"\$\{([^${}]*)\}")
RESOLVERS: dict[str, Callable[[Sequence[float]], float]] = {
    "add": math.fsum,
    "mul": math.prod,
    "div": lambda numbers: numbers[0] / numbers[1],
    "max": max,
}
"""The resolvers that NeMo-RL registers."""

ConfigTree = dict[str, object]


@dataclass(kw_only=True)
class InheritedConfig:
    """One file with those that it inherits from."""

    values: ConfigTree = field(default_factory=dict)
    """The merged mapping."""
    read: list[str] = field(default_factory=list)
    """The files below it that were read, by the paths that `defaults` has."""
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted key of a value that a file below states -> that file, by the path that `defaults` has."""
    missing: list[str] = field(default_factory=list)
    """The files below it that were not found, or whose names only the run knows."""


def read_inherited_config(path: Path, content: Mapping[str, object]) -> InheritedConfig:
    """Return the mapping of a file merged over those that it inherits from.

    Interpolations are left as they are written.

    Args:
        path: The file's path, from whose folder the names of others count.
        content: The file's own mapping.

    Raises:
        PayloadError: A file below it holds no mapping, or the files inherit from each other in a circle.
    """
    config = InheritedConfig()
    config.values = _merge_bases(path, content, config, ())
    for key in _list_dotted_keys(content):
        config.origins.pop(key, None)
    return config


def _merge_bases(
    path: Path, content: Mapping[str, object], config: InheritedConfig, above: tuple[Path, ...]
) -> ConfigTree:
    """Return a file's mapping over those of its bases, whose names are noted in `config`."""
    own_values = {str(key): value for key, value in content.items() if key != DEFAULTS_KEY}
    values: ConfigTree = {}
    for name in _list_base_names(content.get(DEFAULTS_KEY)):
        base = Path(os.path.normpath(path.parent / name))
        if "$" in name or not name.isprintable() or not os.path.isfile(base):  # noqa: PTH113  a path may be too long
            config.missing.append(name)
            continue
        if base in above or len(above) > MAX_INHERITANCE:
            rule = f"files must not inherit from each other in a circle, got {name!r}"
            raise PayloadError(f"{path}: {rule}. Remove it from defaults.")
        config.read.append(name)
        below = _read_mapping(base)
        values = _merge_files(values, _merge_bases(base, below, config, (*above, path)))
        config.origins |= dict.fromkeys(_list_dotted_keys(below), name)
    return _merge_files(values, own_values)


def _list_dotted_keys(values: Mapping[str, object], path: str = "") -> Iterator[str]:
    """Yield the dotted keys of the values of a mapping."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _list_dotted_keys(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def _list_base_names(defaults: object) -> list[str]:
    """Return the paths that `defaults` has; an entry of another kind, such as a group, as text."""
    if defaults is None:
        return []
    entries = defaults if isinstance(defaults, list) else [defaults]
    return [str(entry) for entry in entries]


def _read_mapping(path: Path) -> ConfigTree:
    text = strict_yaml.decode_text(
        strict_yaml.read_bytes(path, error=PayloadError), str(path), error=PayloadError
    )
    documents = strict_yaml.load_documents(text, str(path))
    content = documents[0] if documents else {}
    if not isinstance(content, dict):
        rule = "must hold a mapping, as a file that another one inherits from"
        raise PayloadError(f"{path}: {rule}, got {type(content).__name__}. Correct it.")
    return content


def _merge_files(below: ConfigTree, above: ConfigTree) -> ConfigTree:
    """Return a file over the one below it; a section that is marked to replace is not merged."""
    kept = dict(below)
    plain: ConfigTree = {}
    for key, section in above.items():
        plain[key] = section
        if isinstance(section, dict) and section.get(REPLACE_KEY):
            plain[key] = {name: value for name, value in section.items() if name != REPLACE_KEY}
            kept.pop(key, None)
    return merge_mappings(kept, plain)


def merge_mappings(below: ConfigTree, above: Mapping[str, object]) -> ConfigTree:
    """Return one mapping over another, key by key; a list replaces the list below it."""
    values = dict(below)
    for key, value in above.items():
        before = values.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            values[key] = merge_mappings(before, value)
        elif value != MANDATORY_VALUE or key not in values:
            values[key] = value
    return values


def is_unresolved(value: object) -> bool:
    """Return whether only the run knows a value: an interpolation that is left, or `???`."""
    return isinstance(value, str) and ("${" in value or value == MANDATORY_VALUE)


def resolve_interpolations(values: ConfigTree) -> ConfigTree:
    """Return a mapping with those interpolations in place that it decides itself.

    The others stay as they are written.
    """
    return _InterpolationResolver(values).resolve_mapping(values, ())


class _UndecidedError(Exception):
    """Only the run knows the value of an interpolation."""


class _InterpolationResolver:
    """The interpolations of one mapping, by the path of the value that they stand in."""

    def __init__(self, values: ConfigTree) -> None:
        self.values = values

    def resolve_mapping(self, block: Mapping[str, object], path: tuple[str, ...]) -> ConfigTree:
        """Return the mapping at a path with its interpolations in place."""
        plain: ConfigTree = {}
        for key, value in block.items():
            plain[key] = self._resolve_value(value, (*path, str(key)))
        return plain

    def _resolve_value(self, value: object, path: tuple[str, ...]) -> object:
        """Return the value at a path with its interpolations in place, or as it is written."""
        if isinstance(value, dict):
            return self.resolve_mapping(value, path)
        if isinstance(value, list):
            return [self._resolve_value(item, (*path, "-")) for item in value]
        if isinstance(value, str) and "${" in value:
            try:
                return self._resolve_text(value, path, 0)
            except _UndecidedError:
                return value
        return value

    def _resolve_text(self, text: str, path: tuple[str, ...], depth: int) -> object:
        """Return the value that a text stands for, its innermost interpolations first."""
        if depth > MAX_INHERITANCE:
            raise _UndecidedError
        match = INTERPOLATION_PATTERN.search(text)
        while match is not None:
            value = self._resolve_expression(match[1].strip(), path, depth)
            if match[0] == text:
                return value
            if isinstance(value, dict | list):
                raise _UndecidedError
            text = f"{text[: match.start()]}{value}{text[match.end() :]}"
            match = INTERPOLATION_PATTERN.search(text)
        return text

    def _resolve_expression(self, inner: str, path: tuple[str, ...], depth: int) -> object:
        """Return the value that the text between `${` and `}` stands for."""
        name, colon, arguments = inner.partition(":")
        if colon:
            return _call_resolver(name, arguments)
        target = tuple(inner.split("."))
        if inner.startswith("."):  # relative to the mapping that the value stands in
            relative = inner.lstrip(".")
            dots = len(inner) - len(relative)
            target = (*path[:-dots], *relative.split("."))
        value: object = self.values
        for key in target:
            if not isinstance(value, Mapping) or key not in value:
                raise _UndecidedError
            value = value[key]
        if value == MANDATORY_VALUE:
            raise _UndecidedError
        if isinstance(value, str) and "${" in value:
            return self._resolve_text(value, target, depth + 1)
        return self._resolve_value(value, target)


def _call_resolver(name: str, arguments: str) -> object:
    """Return the value of a resolver of NeMo-RL."""
    function = RESOLVERS.get(name)
    if function is None:
        raise _UndecidedError
    try:
        numbers = [float(number) for number in arguments.split(",")]
        value = function(numbers)
    except (ValueError, IndexError, ZeroDivisionError):
        raise _UndecidedError from None
    if name != "div" and value.is_integer():
        return int(value)
    return value
