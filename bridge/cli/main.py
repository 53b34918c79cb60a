"""The command `precision-bridge`: finds a command, runs it, and returns its exit code."""

import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import NoReturn

from bridge.cli.commands import (
    COMMANDS,
    RENAMED_COMMANDS,
    Command,
    describe_renamed_command,
    format_command_list,
)
from bridge.cli.parser import Parser
from bridge.errors import BridgeError, bounded, close_matches, did_you_mean

PROGRAM = "precision-bridge"
DESCRIPTION = "Named mixed-precision recipes for Megatron Core: what they are and what they do."
BROKEN_PIPE_EXIT_CODE = 128 + signal.SIGPIPE


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code: its own, or 2 where it cannot answer as asked."""
    words = arguments
    if words is None:
        words = sys.argv[1:]
    is_process = arguments is None
    if is_process:
        # The imports and the parsed files stay: looking for garbage finds none.
        gc.set_threshold(50_000, 20)
    command, words = _split_command(words)
    module = command.load()
    if command.is_parsed_by_hydra(words):
        module.run_words(words)
        return 0
    parser = Parser(prog=f"{PROGRAM} {command.name}", description=f"{command.text}.")
    module.add_arguments(parser)
    chosen = parser.parsed(words)
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    return _run_command(lambda: module.run(chosen) or 0, is_process=is_process)


def _split_command(words: list[str]) -> tuple[Command, list[str]]:
    """Return the command of a command line and the words behind it.

    Help, a version or a mistake ends the process.
    """
    name = ""
    if words:
        name = words[0]
    if name not in COMMANDS:
        _end_without_command(name, words[1:])
    return COMMANDS[name], words[1:]


def _end_without_command(name: str, words: list[str]) -> NoReturn:
    """Print the help or the version, or refuse a line that begins with no command's name."""
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [-h] [--version] COMMAND ...",
        description=DESCRIPTION,
        epilog=format_command_list(),
    )
    parser.add_argument(
        "--version", action="version", version=f"{PROGRAM} {version('precision-bridge')}"
    )
    if name.startswith("-"):
        parser.parse_args([name])
    if name in RENAMED_COMMANDS:
        parser.exit(2, f"{describe_renamed_command(name, words)}\n")
    if not name:
        parser.error("the following arguments are required: COMMAND")
    near = close_matches(name, [*COMMANDS, *RENAMED_COMMANDS])
    hint = did_you_mean(near) or f"Commands: {', '.join(COMMANDS)}."
    parser.error(f"no command {name!r}. {hint}")


def _run_command(work: Callable[[], int], *, is_process: bool) -> int:
    """Do the work of a command and return its exit code; an error is one line and exit code 2."""
    code: int = BROKEN_PIPE_EXIT_CODE
    try:
        code = work()
        sys.stdout.flush()
        if is_process:
            # The process ends here: collecting what it holds takes a tenth of a command's time.
            gc.freeze()
    except BridgeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except OSError as error:
        print(bounded(_describe_os_error(error)), file=sys.stderr)
        return BridgeError.exit_code
    return code


def _describe_os_error(error: OSError) -> str:
    """Return the sentence about a path that cannot be used, or about standard output.

    Standard output is closed then.
    """
    # A path that the command was given may be too long, or closed to this user.
    if error.filename is not None:
        reason = (error.strerror or "an error").lower()
        return f"{error.filename}: cannot be used: {reason}. Give another path."
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return f"standard output: cannot be written: {error.strerror}. Give it another place."


if __name__ == "__main__":
    sys.exit(main())
