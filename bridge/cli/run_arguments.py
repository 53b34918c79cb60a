"""The arguments with which a command line describes a run, and the run that they describe.

Hydra is imported only when a run is read with overrides. Commands about recipes do not need Hydra.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bridge.errors import BridgeError, RunConfigError, UnreadFileError

if TYPE_CHECKING:
    from bridge.preflight.run import Run
    from bridge.preflight.run_choice import RunChoice

FILE_SUFFIXES = (
    ".yaml",
    ".yml",
    ".json",
    ".sh",
    ".bash",
    ".slurm",
    ".sbatch",
    ".sub",
    ".slrm",
    ".pt",
    ".txt",
    ".log",
)
"""Suffixes of an argument that is the name of a file, even if no such file exists."""


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """The arguments of a command line about a run that are not options."""

    files: tuple[str, ...]
    """Files and folders. The file of ``--config`` is first."""
    overrides: tuple[str, ...]
    """Overrides and recipe names, in their order."""

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> RunArguments:
        """Return the arguments of a parsed command line."""
        files: list[str] = []
        if args.config is not None:
            files.append(args.config)
        overrides = []
        for word in args.overrides:
            if _is_path(word):
                files.append(word)
            else:
                overrides.append(word)
        return cls(files=tuple(files), overrides=tuple(overrides))


def _is_path(word: str) -> bool:
    """Return whether an argument is a file or a folder, and not an override.

    It is a path if it has the suffix of a file, has a slash, or exists and is not a recipe's name.
    """
    key, sign, _ = word.partition("=")
    if word.startswith(("~", "+")):
        return False
    if sign:  # an override
        # The folder of a run of a sweep has a `=` in its name. Path.exists raises for long names.
        return "/" in key and os.path.exists(word)  # noqa: PTH110
    if "/" in word or word.endswith(FILE_SUFFIXES):
        return True
    if not os.path.exists(word):  # noqa: PTH110  as above
        return False
    from bridge.registry.registry import REGISTRY

    return word not in REGISTRY


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe a run."""
    help_text = (
        "a run's file or folder, ours, Megatron Bridge's or Megatron-LM's; or an override as for "
        "scripts/train.py, mixed_precision=NAME or model.num_layers=8 for example; "
        "a bare NAME is the recipe"
    )
    parser.add_argument("overrides", nargs="*", metavar="FILE|OVERRIDE", help=help_text)
    parser.add_argument(
        "--config-path", metavar="FOLDER", help="folder of the config tree (default: conf)"
    )
    parser.add_argument(
        "--config-name", default="config", metavar="NAME", help="the primary config in it"
    )
    parser.add_argument(
        "--config-dir", metavar="FOLDER", help="another folder, of a team's own groups and recipes"
    )
    parser.add_argument("--config", metavar="FILE", help="a run's file or folder")
    help_text = "the number of the run, if the file is a script that starts several"
    parser.add_argument("--launch", type=int, dest="number", metavar="N", help=help_text)
    help_text = (
        "what the file leaves open: variables='NAME=value NAME=value' of a launch script's "
        "environment; checkpoint=FOLDER with the config.json that its model is made of"
    )
    parser.add_argument(
        "--context", action="append", default=[], metavar="KEY=VALUE", help=help_text
    )
    parser.add_argument(
        "--ask-megatron-bridge",
        action="store_true",
        help="run the recipe of a Python file or of run_recipe.py with the installed Megatron Bridge",
    )
    parser.add_argument(
        "--trust", action="store_true", help="run the Python that recipes_from names in a config"
    )
    help_text = "where it runs: h100x8,te2.8,cuda12.9,mcore0.16, or auto for this machine"
    parser.add_argument("--target", metavar="TARGET", help=help_text)


def add_debug_features_option(parser: argparse.ArgumentParser) -> None:
    """Add the argument for a debugger's features, to commands that take them into account."""
    help_text = "what the run computes with this features file of Transformer Engine's debugger"
    parser.add_argument("--debug-features", metavar="FILE", help=help_text)


