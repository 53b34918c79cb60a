"""`read_tree`: a framework's tree of settings as sections of a run, by the table of the framework.

    found = read_tree(framework_table("nemo_rl"), values)
    found.sections["model"]["tensor_model_parallel_size"]
    found.dropped        # settings that the framework's code does not forward

A key is its path in the tree ("policy.megatron_cfg.sequence_parallel"). The places of the table say which settings of
Megatron it becomes; a name of the framework's own, and one that it drops, have rows of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from bridge.errors import bounded
from bridge.read.framework.names import GENERATION
from bridge.read.framework.table import Drop, FrameworkTable
from bridge.read.launch.word import Word
from bridge.read.text.composed import is_open
from bridge.rules.program import DroppedField
from bridge.target.fields import FIELDS


@dataclass(kw_only=True)
class TreeReading:
    """One tree, as read."""

    sections: dict[str, dict[str, object]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """Key of the tree, or a place of the table -> the setting, or the section, that it becomes."""
    open_values: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    unplanned: str | None = None
    uncounted: list[str] = field(default_factory=list)
    opened: dict[str, str] = field(default_factory=dict)
    generation: dict[str, object] = field(default_factory=dict)
    dropped: list[DroppedField] = field(default_factory=list)
    """As in `FileReading`."""

    def put(self, path: str, value: object, key: str = "") -> None:
        """Write a value of a setting into its section; `key` is where the tree states it."""
        role, _, name = path.partition(".")
        self.sections.setdefault(role, {})[name] = value
        if key:
            self.names[key] = path
        if is_late(value):
            self.open_values[path] = str(value)
            del self.sections[role][name]


def is_late(value: object) -> bool:
    """Return whether only the run knows a value."""
    return is_open(value) or (isinstance(value, str) and Word(value).is_unknown)


def leaves_of(values: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """Yield each key of a tree that holds no mapping, or an empty one, with its value."""
    for name, value in values.items():
        key = f"{path}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, f"{key}.")
        else:
            yield key, value


def read_tree(table: FrameworkTable, values: Mapping[str, object]) -> TreeReading:
    """Return what a tree says of a run, by the table of its framework."""
    found = TreeReading()
    for key, value in leaves_of(values):
        row = table.own_names(key)
        if row is not None:
            _read_own(found, table, key, value)
            continue
        paths = table.place_of(key)
        drop = table.drop_of(key)
        if drop is not None:
            reached = [drop.into] if drop.into else paths
            found.dropped += [
                _dropped(table, drop, key, path, value) for path in reached if _is_field(path)
            ]
            if key not in table.fields:
                continue
        for path in paths:
            if (
                "." not in path.partition(".")[2]
            ):  # a mapping in the place of a value has no field of its own
                found.put(path, value, key)
    found.names |= table.places
    return found


def _is_field(path: str) -> bool:
    """Return whether a path is that of a field of Megatron's."""
    role, _, name = path.partition(".")
    return name in FIELDS.get(role, {})


def _dropped(table: FrameworkTable, drop: Drop, key: str, path: str, value: object) -> DroppedField:
    return DroppedField(
        key=key,
        path=path,
        value=value,
        framework=table.title,
        code=table.code,
        because=drop.because,
        source=drop.source,
        mended=drop.mended,
        instead=drop.instead.format(name=path.partition(".")[2]),
    )


def _read_own(found: TreeReading, table: FrameworkTable, key: str, value: object) -> None:
    """Note what a name of the framework's own does to the run."""
    row = table.own_names(key)
    if row is None:
        return
    if row.purpose == GENERATION:
        found.generation[key] = value
        return
    if not row.is_on(value):
        return
    sentence = bounded(row.says.format(option=key, value=value))
    if row.unplans:
        found.unplanned = found.unplanned or sentence
    elif sentence:
        found.unknown.append(sentence)
    if row.opens:
        found.uncounted.append(key)
        for path in row.opens:
            found.opened.setdefault(path, key)
