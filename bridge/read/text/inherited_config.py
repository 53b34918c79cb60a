"""`read_inherited_config`: a YAML file of OmegaConf, merged over the files that it inherits from.

    config = read_inherited_config(path, mapping)
    config.values["policy"]["precision"]      # "bfloat16"
    config.missing                            # files in `defaults` that were not found
    resolve_interpolations(config.values)     # the values with interpolations replaced

A file inherits from the files in its `defaults`, which are paths from its folder. These files are
"below" it: the values of the file replace their values.

An interpolation `${policy.precision}` is replaced by the value of this key, `${.name}` by the value
of a key in the same section, and `${mul:a,b}` by a product. Other resolvers, such as `${env:HOME}`,
stay as they are written: only the run knows their values.

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
"""OmegaConf's placeholder for a value that another file, or the command line, has to state."""
MAX_INHERITANCE = 12
"""The longest chain of files that inherit from each other, or of interpolations."""
INTERPOLATION_PATTERN = re.compile(r"\$\{([^${}]*)\}")
RESOLVERS: dict[str, Callable[[Sequence[float]], float]] = {
    "add": math.fsum,
    "mul": math.prod,
    "div": lambda numbers: numbers[0] / numbers[1],
    "max": max,
}
"""Resolvers that NeMo-RL registers -> their functions."""

ConfigTree = dict[str, object]
"""A configuration as nested mappings."""


@dataclass(kw_only=True)
class InheritedConfig:
    """A configuration file, merged with the files that it inherits from."""

    values: ConfigTree = field(default_factory=dict)
    """The merged mapping."""
    read: list[str] = field(default_factory=list)
    """Paths in `defaults` of the files that were read."""
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted key whose value is inherited -> path in `defaults` of the file that states it."""
    missing: list[str] = field(default_factory=list)
    """Paths in `defaults` of files that were not found, or that only the run knows."""


def read_inherited_config(path: Path, content: Mapping[str, object]) -> InheritedConfig:
    """Return a file merged over the files that it inherits from. Interpolations stay unresolved.

    Args:
        path: The file's path. The paths in its `defaults` begin in its folder.
        content: The mapping in the file.

    Raises:
        PayloadError: An inherited file is not a mapping, or files inherit from each other in a
            circle.
    """
    config = InheritedConfig()
    config.values = _merge_bases(path, content, config, ())
    for key in _list_dotted_keys(content):
        config.origins.pop(key, None)
    return config


def _merge_bases(
    path: Path, content: Mapping[str, object], config: InheritedConfig, heirs: tuple[Path, ...]
) -> ConfigTree:
    """Return a file's mapping, merged over the files in its `defaults`.

    Args:
        path: The file.
        content: The mapping in the file.
        config: Gets the names of the files that are read or missing, and the origins of values.
        heirs: The files that inherit from this one.

    Raises:
        PayloadError: As for `read_inherited_config`.
    """
    own_values = {str(key): value for key, value in content.items() if key != DEFAULTS_KEY}
    values: ConfigTree = {}
    for name in _list_base_names(content.get(DEFAULTS_KEY)):
        base = Path(os.path.normpath(path.parent / name))
        is_readable_name = "$" not in name and name.isprintable()
        # Path.is_file would raise for a path that is too long.
        if not is_readable_name or not os.path.isfile(base):  # noqa: PTH113
            config.missing.append(name)
            continue
        if base in (*heirs, path):
            rule = f"files must not inherit from each other in a circle, got {name!r}"
            raise PayloadError(f"{path}: {rule}. Remove it from defaults.")
        if len(heirs) > MAX_INHERITANCE:
            rule = f"at most {MAX_INHERITANCE} files may inherit from each other, got {name!r} too"
            raise PayloadError(f"{path}: {rule}. Remove it from defaults.")
        config.read.append(name)
        base_content = _read_mapping(base)
        base_values = _merge_bases(base, base_content, config, (*heirs, path))
        values = _merge_files(values, base_values)
        config.origins |= dict.fromkeys(_list_dotted_keys(base_content), name)
    return _merge_files(values, own_values)


def _list_dotted_keys(values: Mapping[str, object], path: str = "") -> Iterator[str]:
    """Yield the dotted keys of the values of a mapping."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _list_dotted_keys(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def _list_base_names(defaults: object) -> list[str]:
    """Return the entries of `defaults` as texts. An entry that is not a path is missing later."""
    if defaults is None:
        return []
    if isinstance(defaults, list):
        return [str(entry) for entry in defaults]
    return [str(defaults)]


def _read_mapping(path: Path) -> ConfigTree:
    """Return the mapping in an inherited file.

    Raises:
        PayloadError: The file cannot be read, or is not a mapping.
    """
    file_bytes = strict_yaml.read_bytes(path, error=PayloadError)
    file_yaml = strict_yaml.decode_text(file_bytes, str(path), error=PayloadError)
    documents = strict_yaml.load_documents(file_yaml, str(path))
    content = documents[0] if documents else {}
    if not isinstance(content, dict):
        rule = "must hold a mapping, as a file that another one inherits from"
        raise PayloadError(f"{path}: {rule}, got {type(content).__name__}. Correct it.")
    return content


