"""Commands that change a script's variables: assignments, declarations, `read`, `printf -v`, `unset`, `shift`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bridge.interop.shell_input import echoed
from bridge.interop.shell_precision import deciding
from bridge.interop.shell_variables import Read, is_unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.interop.shell_tokens import Token, Word
    from bridge.interop.shell_tree import Simple
    from bridge.interop.shell_values import Piece, Values
    from bridge.interop.shell_ways import Way

__all__ = ["BUILTINS", "DECLARERS", "READERS", "Words", "assign", "assignment", "expanded", "follow", "give", "judged"]

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
NAME = re.compile(r"[A-Za-z_]\w*")
DECLARERS = frozenset({"export", "declare", "local", "readonly", "typeset"})
LOCAL = frozenset({"declare", "local", "typeset"})
LISTERS = frozenset({"mapfile", "readarray"})
READERS = frozenset({"read", *LISTERS})
BUILTINS = DECLARERS | READERS | {"printf", "set", "shift", "unset"}
VALUED = {"read": "adinNptu", "mapfile": "dnOsuCc", "readarray": "dnOsuCc"}
"""Letters that are followed by a value."""
POSITIONS = 10


@dataclass(slots=True)
class Words:
    """The words of a command."""

    texts: list[str] = field(default_factory=list)
    read: list[Read] = field(default_factory=list)
    """What each depends on."""
    deciding: set[str] = field(default_factory=set)
    """The defaults on which options among them depend that bear on precision."""

    def every(self, start: int = 0) -> Read:
        """Return what the words from a place on depend on together."""
        found = self.read[start:]
        return Read({name for read in found for name in read.origins}, {name for read in found for name in read.flags})


def expanded(items: Sequence[Token], values: Values) -> Words:
    """Return the words of a command."""
    found = Words()
    with values.watching() as every:
        for token in items:
            if token.kind == "array":
                found.texts.append(token.text)
                found.read.append(Read())
            elif token.word is not None:
                with values.watching() as read:
                    texts = values.words(token.word)
                found.texts += texts
                found.read += [read] * len(texts)
        if every:
            words = [token.word for token in items if token.word is not None and token.kind != "array"]
            found.deciding = judged(words, values) | every.flags
    return found


def judged(words: Sequence[Word], values: Values, start: int = 0) -> set[str]:
    """Return the defaults that decide an option among some words.

    Args:
        words: They stand one behind the other on a command line, in an array or in a value.
        values: The variables.
        start: Where the first one begins to count.
    """
    pieces: list[Piece] = []
    for word in words:
        found = values.pieces(word)
        if start and found:
            found[0] = (found[0][0][start:], found[0][1])
            start = 0
        pieces += [*found, (" ", frozenset())]
    return deciding(pieces)


def assignment(token: Token) -> re.Match[str] | None:
    """Return the head `NAME=` of an assignment, None for anything else."""
    if token.kind == "array":
        return ASSIGNMENT.match(token.text)
    first = token.word.parts[0] if token.word is not None and token.word.parts else None
    if first is None or first.kind != "text" or first.quoted:
        return None
    return ASSIGNMENT.match(first.text)


def assign(token: Token, named: re.Match[str], way: Way, into: dict[str, str]) -> None:
    """Follow one assignment; scalars are noted in `into`."""
    name, index, append = named[1], named[2], bool(named[3])
    values = way.values
    with values.watching() as read:
        if token.kind == "array":
            words = [text for word in token.words for text in values.words(word)]
            if name in values.stated and not append and words and all(map(is_unknown, words)):
                words = values.stated[name].split()
            if read:
                read.flags |= judged(token.words, values)
            values.assign_list(name, words, append=append)
            return
        if token.word is None:
            return
        if append or index:
            text = values.text(token.word)[named.end() :]
        else:
            text = values.assigned(name, token.word, named.end())
        if read:
            read.flags |= judged([token.word], values, named.end())
        if index:
            values.assign_element(name, text)
            return
        name = values.resolved(name)
        before = values.variables.get(name)
        values.assign(named[1], text, append=append)
        if before is None or isinstance(before, str):
            value = values.variables.get(name, "")
            into[name] = value if isinstance(value, str) else text


def follow(given: Words, items: Sequence[Token], node: Simple, way: Way) -> None:
    """Follow a command of `BUILTINS`."""
    words, command = given.texts, given.texts[0]
    if command in DECLARERS:
        _declare(command, words, items, way)
    elif command in READERS:
        _read(words, node, way)
    elif command == "printf":
        _print(given, way.values)
    elif command == "unset":
        _unset(words, way)
    elif command == "shift":
        _shift(words, way)
    elif "--" in words:
        give(given, words.index("--") + 1, way.values)


def give(given: Words, start: int, values: Values) -> None:
    """Set the positional parameters to the words from a place on."""
    words, every = given.texts[start:], given.every(start)
    for place, (word, read) in enumerate(zip(words[: POSITIONS - 1], given.read[start:], strict=False), 1):
        values.set(str(place), word, read)
    values.set("@", list(words), every)
    values.set("*", " ".join(words), every)


def _declare(command: str, words: list[str], items: Sequence[Token], way: Way) -> None:
    """Follow `export NAME=value` and its kin; `declare -n NAME=other` makes one variable stand for another."""
    values = way.values
    switches = "".join(word[1:] for word in words[1:] if re.fullmatch(r"-[A-Za-z]+", word))
    declared: dict[str, str] = {}
    for token in items[1:]:
        named = assignment(token)
        name = named[1] if named else token.word.literal if token.word is not None else None
        if name is None or not NAME.fullmatch(name):
            continue
        if command in LOCAL and "g" not in switches:
            values.make_local(name)
            if not named and values.frame is not None and name in values.frame and "n" not in switches:
                values.set(name, [] if set(switches) & set("aA") else "")
        if command in LOCAL and "n" in switches:
            target = values.text(token.word)[named.end() :] if named and token.kind != "array" else ""
            _refer(name, target, way)
        elif named:
            assign(token, named, way, declared)
        elif command == "export" and "n" not in switches and values.resolved(name) in values.variables:
            value = values.variables[values.resolved(name)]
            declared[name] = value if isinstance(value, str) else " ".join(value)
    if command == "export" or "x" in switches:
        way.exported |= declared


def _refer(name: str, target: str, way: Way) -> None:
    """Make a name stand for another; which one may be something that only the run knows."""
    if is_unknown(target):
        shown = way.values.unknowns.shown(target)
        way.note(f"what is assigned through {name}, which stands for the variable that {shown} names")
    way.values.refer(name, target.partition("[")[0])


def _read(words: list[str], node: Simple, way: Way) -> None:
    """Follow `read`, `mapfile` and `readarray`, where the script says what they read."""
    values, command = way.values, words[0]
    options, names = _options(words)
    with values.watching() as read:
        given = (*node.heredocs, *node.strings)
        body = values.text(given[-1]) if given else None
    if command in LISTERS:
        name = names[0] if names else "MAPFILE"
        lines = [values.unknown(name)] if body is None else body.splitlines()
        values.set(name, lines, read)
        return
    if body is not None and "d" not in options:
        body = body.partition("\n")[0]
    separators = values.variables.get("IFS")
    if "a" in options:
        name = options["a"]
        words_read = [values.unknown(name)] if body is None else _split(body, separators)
        values.set(name, words_read, read)
        return
    rest = body.strip() if body is not None and separators != "" else body
    for name in names:
        if rest is None:
            values.set(name, values.unknown(name))
        elif name == names[-1]:
            values.set(name, rest, read)
        else:
            first, _, rest = _parted(rest, separators)
            values.set(name, first, read)


def _split(text: str, separators: object) -> list[str]:
    """Return the words that `read -a` makes of a line."""
    found = []
    while text:
        word, separator, text = _parted(text, separators)
        found += [word] if word or separator.strip() else []
    return found


def _parted(text: str, separators: object) -> tuple[str, str, str]:
    """Return the first word of a line, what ends it, and the rest."""
    signs = separators if isinstance(separators, str) and separators.strip() else " \t\n"
    found = re.search(f"[{re.escape(signs)}]", text)
    if found is None:
        return text, "", ""
    rest = text[found.end() :]
    return text[: found.start()], found[0], rest if signs.strip() else rest.lstrip()


def _options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of `read` and its kin by their letters, and the names that they set."""
    options: dict[str, str] = {}
    at = 1
    while at < len(words) and words[at].startswith("-") and len(words[at]) > 1:
        letters = words[at][1:]
        at += 1
        for place, letter in enumerate(letters):
            options[letter] = ""
            if letter in VALUED[words[0]]:
                options[letter] = letters[place + 1 :] or (words[at] if at < len(words) else "")
                at += not letters[place + 1 :]
                break
    return options, [word for word in words[at:] if NAME.fullmatch(word)]


