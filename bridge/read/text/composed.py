"""`composed`: a YAML file of OmegaConf with the files that it inherits from, and its interpolations in place.

    config = composed(Path("examples/configs/sft.yaml"))
    config.values["policy"]["precision"]      # "bfloat16"
    config.missing                            # the files that `defaults` names and that are not there

A file names the files below it in `defaults`, each by its path from the folder of the file. `${policy.precision}` and
`${.name}` are the values there, and `${mul:a,b}` is their product. Other resolvers, of the environment for one, are
left as they are written: only the run knows their values. No file is run, and none is read but those that are named.

Source: NVIDIA-NeMo/RL nemo_rl/utils/config.py at 7ea279abfbeb: load_config_with_inheritance, merge_with_override,
register_omegaconf_resolvers.
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

DEFAULTS, REPLACES = "defaults", "_override_"
MANDATORY = "???"
"""A value that a file leaves to those above it."""
DEEPEST = 12
"""Files that inherit from each other, and interpolations within each other."""
INNERMOST = re.compile(r"\$\{([^${}]*)\}")
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
    """Dotted key of a value -> the file that states it, by the path that `defaults` has; none for the file's own."""
    missing: list[str] = field(default_factory=list)
    """Those that are named and were not found, or whose names only the run knows."""


def composed(path: Path, whole: Mapping[str, object]) -> Composed:
    """Return the mapping of a file merged over those that it inherits from; interpolations are left as they are.

    Args:
        path: The file's path, from whose folder the names of others count.
        whole: The file's own mapping.

    Raises:
        PayloadError: A file below it holds no mapping, or the files inherit from each other in a circle.
    """
    found = Composed()
    found.values = _inherited(path, whole, found, ())
    for key in _keys(whole):
        found.origins.pop(key, None)
    return found


def _inherited(
    path: Path, whole: Mapping[str, object], found: Composed, above: tuple[Path, ...]
) -> Tree:
    """Return a file's mapping over those of its bases, which are noted in `found`."""
    own = {str(key): value for key, value in whole.items() if key != DEFAULTS}
    values: Tree = {}
    for name in _names(whole.get(DEFAULTS)):
        base = Path(os.path.normpath(path.parent / name))
        if "$" in name or not name.isprintable() or not os.path.isfile(base):  # noqa: PTH113  a path may be too long
            found.missing.append(name)
            continue
        if base in above or len(above) > DEEPEST:
            rule = f"files must not inherit from each other in a circle, got {name!r}"
            raise PayloadError(f"{path}: {rule}. Remove it from defaults.")
        found.read.append(name)
        below = _mapping(base)
        values = _merged_files(values, _inherited(base, below, found, (*above, path)))
        found.origins |= dict.fromkeys(_keys(below), name)
    return _merged_files(values, own)


def _keys(values: Mapping[str, object], path: str = "") -> Iterator[str]:
    """Yield the dotted keys of the values of a mapping."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def _names(defaults: object) -> list[str]:
    """Return the paths that `defaults` has; an entry of another kind, as Hydra's groups are, is written out."""
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
    values, marked = dict(below), {}
    for key, section in above.items():
        marked[key] = section
        if isinstance(section, dict) and section.get(REPLACES):
            marked[key] = {name: value for name, value in section.items() if name != REPLACES}
            values.pop(key, None)
    return merged(values, marked)


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
    """Return whether only the run knows a value: an interpolation that was left, or a mandatory value."""
    return isinstance(value, str) and ("${" in value or value == MANDATORY)


def resolved(values: Tree) -> Tree:
    """Return a mapping with the interpolations in place that it decides itself; the others stay as they are written."""
    return _Interpolation(values).inside(values, ())


class _UndecidedError(Exception):
    """Only the run knows the value of an interpolation."""


class _Interpolation:
    """The interpolations of one mapping."""

    def __init__(self, values: Tree) -> None:
        self.values = values

    def inside(self, held: Mapping[str, object], path: tuple[str, ...]) -> Tree:
        """Return a mapping at a path with its interpolations in place."""
        found: Tree = {}
        for key, value in held.items():
            found[key] = self._plain(value, (*path, str(key)))
        return found

    def _plain(self, value: object, path: tuple[str, ...]) -> object:
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
        """Return what a text stands for, its innermost interpolations first."""
        if depth > DEEPEST:
            raise _UndecidedError
        while (found := INNERMOST.search(text)) is not None:
            value = self._one(found[1].strip(), path, depth)
            if found[0] == text:
                return value
            if isinstance(value, dict | list):
                raise _UndecidedError
            text = f"{text[: found.start()]}{value}{text[found.end() :]}"
        return text

    def _one(self, inner: str, path: tuple[str, ...], depth: int) -> object:
        """Return what the text between two braces stands for."""
        name, colon, arguments = inner.partition(":")
        if colon:
            return _computed(name, arguments)
        target = tuple(inner.split("."))
        if inner.startswith("."):
            own = inner.lstrip(".")
            target = (*path[: len(own) - len(inner)], *own.split("."))
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
