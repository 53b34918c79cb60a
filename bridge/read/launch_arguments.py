"""`LaunchArguments`: the options of a launch, and the records of those that were not read.

    # accelerate launch --mixed_precision fp8 train.py --output_dir out
    line = LaunchArguments(launch)
    line.program.options                    # {"output_dir": "out"}
    line.launcher.options                   # {"mixed_precision": "fp8"}
    line.list_unread(read=("output_dir",))  # records of options, files and variables

The launches of Megatron-LM's programs are not read here: `megatron_lm/written_arguments.py`.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath

from bridge.read.foreign.reports import Unmapped
from bridge.read.foreign.table import format_sentence
from bridge.read.launch.command_line_rows import COMMAND_LINE_ROWS
from bridge.read.launch.launch import Launch, get_arguments_before_dashes
from bridge.read.launch.shell_word import ShellWord
from bridge.read.megatron_lm.flags import may_affect_precision
from bridge.read.text.command_arguments import CommandArguments

PRECISION_FILE_OPTIONS = tuple(COMMAND_LINE_ROWS["files"].split())
"""Options that name a file which can set the precision."""


class LaunchArguments:
    """A launch with the arguments of its program and of Accelerate's launcher."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.program = CommandArguments(get_arguments_before_dashes(launch.arguments))
        """The arguments of the program."""
        launcher_words = _find_accelerate_arguments(launch.runner)
        self.is_accelerated = launcher_words is not None
        """Whether Accelerate's launcher starts the program."""
        self.launcher = CommandArguments(launcher_words or ())
        """The arguments of Accelerate's launcher; none without it."""

    def list_unread(
        self,
        *,
        read: Collection[str] | None = None,
        files: tuple[str, ...] = PRECISION_FILE_OPTIONS,
    ) -> tuple[Unmapped, ...]:
        """Return a record for each part of the launch that may affect precision and was not read.

        Args:
            read: Options and overrides of the program that were read; None: all.
            files: Options whose files were not read.
        """
        records: list[Unmapped] = []
        if read is not None:
            records += self._report_other_options({*read, *files})
        for arguments in (self.program, self.launcher):
            records += _report_unread_values(arguments, files)
        records += self._report_script()
        return tuple(records)

    def _report_other_options(self, known: Collection[str]) -> Iterator[Unmapped]:
        """Yield the records of options and overrides that affect precision and are not known."""
        spellings = self.program.spellings
        for name, value in {**self.program.options, **self.program.overrides}.items():
            is_off = value in (False, "False")
            if name not in known and may_affect_precision(name) and not is_off:
                yield make_unmapped("command_lines.option", spellings.get(name, name), value)

    def _report_script(self) -> Iterator[Unmapped]:
        """Yield the records of the script: its branches, files that were not read, and variables."""
        launch = self.launch
        for decision in launch.decisions:
            yield make_unmapped("megatron_lm.branch-is-not-decided", decision, "taken")
        for note in launch.notes:
            yield make_unmapped("command_lines.file", str(note), None)
        for name, default in launch.variable_defaults.items():
            yield make_unmapped("megatron_lm.default-of-a-variable-was-taken", f"${name}", default)
        for name, variable in launch.environment.items():
            if not may_affect_precision(name.lower()):
                continue
            if variable.is_open:
                yield make_unmapped("megatron_lm.only-the-run-decides", name, variable)
            else:
                yield make_unmapped("command_lines.variable", name, variable)


def _find_accelerate_arguments(runner: Sequence[ShellWord]) -> Sequence[ShellWord] | None:
    """Return the words after Accelerate's launcher; None for another runner."""
    for index, word in enumerate(runner):
        if word == "accelerate.commands.launch" or PurePosixPath(word).name == "accelerate":
            return runner[index + 1 :]
    return None


def _report_unread_values(arguments: CommandArguments, files: Sequence[str]) -> Iterator[Unmapped]:
    """Yield the records of files that were not read, and of values that only the run decides."""
    for name in files:
        file = arguments.options.get(name)
        if isinstance(file, str):
            yield make_unmapped("command_lines.file", arguments.spellings[name], file)
    for name, value in arguments.open_values.items():
        if may_affect_precision(name) or name in (*PRECISION_FILE_OPTIONS, *arguments.overrides):
            spelling = arguments.spellings.get(name, name)
            yield make_unmapped("megatron_lm.only-the-run-decides", spelling, value)
    for word in dict.fromkeys(arguments.open_words):
        yield make_unmapped("command_lines.loose-word", word, None)


def make_unmapped(sentence_name: str, setting: str, value: object, **facts: object) -> Unmapped:
    """Return the record of a setting.

    Args:
        sentence_name: The sentence about it in a table, "SYSTEM.SENTENCE".
        setting: The setting as it is written.
        facts: The facts that the sentence names.
    """
    return Unmapped(setting, value, *format_sentence(sentence_name, **facts))
