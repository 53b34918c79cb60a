"""`Parser`: the parser of a command line, which reports a mistake in one line."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from bridge.errors import CONTROL_CHARACTERS, RunConfigError, bounded, close_matches, did_you_mean


class Parser(argparse.ArgumentParser):
    """Reports a misspelt command or option in one line, with the nearest one.

    Abbreviations of an option are refused.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings
        )

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2 and one line."""
        known = list(self._parts())
        if "invalid choice" in message and known:
            word = message.split("'")[1]
            hint = did_you_mean(close_matches(word, known)) or f"Commands: {', '.join(known)}."
            message = f"no command {word!r}. {hint}"
        self.exit(2, bounded(f"{self.prog}: {message}") + "\n")

    def parsed(self, words: list[str]) -> argparse.Namespace:
        """Return the parsed arguments of a command. A mistake ends the process with one line."""
        for word in words:
            if CONTROL_CHARACTERS.search(word) or "\n" in word:
                self.error(
                    f"{word!r} holds a line end or another control character. Rename the file."
                )
        chosen, more = self.parse_known_args(words)
        takes_overrides = hasattr(chosen, "overrides")
        has_options = any(word.startswith("-") for word in more)
        if more and (has_options or not takes_overrides):
            self._refuse(words, more)
        if more:  # overrides may come after an option too
            chosen.overrides = [*chosen.overrides, *more]
        return chosen

    def _refuse(self, words: list[str], unknown: list[str]) -> NoReturn:
        """End the process with the arguments that a command does not know."""
        part = self._parts().get(words[0], self)
        sentence = f"unrecognized arguments: {' '.join(unknown)}"
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        near: list[str] = []
        if flags:
            near = close_matches(flags[0], part.options())
        if near:
            sentence += f". {did_you_mean(near)}"
        self.error(sentence)

    def options(self) -> list[str]:
        """Return the options of this command."""
        return list(self._option_string_actions)

    def _parts(self) -> dict[str, Parser]:
        """Return the commands below this one by their names."""
        parts: dict[str, Parser] = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parts.update(action.choices)
        return parts


def add_json_option(parser: argparse.ArgumentParser, text: str = "print JSON") -> None:
    """Add the option with which a command prints plain data."""
    parser.add_argument("--json", action="store_true", help=text)


def refuse_options_without(args: argparse.Namespace, needed: str, options: tuple[str, ...]) -> None:
    """Refuse options that have an effect only together with another option, if that is absent.

    Args:
        args: The parsed command line.
        needed: The other option.
        options: The options that need it.

    Raises:
        RunConfigError: Such an option is on the command line.
    """
    if getattr(args, needed.lstrip("-").replace("-", "_")):
        return
    for option in options:
        if getattr(args, option.lstrip("-").replace("-", "_")) not in (None, False, []):
            raise RunConfigError(
                f"{option}: needs {needed}, got none. Add {needed}, or leave {option} out."
            )
