"""`Launch`: one start of a Python program; how a command is recognised as one, and which words bear on precision."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from bridge.interop.launch.script import MODES
from bridge.interop.launch.word import UNKNOWN, Word
from bridge.interop.megatron_lm.flags import SWITCH
from bridge.interop.table import rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROWS = rows("command_lines")


def pattern(row: str, flags: int = 0) -> re.Pattern[str]:
    """Return the pattern of a row, whose lines are one."""
    return re.compile(ROWS[row].replace(" |", "|"), flags)


COMMAND_WORDS, RUNNERS, STATING = pattern("commands"), pattern("runners"), pattern("stating")
OTHER_OPTIONS, PATH = pattern("other options"), pattern("path", re.IGNORECASE)
PRECISION_WORDS, HOLDS_ARGUMENTS = pattern("precision", re.IGNORECASE), pattern("holds arguments", re.IGNORECASE)
QUIET, SHELLS, MEGATRON_ARGUMENTS = (frozenset(ROWS[row].split()) for row in ("quiet", "shells", "megatron-lm"))
STARTERS = tuple(ROWS["starters"].split())
SCALE = re.compile(r'"(?:enabled|initial_scale_power)"')
"""Settings of a loss scale that name no precision."""
OWN_FILE = re.compile(r"^@|\.(?:ya?ml|json|toml)$")
SCRIPT = re.compile(r"\.(?:sh|bash|slurm|sbatch|sub)$")
RAY = ["ray", "job", "submit"]
"""The command behind its `--` is started."""
SWIFT = frozenset({"sft", "pt", "rlhf"})
UNREADABLE = "cannot be read here"
"""What the note of a line that the grammar does not know says of it."""


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file that a script writes."""

    line: int
    text: str | None = None
    """The content, in which `${X:-1}` is a default; None: a program changes it."""

    @cached_property
    def precise(self) -> tuple[Word, ...]:
        """The lines of its text that bear on precision."""
        lines = [Word.of(line) for line in (self.text or "").split("\n")]
        return tuple(line for line in lines if bears(line) or SCALE.search(line))


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of a training program."""

    line: int
    """Where in the script; 0 where the file only sets arguments."""
    program: str
    arguments: tuple[Word, ...]
    """What the program is given."""
    runner: tuple[Word, ...] = ()
    """The words before the program: `accelerate launch --mixed_precision fp8`, `torchrun --nproc_per_node 8`."""
    environment: Mapping[str, Word] = field(default_factory=dict)
    decisions: tuple[str, ...] = ()
    """Branches that the file does not decide, as they were taken."""
    notes: tuple[str, ...] = ()
    """What was not read: a sourced file, a heredoc that is a configuration."""
    unread: str = ""
    """Where text that was not executed states a precision, as a noun."""
    defaulted: Mapping[str, str] = field(default_factory=dict)
    """Variables that the environment may set, and whose default in the script decides about the precision."""
    files: Mapping[str, WrittenFile] = field(default_factory=dict)
    """Files that the script has written before."""
    place: int = 0
    """Which start it is among those on its line."""

    @property
    def at(self) -> tuple[int, int]:
        """Its line, and which start it is among those on that line."""
        return self.line, self.place

    @property
    def label(self) -> str:
        """Which run it is: "line 41, pretrain_gpt.py"."""
        held = f"arguments in {self.program}" if self.program else ""
        return "; ".join(filter(None, (f"line {self.line}, {self.name}" if self.line else held, *self.decisions)))

    @property
    def defaults(self) -> dict[str, None]:
        """Variables whose defaults are in what bears on precision."""
        return {name: None for words in self.known for word in words for name in word.defaults}

    @cached_property
    def flags(self) -> frozenset[str]:
        """The arguments without values behind `=`."""
        return frozenset(word.partition("=")[0] for word in self.arguments)

    @cached_property
    def known(self) -> tuple[tuple[Word, ...], ...]:
        """All that bears on precision without words that only the run knows.

        That is words of the runner and the arguments, variables, and files of the script's own that arguments name.
        """
        own = sorted(name for name in self.environment if bears(name) or name.startswith("ACCELERATE_"))
        named = {str(PurePosixPath(word.rpartition("=")[2])) for word in self.arguments}
        files = [(Word(name), *file.precise) for name, file in self.files.items() if name in named]
        variables = [(Word(name), self.environment[name]) for name in own]
        return _known(self.runner), _known(self.arguments), *variables, *files

    @cached_property
    def name(self) -> str:
        """The program without its folder where it is a Python file."""
        return PurePosixPath(self.program).name if self.program.endswith(".py") else self.program


@lru_cache(maxsize=4096)
def bears(text: str) -> bool:
    """Return whether a piece of a script bears on precision."""
    return PRECISION_WORDS.search(text) is not None or OTHER_OPTIONS.fullmatch(text) is not None


def may_hold_options(word: Word) -> bool:
    """Return whether a word with unknown pieces may be options once they are known: not a path, not part of a name."""
    rest = UNKNOWN.sub("", word)
    return not rest.strip() or (UNKNOWN.match(word) is not None and "/" not in rest)


def _after(words: Sequence[Word]) -> Iterator[tuple[Word, str]]:
    """Yield words, each with the option before it whose value it is; empty where it is none."""
    before = ""
    for word in words:
        takes = before.startswith("--") and "=" not in before and not SWITCH.fullmatch(before) and before not in MODES
        yield word, before if takes and not word.startswith("-") else ""
        before = word


def _known(words: Sequence[Word]) -> tuple[Word, ...]:
    """Return the words that bear on precision and are known: such flags with their values."""
    found = []
    for word, of in _after(words):
        is_option = bears(word) and (word.startswith("-") or "/" not in word)
        if not _may_hold(word, of) and (OWN_FILE.search(word) or (bears(of) if of else is_option)):
            found.append(word)
    return tuple(found)


def _may_hold(word: Word, of: str) -> bool:
    """Return whether a word that only the run knows may hold options: not the value of one, and no path."""
    if word.startswith("--"):
        return word.option()[0].is_unknown
    return word.is_unknown and not of and may_hold_options(word)


def trainings(found: Sequence[Launch], *, strict: bool = False) -> tuple[Launch, ...]:
    """Return launches; where some have Megatron-LM's flags, the certain ones first, and alone with `strict`."""
    if not any((MEGATRON_ARGUMENTS | MODES) & launch.flags for launch in found):
        return tuple(found)
    return tuple(filter(_may_train, found) if strict else sorted(found, key=lambda launch: not _may_train(launch)))


