"""The command `precision-bridge`. Each module adds the parsers of its subcommands and prints their answers."""

import argparse
import functools
import gc
import importlib
import os
import signal
import sys
import warnings
from importlib.metadata import version
from typing import Any, NoReturn

from bridge.errors import CONTROL, BridgeError, bounded, close_matches, did_you_mean

FURTHER = {"recipes": ("show", "diff"), "check": ("support-matrix",), "plan": ("align",)}
"""Module of this package -> its commands next to the one of its own name."""
MODULES = {
    name: (name.replace("_", "-"), *FURTHER.get(name, ()))
    for name in (
        *("recipes", "explain", "check", "quantisation_error", "gradients", "convert", "sources", "plan", "memory"),
        *("modules", "rehearse", "report", "audit", "twin", "watch", "manifest", "checkpoint"),
    )
}
"""Module of this package -> its commands: a command imports its own module, the help imports all."""
PROGRAM = "precision-bridge"
TRAIN = "train"
COMPARE = "compare"


class _Parser(argparse.ArgumentParser):
    """Answers a misspelt command or option with the nearest, in one line; an option is written whole."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        known = list(self._choices())
        if "invalid choice" in message and known:
            word = message.split("'")[1]
            hint = did_you_mean(close_matches(word, known)) or f"Commands: {', '.join(known)}."
            message = f"no command {word!r}. {hint}"
        self.exit(2, bounded(f"{self.prog}: {message}") + "\n")

    def refuse_unknown(self, command: str, unknown: list[str]) -> NoReturn:
        """End with the words that a command does not know, and the nearest option."""
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
        near = close_matches(flag, self._choices()[command].options()) if flag else []
        self.error(f"unrecognized arguments: {' '.join(unknown)}{'. ' * bool(near)}{did_you_mean(near)}")

    def options(self) -> list[str]:
        """Return the options of this command."""
        return list(self._option_string_actions)

    def _choices(self) -> dict[str, "_Parser"]:
        actions = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return {name: parser for action in actions for name, parser in action.choices.items()}


@functools.cache
def _parser(asked: str = "") -> _Parser:
    """Return the parser of one command, or of all where `asked` is the name of none."""
    parser = _Parser(
        prog=PROGRAM, description="Named mixed-precision recipes for Megatron Core: what they are and what they do."
    )
    parser.add_argument("--version", action="version", version=f"precision-bridge {version('precision-bridge')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in [name for name, own in MODULES.items() if asked in own] or MODULES:
        importlib.import_module(f"bridge.cli.{module}").add_parsers(commands)
    commands.add_parser(TRAIN, add_help=False, help="train in the precision of a recipe, as scripts/train.py does")
    text = "train with several recipes and seeds, and judge each recipe's loss, as scripts/compare.py does"
    commands.add_parser(COMPARE, add_help=False, help=text)
    return parser


def _parsed(words: list[str]) -> argparse.Namespace:
    """Return the command of a command line with its arguments; a mistake ends the process in one line."""
    parser = _parser(words[0] if words else "")
    steering = next((word for word in words if CONTROL.search(word) or "\n" in word), None)
    if steering is not None:
        parser.error(f"{steering!r} holds a line end or another control character. Rename the file.")
    chosen, more = parser.parse_known_args(words)
    if more and (not hasattr(chosen, "overrides") or any(word.startswith("-") for word in more)):
        parser.refuse_unknown(words[0], more)
    if more:  # overrides may stand behind an option too
        chosen.overrides = [*chosen.overrides, *more]
    return chosen


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code: its own, or 2 for what cannot be answered as asked."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] in ([TRAIN], [COMPARE]):  # the words behind it are Hydra's
        from bridge.front.compare import main_compare  # Hydra is heavy
        from bridge.front.train import main_train

        (main_train if words[0] == TRAIN else main_compare)(words[1:])
        return 0
    if arguments is None:
        gc.set_threshold(50_000, 20)  # the imports and the parsed files stay: looking for garbage finds none
    chosen = _parsed(words)
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    code: int = 128 + signal.SIGPIPE  # of an answer that no reader waits for
    try:
        code = chosen.run(chosen) or 0
        sys.stdout.flush()
        if arguments is None:
            gc.freeze()  # the process ends here: collecting what it holds would take a tenth of a command's time
    except BridgeError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except OSError as error:
        text = f"{error.filename}: cannot be used: {(error.strerror or 'an error').lower()}. Give another path."
        if error.filename is None:  # else a path that the command was given: too long, or closed to this user
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            text = f"standard output: cannot be written: {error.strerror}. Give it another place."
        print(bounded(text), file=sys.stderr)
        return BridgeError.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main())