def get_file_argument(args: argparse.Namespace) -> str | None:
    """Return the file or folder that the command line names.

    None if it names no file. Then the config tree describes the run.

    Raises:
        RunConfigError: The command line names several files.
    """
    files = RunArguments.from_args(args).files
    if len(files) > 1:
        rule = "this command, or one of its options, is about one run"
        raise RunConfigError(f"{files[0]}: {rule}, got {files[1]!r} too. Give one file.")
    if not files:
        return None
    return files[0]


def read_run(
    args: argparse.Namespace,
    *,
    recipe: str | None = None,
    strict: bool = True,
    choice: RunChoice | None = None,
) -> Run:
    """Return the run that the arguments describe.

    Args:
        args: The parsed command line.
        recipe: A recipe that replaces the recipe of the run. None: the recipe of the run.
        strict: Whether to refuse a run that cannot be planned.
        choice: The run of a file with several. None: the choice of the command line.
    """
    return read_file_run(args, get_file_argument(args), recipe=recipe, strict=strict, choice=choice)


def read_without_overrides(args: argparse.Namespace, file: str, *, strict: bool = True) -> Run:
    """Return the run of a file without the overrides of the command line."""
    from bridge.front.loader import load_run

    return load_run((), config_file=file, trust=args.trust, strict=strict)


def read_file_run(
    args: argparse.Namespace,
    file: str | None,
    *,
    recipe: str | None = None,
    strict: bool = True,
    choice: RunChoice | None = None,
) -> Run:
    """Return the run of one file, or of the config tree, with overrides written over it.

    Args:
        args: The parsed command line.
        file: The file. None: the config tree.
        recipe: A recipe that replaces the recipe of the run. None: the recipe of the run.
        strict: Whether to refuse a run that cannot be planned.
        choice: The run of a file with several. None: the choice of the command line.
    """
    from bridge.front.loader import load_run

    run = load_run(
        _collect_overrides(args, recipe),
        args.config_path,
        file,
        config_name=args.config_name,
        config_dir=args.config_dir,
        strict=strict,
        trust=args.trust,
        choice=choice or make_run_choice(args, file),
    )
    features = getattr(args, "debug_features", None)
    if features is None:
        return run
    from bridge.read.debug_features import replace_debug_features

    return replace_debug_features(run, features)


def read_branches(args: argparse.Namespace, *, strict: bool = True) -> list[Run]:
    """Return the run that the arguments describe, and the same launch on other branches.

    A script may start one launch on several branches of its conditions. Other branches are left
    out if the command line chooses a run with ``--launch``, or states the mode, which is then the
    same on every branch. A branch that does not run Megatron Core is left out too.

    Args:
        args: The parsed command line.
        strict: Whether to refuse a run that cannot be planned. If a branch states the mode,
            branches without a stated mode are not refused.

    Raises:
        RunConfigError: `strict` refuses a run.
    """
    choice = make_run_choice(args, get_file_argument(args))
    first = read_run(args, strict=False, choice=choice)
    runs = [first]
    refused_numbers = []
    if args.number is None:
        for number in first.reading.launches.branches:
            try:
                branch = replace(choice, number=number)
                runs.append(read_run(args, strict=False, choice=branch))
            except UnreadFileError:  # --launch NUMBER shows the reason
                refused_numbers.append(number)
    if strict:
        _require_plannable_branches(runs)
    return _mark_answered(runs, refused_numbers)


def _require_plannable_branches(runs: Sequence[Run]) -> None:
    """Refuse the branches that state the mode, or else the first, if they cannot be planned.

    The error has a note about the other runs of the file, since the user may mean one of them.
    """
    from bridge.front.loader import require_plannable

    with_mode = [run for run in runs if run.reading.uncertainty.mode_decider is None]
    for run in with_mode or runs[:1]:
        try:
            require_plannable(run)
        except BridgeError as error:
            for sentence in run.reading.launches.sentences:
                error.add_note(sentence)
            raise


