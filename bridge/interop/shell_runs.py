"""The launches of all ways through a script, brought together: one for each precision that each place comes to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.interop.shell_choices import excludes, told, united
from bridge.interop.shell_precision import loose

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bridge.interop.launch import Launch
    from bridge.interop.shell_ways import Way

__all__ = ["collected", "distinct", "held"]

MAX_COMPARED = 16
"""Launches alike of which one may be this one, on another way."""


def collected(ways: Sequence[Way]) -> list[Launch]:
    """Return what the ways start, in their order.

    A shell script that has a training's flags on one way is started on the others too, with what it is given there.
    """
    found = [way.finished() for way in ways]
    places = {_place(launch) for launches in found for launch in launches if launch.starts_script}
    for launches, way in zip(found, ways, strict=True):
        launches += [script for script in way.scripts if _place(script) in places]
    return [launch for launches in found for launch in launches]


def distinct(found: Iterable[Launch]) -> tuple[Launch, ...]:
    """Return the launches by line, one for each precision; a decision that changes nothing is left out."""
    grouped: dict[object, list[Launch]] = {}
    for launch in found:
        grouped.setdefault((_place(launch), launch.known), []).append(launch)
    united_groups = _alternatives(grouped.values())
    precisions: dict[object, int] = {}
    for group in united_groups:
        for place in {_place(launch) for launch in group}:
            precisions[place] = precisions.get(place, 0) + 1
    merged = [_merged(group, alone=all(precisions[_place(launch)] == 1 for launch in group)) for group in united_groups]
    return tuple(sorted(merged, key=lambda launch: (launch.is_printed, bool(launch.written), launch.line)))


def held(way: Way) -> Launch:
    """Return the arguments that variables hold, for a file that others source."""
    holders = {}
    for name, value in way.values.variables.items():
        words = value if isinstance(value, list) else value.split()
        if any(word.startswith("--") for word in words):
            holders[name] = [piece for word in words for piece in word.split()]
    merged = {name: words for name, words in holders.items() if not _inside(name, words, holders)}
    arguments = [word for words in merged.values() for word in words]
    arguments += [word for _, words in way.stray for word in words]
    for script in way.scripts:
        way.note(f"script {script.program}")
    about = {default for name in merged for default in way.values.flags.get(name, ())}
    return way.launch(0, ", ".join(merged), arguments, about, environment=way.exported)


def _place(launch: Launch) -> tuple[object, ...]:
    return launch.line, launch.name if launch.line else "", launch.written, launch.is_printed


def _alternatives(groups: Iterable[list[Launch]]) -> list[list[Launch]]:
    """Return the groups, one for those that start the same program alike on ways that exclude each other."""
    found: list[list[Launch]] = []
    alike: dict[object, list[list[Launch]]] = {}
    for group in groups:
        for other in alike.get(_kind(group[0]), [])[-MAX_COMPARED:]:
            if _is_same(group[0], other[0]) and _exclude(group, other):
                other.extend(group)
                break
        else:
            found.append(list(group))
            alike.setdefault(_kind(group[0]), []).append(found[-1])
    return found


def _kind(launch: Launch) -> object:
    return launch.written, launch.is_printed, launch.known


def _is_same(one: Launch, other: Launch) -> bool:
    """Return whether two launches of one precision are one: the same program, or the same command with another one."""
    return one.line > 0 and (one.name == other.name or (one.line, one.at) == (other.line, other.at))


def _exclude(group: Iterable[Launch], others: Sequence[Launch]) -> bool:
    """Return whether no run of the script comes to a launch of both groups."""
    return all(
        excludes(path, other)
        for launch in group
        for path in launch.paths
        for counterpart in others
        for other in counterpart.paths
    )


def _merged(group: list[Launch], *, alone: bool) -> Launch:
    """Return the one launch that stands for several of the same precision."""
    first = group[0]
    paths = united(path for launch in group for path in launch.paths)
    defaulted: dict[str, str] = {}
    for launch in reversed(group):
        defaulted.update(launch.defaulted)
    words = dict.fromkeys(word for launch in group[1:] for word in loose(launch.arguments))
    own = set(loose(first.arguments))
    return replace(
        first,
        arguments=(*(word for word in words if word not in own), *first.arguments),
        paths=paths,
        decisions=told(paths, alone=alone),
        notes=tuple(dict.fromkeys(note for launch in group for note in launch.notes)),
        unmapped=tuple({str(loss): loss for launch in group for loss in launch.unmapped}.values()),
        defaulted=defaulted,
        lines=tuple(sorted({launch.line for launch in group})),
        names=tuple(dict.fromkeys(launch.name for launch in group)),
    )


def _inside(name: str, words: list[str], holders: dict[str, list[str]]) -> bool:
    """Return whether another variable holds all of these words: it was made of this one."""
    text = " ".join(words)
    return any(other != name and len(held) > len(words) and text in " ".join(held) for other, held in holders.items())
