"""`Launch` is one start of a Python program.

`found_launch` recognises a command that starts one, and `bears` the words that bear on precision.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from bridge.read.launch.job import SUBMIT
from bridge.read.launch.script import MODES
from bridge.read.launch.word import Word
from bridge.read.row_files import rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROWS = rows("command_lines")
RUNNERS = re.compile(ROWS["runners"])
STATING = re.compile(ROWS["stating"])
OTHER_OPTIONS = re.compile(ROWS["other options"])
PRECISION_WORDS = re.compile(ROWS["precision"])
HOLDS_ARGUMENTS = re.compile(ROWS["holds arguments"])
QUIET = frozenset(ROWS["quiet"].split())
SHELLS = frozenset(ROWS["shells"].split())
MEGATRON_ARGUMENTS = frozenset(ROWS["megatron-lm"].split())
STARTERS = tuple(ROWS["starters"].split())
OWN_FILE = re.compile(r"^@|\.(?:ya?ml|json|toml)$")
REMOTE_SHELLS = frozenset({"ssh", "sshpass"})
PREFIXES = frozenset({"nohup", "timeout", "exec", "time", "sudo", "env", "setsid", "stdbuf"})
COMMANDS = {name: re.compile(words) for name, words in ROWS["commands"].items()}
"""Command that trains without a Python file on its line -> pattern of the words behind it."""
STRAY = "whose options belong to no command"
"""What the note of a line of options without a command says of it."""
UNREADABLE = "cannot be read here"
"""What the note of a line that the grammar does not know says of it."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of a training program."""

    line: int
    """Where in the script; 0 where the file only sets arguments."""
    program: str
    arguments: tuple[Word, ...]
    """What the program is given."""
    runner: tuple[Word, ...] = ()
    """The words before the program: `accelerate launch --mixed_precision fp8`, `torchrun
    --nproc_per_node 8`."""
    environment: Mapping[str, Word] = field(default_factory=dict)
    unread_environment: str = ""
    """The option of a job of Ray whose variables could not be read."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that the script writes before, by `cat` and a here-document -> their texts."""
    decisions: tuple[str, ...] = ()
    """Branches that the file does not decide, as they were taken."""
    notes: tuple[str, ...] = ()
    """What was not read: a sourced file, a heredoc that is a configuration."""
    unread: str = ""
    """Where text that was not executed states a precision, as a noun."""

    @property
    def label(self) -> str:
        """Which run it is: "line 41, pretrain_gpt.py"."""
        place = ""
        if self.line:
            place = f"line {self.line}, {self.name}"
        elif self.program:
            place = f"arguments in {self.program}"
        return "; ".join(filter(None, (place, *self.decisions)))

    @property
    def defaulted(self) -> dict[str, Word]:
        """Variables that the environment may set, with their defaults, in words of precision."""
        defaults: dict[str, Word] = {}
        for words in self.known:
            for word in words:
                for name, text in word.defaults.items():
                    defaults[name] = Word.of(text)
        return defaults

    @cached_property
    def flags(self) -> frozenset[str]:
        """The arguments without values behind `=`."""
        return frozenset(word.partition("=")[0] for word in before_the_dashes(self.arguments))

    @cached_property
    def known(self) -> tuple[tuple[Word, ...], ...]:
        """All that bears on precision: words of the runner and of the arguments, and variables."""
        variables: list[tuple[Word, Word]] = []
        for name in sorted(self.environment):
            if bears(name) or name.startswith("ACCELERATE_"):
                variables.append((Word(name), self.environment[name]))
        return _known(self.runner), _known(before_the_dashes(self.arguments)), *variables

    @cached_property
    def name(self) -> str:
        """The program without its folder where it is a Python file."""
        if self.program.endswith(".py"):
            return PurePosixPath(self.program).name
        return self.program


def before_the_dashes(words: Sequence[Word]) -> Sequence[Word]:
    """Return the words of a command before `--`; argparse takes no word behind it for an option."""
    if "--" in words:
        return words[: words.index("--")]
    return words


@lru_cache(maxsize=4096)
def bears(text: str) -> bool:
    """Return whether a piece of a script bears on precision."""
    return PRECISION_WORDS.search(text) is not None or OTHER_OPTIONS.fullmatch(text) is not None


