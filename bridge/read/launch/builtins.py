"""`Builtins`: the commands of bash that change variables, functions and the environment of programs.

What such a command makes of a variable is computed, or the variable becomes one that only the run knows. No variable
keeps the value that it had before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.read.launch.script import WORDS, text_of
from bridge.read.launch.variables import Variables
from bridge.read.launch.word import UNKNOWN, Word

if TYPE_CHECKING:
    from tree_sitter import Node

NAME = re.compile(r"[A-Za-z_]\w*")
FIELDS = re.compile(r"%[sd]")
"""Of a format of `printf`."""
ELEMENT = re.compile(r"([A-Za-z_]\w*)\[([^\]]+)\]")
KEYED = re.compile(r"\[[^\]]*\]\+?=")
"""An element of `A=([2]=x)`."""
DECLARERS = frozenset({"export", "declare", "local", "readonly", "typeset"})
RETYPED = frozenset("nAilu")
"""Options of `declare`: a name for another variable, a mapping, a number, a text in one case."""
LOCAL = frozenset({"declare", "local", "typeset"})
"""Those whose variables are of the function around them."""
MAX_POSITIONAL = 512
"""Positional parameters; where there are more, none is known."""
LIST = re.compile(r"\$\{?[@*]|\[[@*]\]")
"""In a word that only the run knows: `$@`, `${A[@]}`."""
TAKE_A_VALUE = {"read": "adinNptu", "mapfile": "dnOsuCc", "readarray": "dnOsuCc"}
"""Command -> its options that a value follows."""
CHANGES = re.compile(
    r"([A-Za-z_]\w*)\s*(\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)
"""What arithmetic changes: `A = 1`, `A += 1`, `A++`, `--A`."""


@dataclass
class State:
    """What a subshell has of its own: nothing that changes it is known outside."""

    values: dict[str, dict[int, str]]
    exported: dict[str, None]
    functions: dict[str, Node]
    frames: list[dict[str, dict[int, str] | None]]
    is_all_exported: bool


class Builtins(Variables):
    """Variables, functions and the environment of programs at one point of a script."""

    def __init__(self, stated: Mapping[str, str]) -> None:
        super().__init__(stated)
        self.exported: dict[str, None] = {}
        self.functions: dict[str, Node] = {}
        self.frames: list[dict[str, dict[int, str] | None]] = []
        """For each function that is being read, its local variables with the values that they hide."""
        self.shared_functions = set[str]()
        """After `export -f`."""
        self.is_all_exported = False
        """After `set -a`."""
        self.builtins: dict[str, Callable[[list[str]], None]] = {
            "unset": self._unset,
            "read": self._read_input,
            "mapfile": self._read_input,
            "readarray": self._read_input,
            "printf": self._printf,
            "getopts": lambda words: self._forget_all([*words[2:3], "OPTARG", "OPTIND"]),
            "let": lambda words: self.compute(" , ".join(words[1:])),
            "set": self._set_options,
            "shift": self._shift,
        }

    def state(self) -> State:
        """Return a copy of what a subshell has of its own."""
        frames = [frame.copy() for frame in self.frames]
        return State(
            self.values.copy(),
            self.exported.copy(),
            self.functions.copy(),
            frames,
            self.is_all_exported,
        )

    def restore(self, state: State) -> None:
        """Go back to a state."""
        self.values, self.exported = state.values, state.exported
        self.functions, self.frames = state.functions, state.frames
        self.is_all_exported = state.is_all_exported

    # -- assignments ---------------------------------------------------------------------------------------------------

    def assign(self, node: Node) -> dict[str, None]:
        """Set the variables of a command, and return their names."""
        names = dict[str, None]()
        children = [node] if node.type == "variable_assignment" else node.children
        for one in (child for child in children if child.type == "variable_assignment"):
            name, _, index = text_of(one.children[0]).removesuffix("]").partition("[")
            append = len(one.children) > 1 and one.children[1].type == "+="
            given = one.child_by_field_name("value")
            if given is not None and given.type == "array":
                self._assign_array(name, given, append=append)
            else:
                text = self.text(given) if given is not None else ""
                if index:
                    self.set_element(name, index, text, append=append)
                else:
                    self.set(name, [text], append=append)
            names[name] = None
        if self.is_all_exported:
            self.exported |= names
        return names

    def _assign_array(self, name: str, given: Node, *, append: bool) -> None:
        children = [child for child in given.named_children if child.type in WORDS]
        if any(KEYED.match(text_of(child)) for child in children):
            self.forget(name)
        else:
            self.set(name, self.words_of(joined_texts(children)), append=append, is_array=True)

    def declare(
        self, words: list[str], names: dict[str, None], before: Mapping[str, dict[int, str]]
    ) -> None:
        """Read `export`, `local`, `declare` and their like.

        Args:
            words: The command, without the assignments that stand in it.
            names: The variables that these have set.
            before: The variables before that.
        """
        options = "".join(word for word in words[1:] if word[:1] in ("-", "+"))
        plain = [word for word in words[1:] if word[:1] not in ("-", "+")]
        is_local = words[0] in LOCAL and bool(self.frames) and "g" not in options
        if "f" in options:
            self.shared_functions |= set(plain if words[0] == "export" else ())
            return
        for name, sign, value in (word.partition("=") for word in plain):
            if NAME.fullmatch(name) is None:
                continue
            names[name] = None
            is_new = is_local and name not in self.frames[-1]
            if is_new:
                self.frames[-1][name] = before.get(name)
            if sign:
                self.set(name, [value])
            elif is_new:
                self.values[name] = {}
        for name in names:
            if is_local:
                self.frames[-1].setdefault(name, before.get(name))
            if RETYPED.intersection(options) and words[0] not in ("export", "readonly"):
                for target in self.held(name) if "n" in options else ():
                    self.forget(target)  # it is changed by another name
                self.forget(name)
        if words[0] == "export" and "n" in options:
            self.exported = {name: None for name in self.exported if name not in names}
        elif words[0] == "export" or "x" in options:
            self.exported |= names

    def leave_function(self) -> None:
        """Forget the local variables of a function, and take those that they have hidden."""
        for name, value in self.frames.pop().items():
            if value is None:
                self.values.pop(name, None)
            else:
                self.values[name] = value

    def compute(self, expression: str) -> None:
        """Make the variables unknown that arithmetic changes."""
        for found in CHANGES.finditer(expression):
            self.forget(found[1] or found[3])

    # -- commands ------------------------------------------------------------------------------------------------------

    def _unset(self, words: list[str]) -> None:
        options = "".join(word for word in words[1:] if word.startswith("-"))
        for word in (word for word in words[1:] if not word.startswith("-")):
            element = ELEMENT.fullmatch(word)
            if "f" in options:
                self.functions.pop(word, None)
            elif element is not None:
                self.forget(element[1])
            elif UNKNOWN.search(word):
                continue
            elif word not in self.values and word in self.functions and "v" not in options:
                self.functions.pop(word)
            else:
                is_of_a_caller = (
                    any(word in frame for frame in self.frames[:-1]) and word not in self.frames[-1]
                )
                self.values[word] = {}
                if is_of_a_caller:  # the variable that it hides comes back
                    self.forget(word)
                self.exported.pop(word, None)

    def _read_input(self, words: list[str]) -> None:
        """Make the variables unknown that `read` and `mapfile` set."""
        given, names = options_of(words[1:], TAKE_A_VALUE[words[0]])
        if words[0] == "read":
            self._forget_all([*names, *given.get("a", ())] or ["REPLY"])
        else:
            self._forget_all(names[:1] or ["MAPFILE"])

    def _printf(self, words: list[str]) -> None:
        """Read `printf -v NAME FORMAT WORD...` of known words, whose format has `%s` and `%d` alone."""
        if words[1:2] != ["-v"] or len(words) < 3:
            return
        name, text, given = words[2], "".join(words[3:4]), words[4:]
        is_plain = len(FIELDS.findall(text)) == len(given) and not {"%", "\\"} & set(
            FIELDS.sub("", text)
        )
        if NAME.fullmatch(name) and is_plain and not any(map(UNKNOWN.search, [text, *given])):
            values = iter(given)
            self.set(name, [FIELDS.sub(lambda _: next(values), text)])
        else:
            self._forget_all([name])

    def _forget_all(self, names: Iterable[str]) -> None:
        for name in names:
            if NAME.fullmatch(name):
                self.forget(name)
            elif ELEMENT.fullmatch(name):
                self.forget(name.partition("[")[0])

    def _set_options(self, words: list[str]) -> None:
        """Read `set -- a b`, which sets the positional parameters, and `set -a`, which exports what is set after it."""
        for place, word in enumerate(words[1:], 1):
            is_option = word[:1] in ("-", "+") and word not in ("-", "--")
            is_name = re.fullmatch(r"[-+]\w*o\w*", words[place - 1]) is not None
            if word == "--" or not (is_option or is_name):
                self.set_positional(words[place + (word == "--") :])
                return
            if re.fullmatch(r"[-+]\w*a\w*", word) or word == "allexport":
                self.is_all_exported = (
                    words[place - 1] if word == "allexport" else word
                ).startswith("-")

    def set_positional(self, words: Sequence[str]) -> None:
        """Set `$1` and those behind it."""
        for name in self.positional():
            if name.isdigit():
                self.values[name] = {}
        if len(words) > MAX_POSITIONAL:
            for name in self.positional():
                self.values.pop(name)
            return
        words = list(words)
        for name in ("@", "*"):
            self.values[name] = dict(enumerate(words))
        count = _first_list(words)
        if count < len(words):  # it may be any number of words
            for name in [*self.positional()]:
                if name not in ("@", "*"):
                    self.values.pop(name)
        else:
            self.values["#"] = {0: str(count)}
        for place, word in enumerate(words[: count + 1], 1):
            self.values[str(place)] = {0: word}

    def positional(self) -> dict[str, dict[int, str]]:
        """Return what is known of the positional parameters."""
        return {name: held for name, held in self.values.items() if not NAME.fullmatch(name)}

    def _shift(self, words: list[str]) -> None:
        count = int(words[1]) if words[1:] and words[1].isdigit() else 1
        if words[1:] and not words[1].isdigit():
            for name in self.positional():
                self.values.pop(name)
        elif "@" in self.values:
            given = self.held("@")
            if count <= len(given):
                self.set_positional(given[min(count, _first_list(given)) :])
        else:  # those that are stated from outside
            stated = {int(name): held for name, held in self.values.items() if name.isdigit()}
            for place in stated:
                self.values.pop(str(place))
            self.values |= {
                str(place - count): held for place, held in stated.items() if place > count
            }


def joined_texts(nodes: Sequence[Node]) -> list[str]:
    """Return nodes as they are written; those without a blank between them are one word (`[0]*$A+[1]*$B`)."""
    texts: list[str] = []
    end = -1
    for node in nodes:
        if node.start_byte == end:
            texts[-1] += text_of(node)
        else:
            texts.append(text_of(node))
        end = node.end_byte
    return texts


def _first_list(words: Sequence[str]) -> int:
    """Return the place of the first word that may be any number of words; the number of words where there is none."""
    for place, word in enumerate(words):
        if LIST.search(word):
            return place
    return len(words)


def options_of(words: Sequence[str], with_value: str) -> tuple[dict[str, list[str]], list[str]]:
    """Return the one-letter options of a command, each with its values, and the words behind them."""
    given = dict[str, list[str]]()
    for place, word in enumerate(words):
        if not word.startswith("-") or word == "-":
            return given, list(words[place:])
        if word == "--":
            return given, list(words[place + 1 :])
        for at, letter in enumerate(word[1:], 1):
            if letter not in with_value:
                given.setdefault(letter, [])
                continue
            if word[at + 1 :]:
                given[letter] = [word[at + 1 :]]
                break
            rest = options_of(words[place + 2 :], with_value)
            return {**given, letter: list(words[place + 1 : place + 2]), **rest[0]}, rest[1]
    return given, []


def environment_of(words: Sequence[str], inherited: Mapping[str, Word]) -> dict[str, Word]:
    """Return the variables of a program behind `env`, `mpirun -x` and their like.

    Args:
        words: The command before the program.
        inherited: The variables that the shell gives it.
    """
    given = dict(inherited)
    for place, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name == "env":
            given = _of_env(words[place + 1 :], given)
        elif name in ("mpirun", "mpiexec"):
            for option, value in zip(words[place + 1 :], words[place + 2 :], strict=False):
                variable, sign, text = value.partition("=")
                if option == "-x" and sign:
                    given[variable] = Word.of(text)
    return given


def _of_env(words: Sequence[str], inherited: Mapping[str, Word]) -> dict[str, Word]:
    given, rest = dict(inherited), list(words)
    while rest:
        word = rest.pop(0)
        name, sign, value = word.partition("=")
        if word in ("-u", "--unset"):
            given.pop(rest.pop(0) if rest else "", None)
        elif word.startswith("--unset="):
            given.pop(value, None)
        elif word in ("-i", "-", "--ignore-environment"):
            given = {}
        elif word in ("-C", "--chdir", "-S"):
            rest = rest[1:]
        elif re.fullmatch(r"-u\w+", word):
            given.pop(word[2:], None)
        elif sign and NAME.fullmatch(name):
            given[name] = Word.of(value)
        elif not word.startswith("-"):
            break
    return given
