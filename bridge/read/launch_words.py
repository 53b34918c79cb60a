"""`LaunchWords`: the words of a launch as options, and the records of those that leave something open.

words = LaunchWords(launch)     # accelerate launch --mixed_precision fp8 train.py --output_dir out
words.words.options             # {"output_dir": "out"}
words.launcher.options          # {"mixed_precision": "fp8"}
words.unread(read=("output_dir",))    # options, files and variables that were not read
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath

from bridge.read.foreign.reports import Unmapped
from bridge.read.foreign.table import sentence_named
from bridge.read.launch.launches import Launch, before_the_dashes
from bridge.read.launch.signs import ROWS
from bridge.read.launch.word import Word
from bridge.read.megatron_lm.flags import bears_on_precision
from bridge.read.text.command_words import CommandWords

FILES = tuple(ROWS["files"].split())
"""Options that name a file which can set the precision."""


class LaunchWords:
    """A launch with the words of its program and of Accelerate's launcher as options."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.words = CommandWords(before_the_dashes(launch.arguments))
        behind = _behind_accelerate(launch.runner)
        self.is_accelerated = behind is not None
        self.launcher = CommandWords(behind or ())

    def unread(
        self, *, read: Collection[str] | None = None, files: tuple[str, ...] = FILES
    ) -> tuple[Unmapped, ...]:
        """Return the records of what the line leaves open.

        Args:
            read: Options and overrides of the program that were read; None stands for all.
            files: Options that name a file, which was not read.
        """
        records: list[Unmapped] = []
        if read is not None:
            records += self._other_options({*read, *files})
        for words in (self.words, self.launcher):
            records += _left_open(words, files)
        records += self._of_the_script()
        return tuple(records)

    def _other_options(self, known: Collection[str]) -> Iterator[Unmapped]:
        """Yield the records of options and overrides that bear on precision and are not known."""
        written = self.words.written
        for name, value in {**self.words.options, **self.words.overrides}.items():
            is_off = value in (False, "False")
            if name not in known and bears_on_precision(name) and not is_off:
                yield lost("command_lines.option", written.get(name, name), value)

    def _of_the_script(self) -> Iterator[Unmapped]:
        """Yield the records of what the script leaves open."""
        launch = self.launch
        for decision in launch.decisions:
            yield lost("megatron_lm.branch-is-not-decided", decision, "taken")
        for note in launch.notes:
            yield lost("command_lines.file", str(note), None)
        for name, default in launch.defaulted.items():
            yield lost("megatron_lm.default-of-a-variable-was-taken", f"${name}", default)
        for name, variable in launch.environment.items():
            if not bears_on_precision(name.lower()):
                continue
            if variable.is_unknown:
                yield lost("megatron_lm.only-the-run-decides", name, variable)
            else:
                yield lost("command_lines.variable", name, variable)


def _behind_accelerate(runner: Sequence[Word]) -> Sequence[Word] | None:
    """Return the words of a runner behind Accelerate's launcher; None without it."""
    for place, word in enumerate(runner):
        if word == "accelerate.commands.launch" or PurePosixPath(word).name == "accelerate":
            return runner[place + 1 :]
    return None


def _left_open(words: CommandWords, files: Sequence[str]) -> Iterator[Unmapped]:
    """Yield the records of files that were not read, and of words that only the run decides."""
    for name in files:
        file = words.options.get(name)
        if isinstance(file, str):
            yield lost("command_lines.file", words.written[name], file)
    for name, late in words.undecided.items():
        if bears_on_precision(name) or name in (*FILES, *words.overrides):
            yield lost("megatron_lm.only-the-run-decides", words.written.get(name, name), late)
    for text in dict.fromkeys(words.loose):
        yield lost("command_lines.loose-word", text, None)


def lost(row: str, name: str, value: object, **facts: object) -> Unmapped:
    """Return the record of a setting, in the words of a sentence, "SYSTEM.SENTENCE"."""
    return Unmapped(name, value, *sentence_named(row, **facts))
