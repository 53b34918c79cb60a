"""`launches`: what a script starts on the branches that bash takes with nothing set, and on the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.launch.launches import STATING, UNREADABLE, Launch, trainings
from bridge.interop.launch.reader import Reader
from bridge.interop.launch.script import broken_line, parse, unexecuted
from bridge.interop.launch.word import Word, fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from bridge.interop.launch.state import State


def launches(text: str, path: str = "<script>", variables: Mapping[str, str] | None = None) -> tuple[Launch, ...]:
    """Return the launches of a script, in source order, first those of the branch that bash takes with nothing set.

    A launch of another branch is listed where its precision differs, and names the branch. Without any launch, one is
    made of the arguments that the script's variables hold.

    Files that the script sources are read from the folder of `path`; `variables` is what the user states of the
    environment.
    """
    root = parse(text, path)
    try:
        read = Reader(root, path, {name: Word(value) for name, value in (variables or {}).items()})
    except RecursionError:
        raise PayloadError(f"{path}: commands are nested too deeply to be followed. Simplify the script.") from None
    first, *others = (*read.states, *read.others)
    error = broken_line(root)
    if not first.launches and error:
        rule = "must be bash that can be read here, and is not"
        raise PayloadError(f"{path}, line {error}: {rule}. Correct the script there.")
    notes = [f"line {error}, which {UNREADABLE}"] if error else []
    if read.is_cut:
        notes.append(f"the branches behind the first {len(others)}")
    for state in (first, *others):
        unread = unexecuted(read.scripts.values(), STATING, state.executed)
        made = state.launches or [_held(state)]
        state.launches = [replace(launch, notes=(*state.notes, *notes), unread=unread) for launch in made]
    others.sort(key=lambda state: (bool(state.fork.because), state.fork.place))
    return trainings(_listed(first, others))


def _held(state: State) -> Launch:
    """Return the arguments that variables hold, for a file that others source."""
    own = {*state.stated, *state.pieces.values()}
    words = {name: fields([(held, True)]) for name, held in state.values.items() if name not in own}
    texts = {name: " ".join(held) for name, held in words.items() if any(word.startswith("--") for word in held)}
    merged = [
        name
        for name, text in texts.items()
        if not any(other != name and len(longer) > len(text) and text in longer for other, longer in texts.items())
    ]
    arguments = (*(word for name in merged for word in words[name]), *state.stray)
    program = ", ".join(merged)
    return Launch(line=0, program=program, arguments=arguments, environment=state.exported, files=state.files)


def _listed(first: State, others: Sequence[State]) -> list[Launch]:
    """Return the launches of the first state, and those of others whose precision is new there."""
    known, added = _known(first.launches), list[Launch]()
    decisions: dict[object, dict[str, None]] = {launch.at: {} for launch in first.launches}
    defaults = {launch.at: launch.defaults for launch in first.launches}
    for state in others:
        fork, there = state.fork, _known(state.launches)
        for launch in first.launches:
            if not _has(there, launch):
                defaults[launch.at] |= dict.fromkeys(fork.because)
                decisions[launch.at] |= {} if fork.because else {fork.taken: None}
        if fork.label:
            started = [launch for launch in state.launches if launch.line or not first.launches[0].line]
            added += [replace(one, decisions=(fork.label,)) for one in started if not _has(known, one)]
            for key, precisions in _known(started).items():
                known.setdefault(key, set()).update(precisions)
    is_started = any(launch.line for launch in added)
    own = [launch for launch in first.launches if launch.line or launch.arguments or not is_started]
    found = [replace(launch, decisions=tuple(decisions[launch.at])) for launch in own]
    found += sorted(added, key=lambda launch: launch.line)
    return [replace(one, defaulted={name: first.defaulted[name] for name in defaults.get(one.at, ())}) for one in found]


def _known(found: Iterable[Launch]) -> dict[object, set[object]]:
    """Return what bears on precision in launches, by their places and by their programs."""
    by: dict[object, set[object]] = {}
    for launch in found:
        for key in (launch.at, launch.name):
            by.setdefault(key, set()).add(launch.known)
    return by


def _has(by: Mapping[object, set[object]], launch: Launch) -> bool:
    """Return whether a launch at the same place, or of its program where there is none, has the same precision."""
    return launch.known in by.get(launch.at, by.get(launch.name, ()))