def _merge_files(below: ConfigTree, above: ConfigTree) -> ConfigTree:
    """Return a file merged over the file below it.

    A section with `_override_: true` replaces the section below it, instead of being merged.
    """
    kept = dict(below)
    sections: ConfigTree = {}
    for key, section in above.items():
        sections[key] = section
        if isinstance(section, dict) and section.get(REPLACE_KEY):
            sections[key] = {name: value for name, value in section.items() if name != REPLACE_KEY}
            kept.pop(key, None)
    return merge_mappings(kept, sections)


def merge_mappings(below: ConfigTree, above: Mapping[str, object]) -> ConfigTree:
    """Return one mapping merged over another, key by key.

    A list replaces the list below it. `???` does not replace a value.
    """
    values = dict(below)
    for key, value in above.items():
        value_below = values.get(key)
        if isinstance(value, dict) and isinstance(value_below, dict):
            values[key] = merge_mappings(value_below, value)
        elif value != MANDATORY_VALUE or key not in values:
            values[key] = value
    return values


def is_unresolved(value: object) -> bool:
    """Return whether only the run knows a value: it has an interpolation, or is `???`."""
    return isinstance(value, str) and ("${" in value or value == MANDATORY_VALUE)


def resolve_interpolations(values: ConfigTree) -> ConfigTree:
    """Return a configuration with its interpolations replaced by their values.

    An interpolation whose value the configuration does not have stays as it is written.
    """
    return _InterpolationResolver(values).resolve_mapping(values, ())


class _UndecidedError(Exception):
    """The configuration does not have the value of an interpolation."""


class _CircleError(Exception):
    """Interpolations refer to each other in a circle, or in a chain that is too long."""


class _InterpolationResolver:
    """Resolves the interpolations of one configuration."""

    def __init__(self, values: ConfigTree) -> None:
        self.values = values

    def resolve_mapping(
        self, section: Mapping[str, object], path: tuple[str, ...], depth: int = 0
    ) -> ConfigTree:
        """Return a section with its interpolations resolved.

        Args:
            path: The keys of the section from the top, from which `${.name}` begins.
            depth: The number of interpolations that led here.

        Raises:
            _CircleError: The interpolations that led here refer to each other in a circle.
        """
        resolved: ConfigTree = {}
        for key, value in section.items():
            resolved[key] = self._resolve_value(value, (*path, str(key)), depth)
        return resolved

    def _resolve_value(self, value: object, path: tuple[str, ...], depth: int) -> object:
        """Return the value at a path resolved, or as it is written if only the run decides it.

        Raises:
            _CircleError: The interpolations that led here refer to each other in a circle. Without
                any that led here, the value stays as it is written.
        """
        if depth > MAX_INHERITANCE:
            raise _CircleError
        if isinstance(value, dict):
            return self.resolve_mapping(value, path, depth)
        if isinstance(value, list):
            return [self._resolve_value(item, (*path, "-"), depth) for item in value]
        if isinstance(value, str) and "${" in value:
            try:
                return self._resolve_text(value, path, depth)
            except _UndecidedError:
                return value
            except _CircleError:
                if depth > 0:
                    raise
                return value
        return value

    def _resolve_text(self, text: str, path: tuple[str, ...], depth: int) -> object:
        """Return the value of a text, whose innermost interpolations are resolved first.

        If the whole text is a single interpolation, the result has the type of its value. Any
        other text stays a text.

        Raises:
            _UndecidedError: The configuration does not decide it.
            _CircleError: The interpolations refer to each other in a circle.
        """
        if depth > MAX_INHERITANCE:
            raise _CircleError
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
        """Return the value of an interpolation.

        Args:
            inner: The text between `${` and `}`: a key, or a resolver with its arguments.
            path: The keys of the value that has the interpolation.
            depth: The number of interpolations that led here.

        Raises:
            _UndecidedError: The configuration does not decide it.
            _CircleError: The interpolations refer to each other in a circle.
        """
        resolver, colon, arguments = inner.partition(":")
        if colon:
            return _call_resolver(resolver, arguments)
        target = tuple(inner.split("."))
        if inner.startswith("."):
            # A single dot is the section of the value. Each further dot is the section around it.
            relative = inner.lstrip(".")
            dot_count = len(inner) - len(relative)
            target = (*path[:-dot_count], *relative.split("."))
        value: object = self.values
        for key in target:
            if not isinstance(value, Mapping) or key not in value:
                raise _UndecidedError
            value = value[key]
        if value == MANDATORY_VALUE:
            raise _UndecidedError
        if isinstance(value, str) and "${" in value:
            return self._resolve_text(value, target, depth + 1)
        return self._resolve_value(value, target, depth + 1)


def _call_resolver(name: str, arguments: str) -> object:
    """Return the value of a resolver of NeMo-RL.

    Raises:
        _UndecidedError: The resolver is not known, or does not accept these arguments.
    """
    function = RESOLVERS.get(name)
    if function is None:
        raise _UndecidedError
    try:
        numbers = [float(number) for number in arguments.split(",")]
        value = function(numbers)
    except (ValueError, IndexError, ZeroDivisionError):
        raise _UndecidedError from None
    if name != "div" and value.is_integer():
        return int(value)  # as in Python, only a division of integers is a float
    return value
