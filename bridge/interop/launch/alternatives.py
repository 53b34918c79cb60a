"""`launches`: what a script starts on the path that bash takes with nothing set, and on the others."""

from collections.abc import Mapping
from dataclasses import replace

from bridge.errors import PayloadError
from bridge.interop.launch.launches import MODES, STATING, UNREADABLE, Launch, trainings
from bridge.interop.launch.reader import Reader
from bridge.interop.launch.script import parse
from bridge.interop.launch.word import Word, fields
from bridge.interop.launch.world import World


def launches(text: str, path: str = "<script>", variables: Mapping[str, str] | None = None) -> tuple[Launch, ...]:
    """Return the launches of a script, in source order, first those of the branch that bash takes with nothing set.

    A launch of another branch is listed where its precision differs, and names the branch. Without any launch, one is
    made of the arguments that the script's variables hold.

    Files that the script sources are read from the folder of `path`; `variables` is what the user states of the
    environment.
    """
    stated = {name: Word(value) for name, value in (variables or {}).items()}
    try:
        reader = Reader(parse(text, path), path, World(stated=stated, values={name: [stated[name]] for name in stated}))
    except RecursionError:
        raise PayloadError(f"{path}: commands are nested too deeply to be followed. Simplify the script.") from None
    first, error = reader.worlds[0], reader.script.error
    if not first.launches and error:
        rule = "must be bash that can be read here, and is not"
        raise PayloadError(f"{path}, line {error}: {rule}. Correct the script there.")
    return trainings(_listed([_whole(world, reader, error) for world in reader.worlds], reader.worlds))


def _whole(world: World, reader: Reader, error: int) -> list[Launch]:
    """Return all launches of a path, those behind the place where it came together with the first one too."""
    first = reader.worlds[0]
    launches, commands = world.rest or (len(first.launches), len(first.executed))
    executed = {*world.executed, *(() if world is first else first.executed[commands:])}
    notes = {**world.notes, **(first.notes if world.rest else {}), **reader.notes}
    if error:
        notes[f"line {error}, which {UNREADABLE}"] = None
    found = [*world.launches, *(() if world is first else first.launches[launches:])]
    unread = _unread(reader, executed)
    return [replace(launch, notes=tuple(notes), unread=unread) for launch in found or [_held(world)]]


def _unread(reader: Reader, executed: set[int]) -> str:
    """Return where text that a path does not execute states a precision, as a noun; empty: nowhere.

    Text of a file that is sourced, or of a string that is a script, counts too; a mode comes before other flags.
    """
    found = [
        (mention.text not in MODES, place > 0, mention)
        for place, script in enumerate(reader.scripts.values())
        for mention in script.unexecuted(STATING, executed)
    ]
    if not found:
        return ""
    _, is_inner, first = min(found)
    where = f"{'the branch at ' if first.is_branch else ''}line {first.line}"
    return f"{where}{' of what it reads' if is_inner else ''}, which holds {first.text},"


def _held(world: World) -> Launch:
    """Return the arguments that variables hold, for a file that others source."""
    words = {name: fields([(held, True)]) for name, held in world.values.items() if name not in world.stated}
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
        arguments=(*arguments, *world.stray),
        environment=world.exported,
        files=world.files,
    )


def _listed(paths: list[list[Launch]], worlds: list[World]) -> list[Launch]:
    """Return the launches of the first path, and those of others whose precision is new at their place."""
    first, others = paths[0], list[Launch]()
    decisions: dict[tuple[int, int], dict[str, None]] = {launch.at: {} for launch in first}
    defaults = {
        launch.at: {name: None for words in launch.known for word in words for name in word.defaults}
        for launch in first
    }
    for world, found in zip(worlds[1:], paths[1:], strict=True):
        for at in _changed(first, found):
            defaults[at] |= dict.fromkeys(world.because)
            decisions[at] |= {} if world.because else {world.taken: None}
        if world.label:
            others += [replace(launch, decisions=(world.label,)) for launch in _new(found, first, others)]
    texts = worlds[0].defaulted
    if any(launch.line for launch in others):
        first = [launch for launch in first if launch.line or launch.arguments]
    found = [replace(launch, decisions=tuple(decisions[launch.at])) for launch in first]
    found += sorted(others, key=lambda launch: launch.line)
    return [replace(one, defaulted={name: texts[name] for name in defaults.get(one.at, ())}) for one in found]


def _changed(first: list[Launch], other: list[Launch]) -> list[tuple[int, int]]:
    """Return where the first path has launches that another one changes."""
    there = {one.at: one.known for one in other}
    known = {(one.name, one.known) for one in other}
    return [
        launch.at
        for launch in first
        if there.get(launch.at) != launch.known and (launch.at in there or (launch.name, launch.known) not in known)
    ]


def _new(found: list[Launch], first: list[Launch], others: list[Launch]) -> list[Launch]:
    """Return the launches of another path whose precision is new at their place."""
    places = {launch.at for launch in found}
    moved = {(one.name, one.known) for one in first if one.at not in places}
    known: dict[tuple[int, int], list[object]] = {}
    for one in (*first, *others):
        known.setdefault(one.at, []).append(one.known)
    return [
        launch
        for launch in found
        if (launch.line or not first[0].line)
        and launch.known not in known.get(launch.at, ())
        and (launch.at in known or (launch.name, launch.known) not in moved)
    ]