def _print(given: Words, values: Values) -> None:
    """Follow `printf -v NAME`; any other printf changes nothing."""
    words = given.texts
    if len(words) < 3 or words[1] != "-v" or not NAME.fullmatch(words[2]):
        return
    lines = echoed(["printf", *words[3:]])
    text = " ".join(word for line in lines for word in line) if lines is not None else ""
    values.set(words[2], text if lines is not None else values.unknown(words[2]), given.every(3))


def _unset(words: Sequence[str], way: Way) -> None:
    for name in words[1:]:
        if "-n" in words[1:2]:
            way.values.references.pop(name, None)
        elif NAME.fullmatch(name):
            way.values.set(name, "")


def _shift(words: Sequence[str], way: Way) -> None:
    count = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
    values = way.values
    every, about = values.variables.get("@"), values.reading("@")
    held = [(values.variables.get(str(place)), values.reading(str(place))) for place in range(POSITIONS)]
    for place in range(1, POSITIONS):
        values.forget(str(place))
    for place in range(1, POSITIONS):
        value, read = held[place + count] if place + count < POSITIONS else (None, about)
        if value is None and isinstance(every, list) and place + count <= len(every):
            value = every[place + count - 1]
        if isinstance(value, str):
            values.set(str(place), value, read)
    if isinstance(every, list):
        values.set("@", every[count:], about)
        values.set("*", " ".join(every[count:]), about)