def _mark_answered(runs: Sequence[Run], refused_numbers: Sequence[int]) -> list[Run]:
    """Return the runs, each with the numbers of all answered runs. Notes then do not name these.

    Args:
        runs: The run of the arguments, and the same launch on other branches.
        refused_numbers: Numbers of the branches that were not read. Remedies do not name them.
    """
    answered_numbers = tuple(run.reading.launches.number for run in runs)
    marked = []
    for index, run in enumerate(runs):
        launches = replace(run.reading.launches, answered_numbers=answered_numbers)
        if index == 0:
            branches = [number for number in launches.branches if number not in refused_numbers]
            launches = replace(launches, branches=tuple(branches))
        marked.append(replace(run, reading=replace(run.reading, launches=launches)))
    return marked


def _collect_overrides(args: argparse.Namespace, recipe: str | None) -> list[str]:
    """Return the overrides of a command line in Hydra's spelling.

    An argument without ``=`` or ``~`` that is not a key is the name of a recipe.

    Args:
        args: The parsed command line.
        recipe: A recipe that replaces the one of the command line. Overrides of single fields
            (``mixed_precision.fp8_param=true``) stay: they are written over this recipe.
    """
    from bridge.read.run_keys import PRECISION_KEY, RUN_CONFIG_KEYS

    overrides = []
    for argument in RunArguments.from_args(args).overrides:
        is_override = (
            "=" in argument
            or argument.startswith("~")
            or argument.partition(".")[0] in RUN_CONFIG_KEYS
        )
        override = argument
        if not is_override:
            override = f"{PRECISION_KEY}={argument}"
        key = override.lstrip("+~").partition("=")[0]
        is_replaced = recipe is not None and key == PRECISION_KEY
        if not is_replaced:
            overrides.append(_quote_target(override))
    if recipe is not None:
        overrides.append(f"{PRECISION_KEY}={recipe}")
    if args.target is not None:
        overrides.append(_quote_target(f"target={args.target}"))
    return overrides


def _quote_target(override: str) -> str:
    """Return ``target=h100x8,te2.8`` with quotes, since Hydra reads a comma as a sweep."""
    key, _, value = override.partition("=")
    if key == "target" and "," in value and value[0] not in "['\"":
        return f"{key}='{value}'"
    return override


def make_run_choice(
    args: argparse.Namespace, file: str | None, number: int | None = None
) -> RunChoice:
    """Return the run of the file that the command line chooses, and its script's variables.

    Args:
        args: The parsed command line.
        file: The file. None: the config tree.
        number: The number of the run in its file. None: the number of the command line.

    Raises:
        RunConfigError: There is no file to choose from, or ``--context`` cannot be read.
    """
    from bridge.preflight.run_choice import RunChoice

    if number is None:
        number = args.number
    if number is None and not args.context and not args.ask_megatron_bridge:
        return RunChoice()
    from bridge.read.megatron_lm.importer import parse_variables  # few command lines have any

    if file is None:
        option, value = "--context", " ".join(args.context)
        if args.ask_megatron_bridge:
            option, value = "--ask-megatron-bridge", "True"
        if number is not None:
            option, value = "--launch", str(number)
        raise RunConfigError(f"{option}: is about a file, got {value!r}. Give the file, too.")
    variables: list[str] = []
    checkpoint = None
    for word in args.context:
        key, _, value = word.partition("=")
        if key == "variables":
            variables.append(value)
        elif key == "checkpoint":
            checkpoint = value
        else:
            rule = "must be variables='NAME=value' or checkpoint=FOLDER"
            raise RunConfigError.of("--context", rule, word, "Write one of them.")
    return RunChoice(
        number=number,
        variables=parse_variables(" ".join(variables)),
        checkpoint=checkpoint,
        asks_megatron_bridge=args.ask_megatron_bridge,
    )
