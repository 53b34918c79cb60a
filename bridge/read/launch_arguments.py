"""`LaunchArguments`: the words of a launch as options, and the records of those that leave something open.

words = LaunchWords(launch)     # accelerate launch --mixed_precision fp8 train.py --output_dir out
words.words.options             # {"output_dir": "out"}
words.launcher.options          # {"mixed_precision": "fp8"}
words.unread(read=("output_dir",))    # options, files and variables that were not read
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath

from bridge.read.foreign.reports import Unmapped
from bridge.read.foreign.table import format_sentence
from bridge.read.launch.command_line_rows import COMMAND_LINE_ROWS
from bridge.read.launch.launch import Launch, get_arguments_before_dashes
from bridge.read.launch.shell_word import ShellWord
from bridge.read.megatron_lm.flags import bears_on_precision
from bridge.read.text.command_arguments import CommandArguments

PRECISION_FILE_OPTIONS = tuple(COMMAND_LINE_ROWS["files"].split())
"""Options that name a file which can set the precision."""


class LaunchArguments:
    """A launch with the words of its program and of Accelerate's launcher as options."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.words = CommandArguments(get_arguments_before_dashes(launch.arguments))
        behind = _find_accelerate_arguments(launch.runner)
        self.is_accelerated = behind is not None
        self.launcher = CommandArguments(behind or ())

    def unread(
        self,
        *,
        read: Collection[str] | None = None,
        files: tuple[str, ...] = PRECISION_FILE_OPTIONS,
    ) -> tuple[Unmapped, ...]:
        """Return the records of what the line leaves open.

        Args:
            read: Options and overrides of the program that were read; None stands for all.
            files: Options that name a file, which was not read.
        """
        records: list[Unmapped] = []
        if read is not None:
            records += self._collect_other_options({*read, *files})
        for words in (self.words, self.launcher):
            records += _collect_open_records(words, files)
        records += self._collect_script_records()
        return tuple(records)

    def _collect_other_options(self, known: Collection[str]) -> Iterator[Unmapped]:
        """Yield the records of options and overrides that bear on precision and are not known."""
        written = self.words.written
        for name, value in {**self.words.options, **self.words.overrides}.items():
            is_off = value in (False, "False")
            if name not in known and bears_on_precision(name) and not is_off:
                yield make_unmapped("command_lines.option", written.get(name, name), value)

    def _collect_script_records(self) -> Iterator[Unmapped]:
        """Yield the records of what the script leaves open."""
        launch = self.launch
        for decision in launch.decisions:
            yield make_unmapped("megatron_lm.branch-is-not-decided", decision, "taken")
        for note in launch.notes:
            yield make_unmapped("command_lines.file", str(note), None)
        for name, default in launch.variable_defaults.items():
            yield make_unmapped("megatron_lm.default-of-a-variable-was-taken", f"${name}", default)
        for name, variable in launch.environment.items():
            if not bears_on_precision(name.lower()):
                continue
            if variable.is_unknown:
                yield make_unmapped("megatron_lm.only-the-run-decides", name, variable)
            else:
                yield make_unmapped("command_lines.variable", name, variable)


def _find_accelerate_arguments(runner: Sequence[ShellWord]) -> Sequence[ShellWord] | None:
    """Return the words of a runner behind Accelerate's launcher; None without it."""
    for index, word in enumerate(runner):
        if word == "accelerate.commands.launch" or PurePosixPath(word).name == "accelerate":
            return runner[index + 1 :]
    return None


def _collect_open_records(words: CommandArguments, files: Sequence[str]) -> Iterator[Unmapped]:
    """Yield the records of files that were not read, and of words that only the run decides."""
    for name in files:
        file = words.options.get(name)
        if isinstance(file, str):
            yield make_unmapped("command_lines.file", words.written[name], file)
    for name, late in words.undecided.items():
        if bears_on_precision(name) or name in (*PRECISION_FILE_OPTIONS, *words.overrides):
            yield make_unmapped(
                "megatron_lm.only-the-run-decides", words.written.get(name, name), late
            )
    for text in dict.fromkeys(words.loose):
        yield make_unmapped("command_lines.loose-word", text, None)


def make_unmapped(sentence_name: str, name: str, value: object, **facts: object) -> Unmapped:
    """Return the record of a setting, in the words of a sentence, "SYSTEM.SENTENCE"."""
    return Unmapped(name, value, *format_sentence(sentence_name, **facts))
