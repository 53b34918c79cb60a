"""`composed`: a YAML file of OmegaConf over the files that it inherits from.

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

DEFAULTS = "defaults"
"""Key of a file with the names of the files below it."""
REPLACES = "_override_"
"""Key of a section that replaces the section below it, instead of being merged with it."""
MANDATORY = "???"
"""A value that a file leaves to those above it."""
MAX_DEPTH = 12
"""Files that inherit from each other, and interpolations within each other."""
INTERPOLATION = re.compile(r"\$\{([^${}]*)\}")
FUNCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "add": math.fsum,
    "mul": math.prod,
    "div": lambda numbers: numbers[0] / numbers[1],
    "max": max,
}
"""The resolvers that NeMo-RL registers."""

Tree = dict[str, object]


@dataclass(kw_only=True)
class Composed:
    """One file with those that it inherits from."""

    values: Tree = field(default_factory=dict)
    """The merged mapping."""
    read: list[str] = field(default_factory=list)
    """The files below it that were read, by the paths that `defaults` has."""
    origins: dict[str, str] = field(default_factory=dict)
    """Dotted key of a value that a file below states -> that file, by the path that `defaults` has."""
    missing: list[str] = field(default_factory=list)
    """The files below it that were not found, or whose names only the run knows."""


def composed(path: Path, whole: Mapping[str, object]) -> Composed:
    """Return the mapping of a file merged over those that it inherits from.

    Interpolations are left as they are written.

    Args:
        path: The file's path, from whose folder the names of others count.
        whole: The file's own mapping.

    Raises:
        PayloadError: A file below it holds no mapping, or the files inherit from each other in a circle.
    """
    config = Composed()
    config.values = _inherited(path, whole, config, ())
    for key in _keys(whole):
        config.origins.pop(key, None)
    return config


def _inherited(
    path: Path, whole: Mapping[str, object], config: Composed, above: tuple[Path, ...]
) -> Tree:
    """Return a file's mapping over those of its bases, whose names are noted in `config`."""
    own = {str(key): value for key, value in whole.items() if key != DEFAULTS}
    values: Tree = {}
    for name in _names(whole.get(DEFAULTS)):
        base = Path(os.path.normpath(path.parent / name))
        if "$" in name or not name.isprintable() or not os.path.isfile(base):  # noqa: PTH113  a path may be too long
            config.missing.append(name)
            continue
        if base in above or len(above) > MAX_DEPTH:
            rule = f"files must not inherit from each other in a circle, got {name!r}"
            raise PayloadError(f"{path}: {rule}. Remove it from defaults.")
        config.read.append(name)
        below = _mapping(base)
        values = _merged_files(values, _inherited(base, below, config, (*above, path)))
        config.origins |= dict.fromkeys(_keys(below), name)
    return _merged_files(values, own)


def _keys(values: Mapping[str, object], path: str = "") -> Iterator[str]:
    """Yield the dotted keys of the values of a mapping."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def _names(defaults: object) -> list[str]:
    """Return the paths that `defaults` has; an entry of another kind, such as a group, as text."""
    if defaults is None:
        return []
    entries = defaults if isinstance(defaults, list) else [defaults]
    return [str(entry) for entry in entries]


def _mapping(path: Path) -> Tree:
    text = strict_yaml.decoded(
        strict_yaml.read_bytes(path, error=PayloadError), str(path), error=PayloadError
    )
    documents = strict_yaml.load_all(text, str(path))
    whole = documents[0] if documents else {}
    if not isinstance(whole, dict):
        rule = "must hold a mapping, as a file that another one inherits from"
        raise PayloadError(f"{path}: {rule}, got {type(whole).__name__}. Correct it.")
    return whole


def _merged_files(below: Tree, above: Tree) -> Tree:
    """Return a file over the one below it; a section that is marked to replace is not merged."""
    kept = dict(below)
    plain: Tree = {}
    for key, section in above.items():
        plain[key] = section
        if isinstance(section, dict) and section.get(REPLACES):
            plain[key] = {name: value for name, value in section.items() if name != REPLACES}
            kept.pop(key, None)
    return merged(kept, plain)


def merged(below: Tree, above: Mapping[str, object]) -> Tree:
    """Return one mapping over another, key by key; a list replaces the list below it."""
    values = dict(below)
    for key, value in above.items():
        before = values.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            values[key] = merged(before, value)
        elif value != MANDATORY or key not in values:
            values[key] = value
    return values


def is_open(value: object) -> bool:
    """Return whether only the run knows a value: an interpolation that is left, or `???`."""
    return isinstance(value, str) and ("${" in value or value == MANDATORY)


def resolved(values: Tree) -> Tree:
    """Return a mapping with those interpolations in place that it decides itself.

    The others stay as they are written.
    """
    return _Interpolation(values).inside(values, ())


class _UndecidedError(Exception):
    """Only the run knows the value of an interpolation."""


class _Interpolation:
    """The interpolations of one mapping, by the path of the value that they stand in."""

    def __init__(self, values: Tree) -> None:
        self.values = values

    def inside(self, block: Mapping[str, object], path: tuple[str, ...]) -> Tree:
        """Return the mapping at a path with its interpolations in place."""
        plain: Tree = {}
        for key, value in block.items():
            plain[key] = self._plain(value, (*path, str(key)))
        return plain

    def _plain(self, value: object, path: tuple[str, ...]) -> object:
        """Return the value at a path with its interpolations in place, or as it is written."""
        if isinstance(value, dict):
            return self.inside(value, path)
        if isinstance(value, list):
            return [self._plain(item, (*path, "-")) for item in value]
        if isinstance(value, str) and "${" in value:
            try:
                return self._decided(value, path, 0)
            except _UndecidedError:
                return value
        return value

    def _decided(self, text: str, path: tuple[str, ...], depth: int) -> object:
        """Return the value that a text stands for, its innermost interpolations first."""
        if depth > MAX_DEPTH:
            raise _UndecidedError
        match = INTERPOLATION.search(text)
        while match is not None:
            value = self._interpolated(match[1].strip(), path, depth)
            if match[0] == text:
                return value
            if isinstance(value, dict | list):
                raise _UndecidedError
            text = f"{text[: match.start()]}{value}{text[match.end() :]}"
            match = INTERPOLATION.search(text)
        return text

    def _interpolated(self, inner: str, path: tuple[str, ...], depth: int) -> object:
        """Return the value that the text between `${` and `}` stands for."""
        name, colon, arguments = inner.partition(":")
        if colon:
            return _computed(name, arguments)
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
        if value == MANDATORY:
            raise _UndecidedError
        if isinstance(value, str) and "${" in value:
            return self._decided(value, target, depth + 1)
        return self._plain(value, target)


def _computed(name: str, arguments: str) -> object:
    """Return the value of a resolver of NeMo-RL."""
    function = FUNCTIONS.get(name)
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
