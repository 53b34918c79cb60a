"""Answers about several files and folders: a line for each run, and for the files without a run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from bridge.cli.output import print_json
from bridge.cli.run_arguments import RunArguments, make_run_choice, read_file_run
from bridge.errors import BridgeError, RunConfigError
from bridge.precision.grouping import group_pairs

if TYPE_CHECKING:
    from bridge.front.file_runs import FileRun, UnreadFile
    from bridge.preflight.check_context import CheckContext
    from bridge.preflight.run import Run

MAX_NAMED_FILES = 4
"""The most files that the line about a reason names. Further files are only counted."""


@dataclass(frozen=True, kw_only=True)
class RunAnswer:
    """The answer of a command about one of several runs."""

    text: str
    """The answer as a short text."""
    content: Mapping[str, Any] = field(default_factory=dict)
    """The answer as plain data."""
    code: int = 0
    """The exit code that the run alone would have."""


def add_brief_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that prints a line for each run, also for one file."""
    help_text = (
        "a line for each run, also of one file; "
        "files that describe no run are named and do not count"
    )
    parser.add_argument("--brief", action="store_true", help=help_text)


def get_many_paths(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the files and folders of a command line about several runs; empty if it is about one.

    The folder that a training run wrote counts as a single run, since it has the file of its run.

    Raises:
        RunConfigError: The command line also chooses a run of one script, or ``--brief`` has no
            file.
    """
    files = RunArguments.from_args(args).files
    if args.brief and not files:
        raise RunConfigError("--brief: is about files, got none. Give files or folders.")
    is_about_many = args.brief or len(files) > 1
    if not is_about_many and files:
        is_about_many = _is_folder_of_runs(files[0])
    if not is_about_many:
        return ()
    remedy = "Give one file, without --brief."
    if args.number is not None:
        raise RunConfigError.of("--launch", "is about one script", args.number, remedy)
    context = " ".join(args.context)
    if context:
        raise RunConfigError.of("--context", "is about one script", context, remedy)
    return files


def _is_folder_of_runs(argument: str) -> bool:
    """Return whether an argument is a folder of several runs, and not the folder of one run."""
    from bridge.front.folders import find_path
    from bridge.read.run_file import locate_run_file

    path = find_path(argument)
    if not os.path.isdir(path):  # noqa: PTH112  Path.is_dir raises for a name that is too long
        return False
    return locate_run_file(path) == path


def answer_many_runs(
    args: argparse.Namespace, paths: Sequence[str], answer_of: Callable[[Run], RunAnswer]
) -> int:
    """Print a line for each run of some files and folders, or one JSON document about all.

    Args:
        args: The parsed command line.
        paths: The files and folders.
        answer_of: Returns the answer about a run.

    Returns:
        The largest exit code of a run. It is 2 for a run that cannot be used. A file that does not
        describe a run does not count.
    """
    from bridge.front.file_runs import UnreadFile, expand_paths, read_file_runs

    rows: list[dict[str, Any]] = []
    codes: list[int] = []
    unread: list[UnreadFile] = []
    read = partial(_read_run, args)
    for file_run in read_file_runs(expand_paths(paths), read):
        if isinstance(file_run, UnreadFile):
            unread.append(file_run)
            continue
        answer = _answer_file_run(file_run, answer_of)
        codes.append(answer.code)
        rows.append(_file_run_to_dict(file_run, answer))
        if not args.json:
            print(f"{file_run.name}: {answer.text}")
    exit_code = max(codes, default=0)
    if args.json:
        not_read = list(map(asdict, unread))
        print_json({"runs": rows, "not_read": not_read, "exit_code": exit_code})
        return exit_code
    for line in _format_unread(unread):
        print(line)
    file_count = len({row["file"] for row in rows})
    print(_format_totals(file_count, codes))
    return exit_code


def _format_totals(file_count: int, codes: Sequence[int]) -> str:
    """Return the number of runs and files, and of the runs with an error.

    Args:
        file_count: The number of files with a run.
        codes: The exit code of each run.
    """
    totals = f"{_format_count(len(codes), 'run')} in {_format_count(file_count, 'file')}"
    refused = codes.count(BridgeError.exit_code)
    if refused:
        totals = f"{totals}, {refused} of them with an error or refused"
    return totals


def _read_run(args: argparse.Namespace, file: str, number: int | None) -> Run:
    """Return a run of a file, with the overrides of the command line."""
    choice = make_run_choice(args, file, number)
    return read_file_run(args, file, strict=False, choice=choice)


def _answer_file_run(file_run: FileRun, answer_of: Callable[[Run], RunAnswer]) -> RunAnswer:
    """Return the answer about a run, or the reason for which it cannot be used."""
    refusal = file_run.refusal
    if file_run.run is not None:
        try:
            return answer_of(file_run.run)
        except BridgeError as error:
            refusal = str(error)
    sentence = " ".join(refusal.split())
    refusal_text = sentence.removeprefix(f"{file_run.file}: ")
    return RunAnswer(text=refusal_text, content={"refused": sentence}, code=BridgeError.exit_code)


def _file_run_to_dict(file_run: FileRun, answer: RunAnswer) -> dict[str, Any]:
    """Return the answer about a run as plain data, with its file and its number in it."""
    launch = None
    if file_run.labels:
        launch = {"number": file_run.number, "of": list(file_run.labels)}
    return {"file": file_run.file, "launch": launch, **answer.content, "exit_code": answer.code}


def format_precision(context: CheckContext) -> str:
    """Return the mode and the scaling scheme of a run: "bf16 with delayed scaling"."""
    if context.mode_decider is not None:
        return context.label
    if not context.scheme:
        return str(context.mode)
    return f"{context.mode} with {context.scheme} scaling"


def precision_to_dict(context: CheckContext) -> dict[str, Any]:
    """Return the mode and the scaling scheme of a run as plain data.

    Both are null if nothing states the mode.
    """
    mode, scheme = None, None
    if context.mode_decider is None:
        mode, scheme = context.mode, context.scheme
    return {
        "precision": context.label,
        "mode": mode,
        "scheme": scheme,
        "mode_decided_by": context.mode_decider,
    }


def _format_unread(unread: Sequence[UnreadFile]) -> list[str]:
    """Return a line for each reason for which files were not read."""
    lines = []
    for reason, files in group_pairs((file.kind, file.file) for file in unread).items():
        names = ", ".join(files[:MAX_NAMED_FILES])
        if len(files) > MAX_NAMED_FILES:
            names = f"{names} and {len(files) - MAX_NAMED_FILES} more"
        lines.append(f"not read, {reason}: {_format_count(len(files), 'file')} ({names})")
    return lines


def _format_count(count: int, noun: str) -> str:
    """Return "1 run" or "2 runs"."""
    if count == 1:
        return f"{count} {noun}"
    return f"{count} {noun}s"
