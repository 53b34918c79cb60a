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
"""Exit code if the reader of the output ends before the command. A shell uses the same code."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The arguments after the program's name. None: the arguments of this process.

    Returns:
        The exit code of the command; 2 for a request that is refused.
    """
    is_process = arguments is None
    if arguments is None:
        arguments = sys.argv[1:]
    if is_process:
        # Imports and parsed files stay in use until the end. So garbage collection finds nothing.
        gc.set_threshold(50_000, 20)
    command, arguments = _split_command(arguments)
    module = command.load()
    if command.is_parsed_by_hydra(arguments):
        module.run_hydra_arguments(arguments)
        return 0
    parser = Parser(prog=f"{PROGRAM} {command.name}", description=f"{command.text}.")
    module.add_arguments(parser)
    args = parser.parsed(arguments)
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    return _run_command(lambda: module.run(args) or 0, is_process=is_process)


def _split_command(arguments: list[str]) -> tuple[Command, list[str]]:
    """Return the command of a command line, and the arguments after its name.

    The process ends here if the first argument is not the name of a command.
    """
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        _end_without_command(name, arguments[1:])
    return COMMANDS[name], arguments[1:]


def _end_without_command(name: str, arguments: list[str]) -> NoReturn:
    """Print the help or the version, or refuse a first argument that is not a command."""
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
        parser.exit(2, f"{describe_renamed_command(name, arguments)}\n")
    if not name:
        parser.error("the following arguments are required: COMMAND")
    near = close_matches(name, [*COMMANDS, *RENAMED_COMMANDS])
    hint = did_you_mean(near) or f"Commands: {', '.join(COMMANDS)}."
    parser.error(f"no command {name!r}. {hint}")


def _run_command(work: Callable[[], int], *, is_process: bool) -> int:
    """Run the work of a command. An error of this project is printed as a line on stderr.

    Args:
        work: Runs the command and returns its exit code.
        is_process: Whether the process ends after the command.

    Returns:
        The exit code of the work, or of the error.
    """
    code: int = BROKEN_PIPE_EXIT_CODE
    try:
        code = work()
        sys.stdout.flush()
        if is_process:
            # The process ends here. Garbage collection would be a tenth of its whole time.
            gc.freeze()
    except BridgeError as error:
        print(error, file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader ended first, `head` for example
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except OSError as error:
        print(bounded(_describe_os_error(error)), file=sys.stderr)
        return BridgeError.exit_code
    return code


def _describe_os_error(error: OSError) -> str:
    """Return a sentence about the path of an error, or else about standard output.

    Standard output is redirected to the null device, so that the end of the process does not fail.
    """
    # A path of the command line may be too long, or closed to this user.
    if error.filename is not None:
        reason = (error.strerror or "an error").lower()
        return f"{error.filename}: cannot be used: {reason}. Give another path."
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return f"standard output: cannot be written: {error.strerror}. Give it another place."


if __name__ == "__main__":
    sys.exit(main())
