"""`CommandLine`: the flags and overrides of Hydra on a script's command line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import hydra

from bridge.errors import RunConfigError, close_matches
from bridge.front.compose import rewrite_null_groups
from bridge.front.folders import find_config_folder
from bridge.front.search import VERSION_BASE, Search
from bridge.read.run_keys import RUN_CONFIG_KEYS

HYDRA_SWITCHES = (
    ("--help", "-h"),
    ("--hydra-help",),
    ("--version",),
    ("--resolve",),
    ("--run", "-r"),
    ("--multirun", "-m"),
    ("--shell-completion", "-sc"),
)
"""The flags of Hydra that take no value, each with its spellings."""
HYDRA_OPTIONS = (
    ("--package", "-p"),
    ("--config-path", "-cp"),
    ("--config-name", "-cn"),
    ("--config-dir", "-cd"),
    ("--experimental-rerun",),
)
"""The flags of Hydra that take a value, each with its spellings."""
INFO_VALUES = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""The values of ``--info``."""
HYDRA_MAIN_ARGUMENTS = ("overrides", "config_path", "config_name")
"""Parsed arguments that are passed to `hydra.main`, not as flags."""
FULL_ERROR_VARIABLE = "HYDRA_FULL_ERROR"
"""The environment variable that shows every error with its traceback."""


class _Parser(argparse.ArgumentParser):
    """The parser of Hydra's flags, which names the nearest key for an unknown flag."""

    def error(self, message: str) -> NoReturn:
        """Raise RunConfigError."""
        flag = ""
        for word in message.split():
            if word.startswith("--"):
                flag = word.lstrip("-")
                break
        near = close_matches(flag, RUN_CONFIG_KEYS)
        if flag in RUN_CONFIG_KEYS:
            near = [flag]
        hint = "`--help` lists the flags; a setting is KEY=VALUE."
        if near:
            hint = f"Write {near[0]}=VALUE."
        raise RunConfigError(f"{message}. {hint}", near)


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """The parsed arguments of a command line."""

    flags: argparse.Namespace
    overrides: list[str]
    """The arguments that are not flags, in Hydra's spelling."""
    search: Search
    name: str
    """Hydra's name of the job and of its log."""

    @classmethod
    def from_arguments(
        cls, arguments: Sequence[str], *, config_path: Path, name: str
    ) -> CommandLine:
        """Return the parsed arguments of a command line.

        Args:
            arguments: The arguments after the name of the script.
            config_path: The folder of the Hydra tree, if no flag names another.
            name: Hydra's name of the job and of its log.
        """
        parser = _Parser(add_help=False)
        parser.add_argument("overrides", nargs="*")
        for spellings in HYDRA_SWITCHES:
            parser.add_argument(*spellings, action="store_true")
        for spellings in HYDRA_OPTIONS:
            parser.add_argument(*spellings)
        parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
        parser.add_argument("--info", "-i", const="all", nargs="?", choices=INFO_VALUES)
        flags = parser.parse_intermixed_args(arguments)
        folder = _resolve_config_path(flags.config_path) or str(config_path)
        search = Search(folder, flags.config_name or "config", flags.config_dir)
        return cls(
            flags=flags, overrides=rewrite_null_groups(flags.overrides), search=search, name=name
        )

    def start_hydra(self, job: Callable[..., None], *further_overrides: str) -> None:
        """Run a job under `hydra.main`, with further overrides added.

        The errors of Hydra and of the job are raised.
        """
        flags = []
        for name, value in vars(self.flags).items():
            flag = f"--{name.replace('_', '-')}"
            if name in HYDRA_MAIN_ARGUMENTS or not value:
                continue
            flags.append(flag)
            if value is not True:
                flags[-1] = f"{flag}={value}"
        before = sys.argv
        full_error = os.environ.get(FULL_ERROR_VARIABLE)
        sys.argv = [sys.argv[0], *flags, *self.overrides, *further_overrides]
        # Without the variable Hydra prints an error and ends the process with exit code 1.
        os.environ[FULL_ERROR_VARIABLE] = "1"
        try:
            decorate = hydra.main(self.search.main, self.search.config_name, VERSION_BASE)
            decorate(job)()
        finally:
            sys.argv = before
            del os.environ[FULL_ERROR_VARIABLE]
            if full_error is not None:
                os.environ[FULL_ERROR_VARIABLE] = full_error


def _resolve_config_path(folder: str | None) -> str | None:
    """Return the folder that ``--config-path`` names.

    A relative path is looked up in the working directory, and then in the script's folder, as Hydra
    does.
    """
    if folder is None or "://" in folder:
        return folder
    by_script = Path(sys.argv[0]).resolve().parent / folder
    if by_script.is_dir() and not Path(folder).is_dir():
        return str(by_script)
    return str(find_config_folder(folder))
