"""The output of a command: plain data as JSON, tables, and files that an option names."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import RunConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType


def print_answer(args: argparse.Namespace, content: object, table: RenderableType) -> None:
    """Print an answer as JSON or as a table."""
    if args.json:
        print_json(content)
    else:
        print_report(table)


def print_report(content: RenderableType) -> None:
    """Print a table or another renderable of a report."""
    from bridge.report import table  # rich is heavy

    table.print_renderable(content)


def print_json(content: object) -> None:
    """Print plain data as JSON."""
    print(json.dumps(content, indent=2))


def format_value(value: object) -> str:
    """Return the value of a setting as text, a string without quotes."""
    if isinstance(value, str):
        return value
    return repr(value)


def write_file(path: Path | str, text: str, option: str) -> None:
    """Write a file that an option names.

    Raises:
        RunConfigError: The file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise make_unwritable_error(path, option, error) from None


def resolve_links(path: Path | str) -> Path:
    """Return the absolute path without symbolic links. A loop of links stays as it is."""
    return Path(os.path.realpath(path))


def refuse_input_files(path: Path | str, option: str, inputs: Iterable[Path | str]) -> None:
    """Refuse to write a file that is also read, or that a run wrote into its folder.

    Args:
        path: The file to be written.
        option: The option that names this file.
        inputs: The files and the folders of runs that are read.

    Raises:
        RunConfigError: The file would be overwritten.
    """
    from bridge.runtime.audit.run_folder import RUN_FILES

    output = resolve_links(path)
    for input_path in inputs:
        resolved = resolve_links(input_path)
        is_of_run = output.parent == resolved and output.name in RUN_FILES
        if output == resolved or is_of_run:
            rule = "must not be a file that is read, as it would be overwritten"
            raise RunConfigError.of(option, rule, str(path), "Give another file.")


def make_unwritable_error(path: Path | str, option: str, error: OSError) -> RunConfigError:
    """Return the error for a file that an option names and that cannot be written."""
    reason = (error.strerror or "an error").lower()
    return RunConfigError(
        f"{option}: cannot be written ({reason}), got {str(path)!r}. Give another file."
    )