def _known(words: Sequence[Word]) -> tuple[Word, ...]:
    """Return the words that bear on precision: options, their values, and files of options."""
    known: list[Word] = []
    for option, word in pairwise((Word(), *words)):
        is_value = option.startswith("--") and "=" not in option and not word.startswith("-")
        if option in MODES and word.is_unknown:
            is_value = False
        is_path = "/" in word and not word.startswith("-")
        if is_value:
            is_of_precision = bears(option)
        else:
            is_of_precision = bears(word) and not is_path
        if is_of_precision or OWN_FILE.search(word):
            known.append(word)
    return tuple(known)


def found_launch(words: list[Word], line: int) -> Launch | None:
    """Return the launch that a command is, None for one that starts no training program."""
    if not words or (words[0] in QUIET and words[:3] != SUBMIT) or words[0].startswith("-"):
        return None
    if words[:3] == SUBMIT and "--" in words:
        return found_launch(words[[*map(str, words)].index("--") + 1 :], line)
    started = _started(words, line)
    if started is not None:
        return started
    if (MEGATRON_ARGUMENTS | MODES).isdisjoint(words):
        return None
    first = 0
    while not words[first].startswith("--"):
        first += 1
    return Launch(line=line, program=words[0], arguments=(*words[first:],))


def _started(words: Sequence[Word], line: int) -> Launch | None:
    """Return the launch of a Python file, of a module or of a command that trains."""
    runner = _runner(words)
    for place, word in enumerate(words):
        is_file = word.endswith(".py") and not word.startswith("-")
        if is_file or _is_command(words, place):
            return _launch(words, line, place, place)
        is_option = word == "-m" and runner < place < len(words) - 1
        if is_option and not words[place + 1].startswith(STARTERS):
            return _launch(words, line, place, place + 1)
    return None


def _runner(words: Sequence[Word]) -> int:
    """Return the place of the first word that runs Python programs; behind the words: none does."""
    for place, word in enumerate(words[:40]):
        if RUNNERS.search(word):
            return place
    return len(words)


def _launch(words: Sequence[Word], line: int, end: int, program: int) -> Launch:
    """Return the launch of the program at a place, whose runner ends before another."""
    return Launch(
        line=line,
        runner=(*words[:end],),
        program=words[program],
        arguments=(*words[program + 1 :],),
    )


def _is_command(words: Sequence[Word], place: int) -> bool:
    """Return whether a word is a command that trains without a Python file on its line."""
    behind = COMMANDS.get(PurePosixPath(words[place]).name)
    if behind is None:
        return False
    return behind.match(" ".join(words[place + 1 : place + 41])) is not None


class NestedScript(NamedTuple):
    """A script that a command hands to a shell: `bash -c "..."`, `ssh host "..."`."""

    text: str
    place: int
    """Of the shell among the words."""
    is_elsewhere: bool = False
    """The shell runs on another host, which has none of the variables."""


def nested_script(words: Sequence[str]) -> NestedScript | None:
    """Return the script that a command hands to a shell, None for other commands."""
    if words[0] in QUIET:
        return None
    for place, program in enumerate(words):
        name = PurePosixPath(program).name
        if name in REMOTE_SHELLS and (place == 0 or words[place - 1] in PREFIXES):
            text = _behind_the_host(words[place + 1 :])
            return NestedScript(text, place, is_elsewhere=True) if text else None
        if name in SHELLS:
            for at, option in enumerate(words[place + 1 :], place + 1):
                if re.fullmatch(r"-\w*c", option) and at + 1 < len(words):
                    return NestedScript(words[at + 1], place)
                if not option.startswith(("-", "+")) and option != "pipefail":
                    break
    return None


def _behind_the_host(words: Sequence[str]) -> str:
    """Return the command that `ssh [options] host command` runs; empty where there is none."""
    rest = list(words)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if re.fullmatch(r"-[46AaCfGgKkMNnqsTtVvXxYy]*[BbcDEeFIiJLlmOopQRSWw]", option):
            rest = rest[1:]
    return " ".join(rest[1:])