def _may_train(launch: Launch) -> bool:
    """Return whether a launch has words that bear on precision, or unknown ones that may hold such."""
    late = [word for word, of in _after(launch.arguments) if _may_hold(word, of)]
    known = (MEGATRON_ARGUMENTS | MODES) & launch.flags
    return bool(known) or any(map(bears, (*launch.runner, *launch.arguments))) or not all(map(PATH.search, late))


def found_launch(words: list[Word], line: int) -> Launch | None:
    """Return the launch that a command is, None for one that starts no training program."""
    if not words or (words[0] in QUIET and words[:3] != RAY) or words[0].startswith("-"):
        return None
    if words[:3] == RAY and "--" in words:
        return found_launch(words[[*map(str, words)].index("--") + 1 :], line)
    is_run = any(RUNNERS.search(word) for word in words[:40])
    for place, word in enumerate(words):
        following = words[place + 1 :]
        is_swift = PurePosixPath(word).name in ("swift", "megatron") and bool(SWIFT & {*following[:1]})
        is_file = word.endswith((".py", ".py'") if is_run else ".py") and not word.startswith("-")
        if is_swift or is_file:
            return Launch(line=line, runner=(*words[:place],), program=word, arguments=(*following,))
        if word == "-m" and is_run and following and not following[0].startswith(STARTERS):
            return Launch(line=line, runner=(*words[:place],), program=following[0], arguments=(*following[1:],))
    if (MEGATRON_ARGUMENTS | MODES) & set(words):
        first = next(place for place, word in enumerate(words) if word.startswith("--"))
        program = next((word for word in words if SCRIPT.search(word)), words[0])
        return Launch(line=line, program=program, arguments=(*words[first:],))
    return None


def nested_script(words: Sequence[str]) -> str | None:
    """Return the script that a command hands to a shell as one word: `bash -c "..."`."""
    program = ""
    for word, following in pairwise(words):
        if not word.startswith("-"):
            program = PurePosixPath(word).name
        elif program in SHELLS and words[0] not in QUIET and re.fullmatch(r"-\w*c", word):
            return following
    return None
