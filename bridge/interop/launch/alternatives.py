"""`launches`: what a script starts on the path that bash takes with nothing set, and on the others."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.launch.launches import MODES, STATING, UNREADABLE, Launch, trainings
from bridge.interop.launch.reader import MAX_STEPS, Fork, Path
from bridge.interop.launch.script import broken_line, parse, unexecuted
from bridge.interop.launch.word import Word, fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tree_sitter import Node

MAX_PATHS = 48


def launches(text: str, path: str = "<script>", variables: Mapping[str, str] | None = None) -> tuple[Launch, ...]:
    """Return the launches of a script, in source order, first those of the branch that bash takes with nothing set.

    A launch of another branch is listed where its precision differs, and names the branch. Without any launch, one is
    made of the arguments that the script's variables hold.

    Files that the script sources are read from the folder of `path`; `variables` is what the user states of the
    environment.
    """
    stated = {name: Word(value) for name, value in (variables or {}).items()}
    root = parse(text, path)
    try:
        first = Path(root, path, stated)
        forks = sorted(first.forks.values(), key=lambda fork: bool(fork.because))
        others = _others(first, forks, root, stated)
    except RecursionError:
        raise PayloadError(f"{path}: commands are nested too deeply to be followed. Simplify the script.") from None
    error = broken_line(root)
    if not first.launches and error:
        rule = "must be bash that can be read here, and is not"
        raise PayloadError(f"{path}, line {error}: {rule}. Correct the script there.")
    notes = [f"line {error}, which {UNREADABLE}"] if error else []
    if len(forks) > len(others):
        notes.append(f"the branches behind the first {len(others)}")
    found = [_whole(one, notes) for one in (first, *others)]
    return trainings(_listed(found[0], list(zip(forks, found[1:], strict=False)), first.defaulted))


def _others(first: Path, forks: Sequence[Fork], root: Node, stated: Mapping[str, Word]) -> list[Path]:
    """Return the other paths through a script, as many as can be followed."""
    found: list[Path] = []
    steps = first.steps
    for fork in islice(forks, MAX_PATHS):
        if steps > MAX_STEPS:
            break
        found.append(Path(root, first.path, stated, fork))
        steps += found[-1].steps
    return found


def _whole(path: Path, notes: Sequence[str]) -> list[Launch]:
    """Return all launches of a path."""
    unread = _unread(path)
    return [replace(launch, notes=(*path.notes, *notes), unread=unread) for launch in path.launches or [_held(path)]]


def _unread(path: Path) -> str:
    """Return where text that a path does not execute states a precision, as a noun; empty: nowhere.

    Text of a file that is sourced, or of a string that is a script, counts too; a mode comes before other flags.
    """
    found = [
        (mention.text not in MODES, place > 0, mention)
        for place, root in enumerate(path.scripts.values())
        for mention in unexecuted(root, STATING, path.executed)
    ]
    if not found:
        return ""
    _, is_inner, first = min(found)
    where = f"{'the branch at ' if first.is_branch else ''}line {first.line}"
    return f"{where}{' of what it reads' if is_inner else ''}, which holds {first.text},"


def _held(path: Path) -> Launch:
    """Return the arguments that variables hold, for a file that others source."""
    words = {name: fields([(held, True)]) for name, held in path.values.items() if name not in path.stated}
    texts = {name: " ".join(held) for name, held in words.items() if any(word.startswith("--") for word in held)}
    merged = [
        name
        for name, text in texts.items()
        if not any(other != name and len(longer) > len(text) and text in longer for other, longer in texts.items())
    ]
    arguments = [word for name in merged for word in words[name]]
    return Launch(
        line=0,
        program=", ".join(merged),
        arguments=(*arguments, *path.stray),
        environment=path.exported,
        files=path.files,
    )


def _listed(first: list[Launch], paths: list[tuple[Fork, list[Launch]]], texts: Mapping[str, str]) -> list[Launch]:
    """Return the launches of the first path, and those of others whose precision is new there."""
    others, listed = list[Launch](), _Known(first)
    decisions: dict[tuple[int, int], dict[str, None]] = {launch.at: {} for launch in first}
    defaults = {
        launch.at: {name: None for words in launch.known for word in words for name in word.defaults}
        for launch in first
    }
    for fork, found in paths:
        there = _Known(found)
        for launch in first:
            if not there.has(launch):
                defaults[launch.at] |= dict.fromkeys(fork.because)
                decisions[launch.at] |= {} if fork.because else {fork.taken: None}
        if fork.label:
            started = [launch for launch in found if launch.line or not first[0].line]
            others += [replace(one, decisions=(fork.label,)) for one in started if not listed.has(one)]
            listed.add(started)
    if any(launch.line for launch in others):
        first = [launch for launch in first if launch.line or launch.arguments]
    found = [replace(launch, decisions=tuple(decisions[launch.at])) for launch in first]
    found += sorted(others, key=lambda launch: launch.line)
    return [replace(one, defaulted={name: texts[name] for name in defaults.get(one.at, ())}) for one in found]


class _Known:
    """What bears on precision in launches, by their places and by their programs."""

    def __init__(self, found: Iterable[Launch]) -> None:
        self.by: dict[object, set[object]] = {}
        self.add(found)

    def add(self, found: Iterable[Launch]) -> None:
        """Take further launches."""
        for launch in found:
            for key in (launch.at, launch.name):
                self.by.setdefault(key, set()).add(launch.known)

    def has(self, launch: Launch) -> bool:
        """Return whether one at its place, or of its program where there is none, has the same precision."""
        return launch.known in self.by.get(launch.at, self.by.get(launch.name, ()))
