"""What a command prints: plain data as JSON, tables, and files that an option names."""

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
    """Print what a report renders."""
    from bridge.report import table  # rich is heavy

    table.print_renderable(content)


def print_json(content: object) -> None:
    """Print plain data as JSON."""
    print(json.dumps(content, indent=2))


def format_value(value: object) -> str:
    """Return a setting's value as text: a string as it is."""
    if isinstance(value, str):
        return value
    return repr(value)


def write_file(path: Path | str, text: str, option: str) -> None:
    """Write a file that an option names; RunConfigError where it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise make_unwritable_error(path, option, error) from None


def resolve_links(path: Path | str) -> Path:
    """Return the absolute path behind links; a loop of links stays as it is, and raises nothing."""
    return Path(os.path.realpath(path))


def refuse_input_files(path: Path | str, option: str, inputs: Iterable[Path | str]) -> None:
    """Raise RunConfigError where a file to be written is one of the files that are read.

    A file of a run's folder that the run wrote is one too.
    """
    from bridge.runtime.audit.run_folder import RUN_FILES

    place = resolve_links(path)
    for each in inputs:
        read = resolve_links(each)
        is_of_run = place.parent == read and place.name in RUN_FILES
        if place == read or is_of_run:
            rule = "must not be a file that is read, as it would be overwritten"
            raise RunConfigError.of(option, rule, str(path), "Give another file.")


def make_unwritable_error(path: Path | str, option: str, error: OSError) -> RunConfigError:
    """Return the error for a file that an option names and that cannot be written."""
    why = (error.strerror or "an error").lower()
    return RunConfigError(
        f"{option}: cannot be written ({why}), got {str(path)!r}. Give another file."
    )
