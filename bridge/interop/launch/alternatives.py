"""`launches`: what a script starts on the branches that bash takes with nothing set, and on the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.errors import PayloadError
from bridge.interop.launch.launches import STATING, UNREADABLE, Launch, trainings
from bridge.interop.launch.reader import MAX_STEPS, Arm, Reader
from bridge.interop.launch.script import broken_line, parse, unexecuted
from bridge.interop.launch.variables import split
from bridge.interop.launch.word import Word

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_BRANCHES = 48


def launches(text: str, path: str = "<script>", variables: Mapping[str, str] | None = None) -> tuple[Launch, ...]:
    """Return the launches of a script, in source order, first those of the branch that bash takes with nothing set.

    A launch of another branch is listed where its precision differs, and names the branch. Without any launch, one is
    made of the arguments that the script's variables hold.

    Files that the script sources are read from the folder of `path`; `variables` is what the user states of the
    environment.
    """
    root, stated = parse(text, path), variables or {}
    error = broken_line(root)
    try:
        first = Reader(root, path, stated, {})
        arms = sorted((arm for arm, _ in first.questions.values()), key=lambda arm: bool(_defaults(arm)))
        others, steps = list[tuple[Arm, Reader]](), first.steps
        for arm in arms[:MAX_BRANCHES]:
            if steps < MAX_STEPS:
                assumed = dict([arm.test.equal] if arm.test.equal else ())
                answers = {} if assumed else {arm.key: not arm.test.holds}
                others.append((arm, Reader(root, path, {**stated, **assumed}, answers)))
                steps += others[-1][1].steps
    except RecursionError:
        raise PayloadError(f"{path}: commands are nested too deeply to be followed. Simplify the script.") from None
    if not first.launches and error:
        rule = "must be bash that can be read here, and is not"
        raise PayloadError(f"{path}, line {error}: {rule}. Correct the script there.")
    notes = [f"line {error}, which {UNREADABLE}"] if error else []
    if len(others) < len(arms):
        notes.append(f"the branches behind the first {len(others)}")
    for reader in (first, *(reader for _, reader in others)):
        unread = unexecuted(reader.scripts, STATING, reader.executed)
        made = reader.launches or [_held(reader)]
        reader.launches = [replace(launch, notes=(*reader.notes, *notes), unread=unread) for launch in made]
    return trainings(_listed(first, others))


def _held(reader: Reader) -> Launch:
    """Return the arguments that variables hold, for a file that others source."""
    values = {name: " ".join(held) for name, held in reader.values.items() if name not in reader.stated}
    words = {name: [Word.of(word) for word in split(text)] for name, text in values.items()}
    texts = {name: " ".join(held) for name, held in words.items() if any(word.startswith("--") for word in held)}
    merged = [
        name
        for name, text in texts.items()
        if not any(other != name and len(longer) > len(text) and text in longer for other, longer in texts.items())
    ]
    arguments = (*(word for name in merged for word in words[name]), *reader.stray)
    environment = reader.environment()
    return Launch(line=0, program=", ".join(merged), arguments=arguments, environment=environment, files=reader.files)


def _listed(first: Reader, others: Sequence[tuple[Arm, Reader]]) -> list[Launch]:
    """Return the launches of the first reading, and those of others whose precision is new there."""
    known, added = _known(first.launches), list[Launch]()
    decisions: dict[object, dict[str, None]] = {launch.at: {} for launch in first.launches}
    defaults = {launch.at: launch.defaults for launch in first.launches}
    labels: dict[str, str] = {}
    for arm, taken in first.questions.values():
        labels.setdefault(_decider(arm), taken)
    for arm, reader in others:
        there = _known(reader.launches)
        for launch in first.launches:
            if there.isdisjoint(_known([launch])):
                because = _defaults(arm)
                defaults[launch.at] |= because
                decisions[launch.at] |= {} if because else {labels[_decider(arm)]: None}
        if arm.test.is_open or arm.test.equal:
            label = arm.labels[not arm.test.holds]
            started = [launch for launch in reader.launches if launch.line or not first.launches[0].line]
            added += [replace(one, decisions=(label,)) for one in started if known.isdisjoint(_known([one]))]
            known |= _known(started)
    is_started = any(launch.line for launch in added)
    own = [launch for launch in first.launches if launch.line or launch.arguments or not is_started]
    found = [replace(launch, decisions=tuple(decisions[launch.at])) for launch in own]
    found += sorted(added, key=lambda launch: launch.line)
    given = {name: Word.of(default) for name, default in first.defaulted.items()}
    return [replace(one, defaulted={name: given[name] for name in defaults.get(one.at, ())}) for one in found]


def _known(found: Iterable[Launch]) -> set[object]:
    """Return what bears on precision in launches, each with its place and with its program."""
    return {(key, launch.known) for launch in found for key in (launch.at, launch.name)}


def _defaults(arm: Arm) -> dict[str, None]:
    """Return the variables whose defaults decide about a condition; none where only the run does."""
    return {} if arm.test.is_open else dict.fromkeys(arm.test.defaults)


def _decider(arm: Arm) -> str:
    return f"${arm.test.equal[0]}" if arm.test.equal else arm.key
