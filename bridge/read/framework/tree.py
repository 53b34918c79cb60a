"""`read_tree`: a framework's tree of settings as sections of a run, by the table of the framework.

    found = read_tree(framework_table("nemo_rl"), values)
    found.sections["model"]["tensor_model_parallel_size"]
    found.dropped        # settings that the framework's code does not forward

A key is its path in the tree ("policy.megatron_cfg.sequence_parallel"). The places of the table say which settings of
Megatron it becomes; a name of the framework's own, and one that it drops, have rows of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from bridge.errors import bounded
from bridge.precision.stated_field import COMMAND_LINE
from bridge.read.framework.framework_options import GENERATION_PURPOSE
from bridge.read.framework.framework_table import DroppedOption, FrameworkTable
from bridge.read.launch.shell_word import ShellWord
from bridge.read.text.hydra_overrides import HydraOverride
from bridge.read.text.inherited_config import is_unresolved
from bridge.rules.program import DroppedField
from bridge.target.fields import OWNER_FIELDS


@dataclass(kw_only=True)
class TreeReading:
    """One tree, as read."""

    sections: dict[str, dict[str, object]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """Key of the tree, or a place of the table -> the setting, or the section, that it becomes."""
    keys: dict[str, str] = field(default_factory=dict)
    """Setting -> the key of the tree that states it."""
    open_values: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    no_plan_reason: str | None = None
    uncounted: list[str] = field(default_factory=list)
    opened: dict[str, str] = field(default_factory=dict)
    generation: dict[str, object] = field(default_factory=dict)
    dropped: list[DroppedField] = field(default_factory=list)
    """As in `FileReading`."""

    def put(self, path: str, value: object, key: str = "") -> None:
        """Write a value of a setting into its section; `key` is where the tree states it."""
        owner_name, _, name = path.partition(".")
        self.sections.setdefault(owner_name, {})[name] = value
        if key:
            self.names[key] = path
            self.keys[path] = key
        if is_late(value):
            self.open_values[path] = str(value)
            del self.sections[owner_name][name]

    def find_overridden_settings(self, overrides: Iterable[HydraOverride]) -> dict[str, str]:
        """Return each setting that overrides of our command line state -> its origin."""
        origins: dict[str, str] = {}
        for override in overrides:
            for path, key in self.keys.items():
                if f"{key}.".startswith(f"{override.key}."):
                    origins[path] = COMMAND_LINE
        return origins


def is_late(value: object) -> bool:
    """Return whether only the run knows a value."""
    return is_unresolved(value) or (isinstance(value, str) and ShellWord(value).is_open)


def iterate_leaves(values: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    """Yield each key of a tree that holds no mapping, or an empty one, with its value."""
    for name, value in values.items():
        key = f"{path}{name}"
        if isinstance(value, Mapping) and value:
            yield from iterate_leaves(value, f"{key}.")
        else:
            yield key, value


def read_tree(table: FrameworkTable, values: Mapping[str, object]) -> TreeReading:
    """Return what a tree says of a run, by the table of its framework."""
    tree = TreeReading()
    for key, value in iterate_leaves(values):
        row = table.find_option(key)
        if row is not None:
            _read_framework_option(tree, table, key, value)
            continue
        paths = table.get_megatron_settings(key)
        drop = table.find_dropped_option(key)
        if drop is not None:
            reached = [drop.target_setting] if drop.target_setting else paths
            tree.dropped += [
                _make_dropped_field(table, drop, key, path, value)
                for path in reached
                if _is_field(path)
            ]
            if key not in table.fields:
                continue
        for path in paths:
            if (
                "." not in path.partition(".")[2]
            ):  # a mapping in the place of a value has no field of its own
                tree.put(path, value, key)
    tree.names |= table.places
    return tree


def _is_field(path: str) -> bool:
    """Return whether a path is that of a field of Megatron's."""
    owner_name, _, name = path.partition(".")
    return name in OWNER_FIELDS.get(owner_name, {})


def _make_dropped_field(
    table: FrameworkTable, drop: DroppedOption, key: str, path: str, value: object
) -> DroppedField:
    return DroppedField(
        key=key,
        path=path,
        value=value,
        framework=table.title,
        code=table.code,
        because=drop.because,
        source=drop.source,
        fixed_in=drop.fixed_in,
        instead=drop.instead.format(name=path.partition(".")[2]),
    )


def _read_framework_option(
    tree: TreeReading, table: FrameworkTable, key: str, value: object
) -> None:
    """Note what a name of the framework's own does to the run."""
    row = table.find_option(key)
    if row is None:
        return
    if row.purpose == GENERATION_PURPOSE:
        tree.generation[key] = value
        return
    if not row.is_on(value):
        return
    sentence = bounded(row.sentence.format(option=key, value=value))
    if row.has_no_plan:
        tree.no_plan_reason = tree.no_plan_reason or sentence
    elif sentence:
        tree.unknown.append(sentence)
    if row.opened_settings:
        tree.uncounted.append(key)
        for path in row.opened_settings:
            tree.opened.setdefault(path, key)
