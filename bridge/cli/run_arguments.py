"""The arguments with which a command line describes a run, and the run that they describe.

Hydra is imported when a run is read, not before: commands about recipes do without it.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bridge.errors import RunConfigError, UnreadFileError

if TYPE_CHECKING:
    from bridge.preflight.file_reading import RunChoice
    from bridge.preflight.run import Run

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
"""Ends of a word that is a file's name, also where no such file is there."""


@dataclass(frozen=True, kw_only=True)
class RunArguments:
    """The words of a command line about a run that are no options."""

    files: tuple[str, ...]
    """Files and folders, that of ``--config`` first."""
    overrides: tuple[str, ...]

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> RunArguments:
        """Return the words of a parsed command line."""
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
    """Return whether a word is a file or a folder.

    It is by its end, by a slash, or because it is there and names no recipe.
    """
    key, is_override, _ = word.partition("=")
    if word.startswith(("~", "+")):
        return False
    if is_override:
        # The folder of a sweep's run has a `=` in its name; Path.exists raises for long names.
        return "/" in key and os.path.exists(word)  # noqa: PTH110
    if "/" in word or word.endswith(FILE_SUFFIXES):
        return True
    if not os.path.exists(word):  # noqa: PTH110  as above
        return False
    from bridge.registry.registry import REGISTRY

    return word not in REGISTRY


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which run is meant."""
    text = (
        "a run's file or folder, ours, Megatron Bridge's or Megatron-LM's; or an override as for "
        "scripts/train.py, mixed_precision=NAME or model.num_layers=8 for example; "
        "a bare NAME is the recipe"
    )
    parser.add_argument("overrides", nargs="*", metavar="FILE|OVERRIDE", help=text)
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
    text = "the run that is meant, by its number, where the file is a script that starts several"
    parser.add_argument("--launch", type=int, dest="number", metavar="N", help=text)
    text = (
        "what the file leaves open: variables='NAME=value NAME=value' of a launch script's "
        "environment; checkpoint=FOLDER with the config.json that its model is made of"
    )
    parser.add_argument("--context", action="append", default=[], metavar="KEY=VALUE", help=text)
    parser.add_argument(
        "--ask-megatron-bridge",
        action="store_true",
        help="run the recipe of a Python file or of run_recipe.py with the installed Megatron Bridge",
    )
    parser.add_argument(
        "--trust", action="store_true", help="run the Python that recipes_from names in a config"
    )
    text = "where it runs: h100x8,te2.8,cuda12.9,mcore0.16, or auto for this machine"
    parser.add_argument("--target", metavar="TARGET", help=text)


def add_debug_features_option(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the features of a debugger, in commands that follow them."""
    text = "what the run computes with this features file of Transformer Engine's debugger"
    parser.add_argument("--debug-features", metavar="FILE", help=text)


def get_file_argument(args: argparse.Namespace) -> str | None:
    """Return the file or folder that the command line names.

    None: the config tree describes the run.

    Raises:
        RunConfigError: It names several.
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
    number: int | None = None,
) -> Run:
    """Return the run that the arguments describe.

    A word without ``=`` or ``~`` that is no key is a recipe's name. Of a file with several runs it
    is the run `number`, or else the one that the arguments choose.
    """
    return read_file_run(args, get_file_argument(args), recipe=recipe, strict=strict, number=number)


def read_without_overrides(args: argparse.Namespace, file: str, *, strict: bool = True) -> Run:
    """Return the run of a file as it stands: no word of the command line is written over it."""
    from bridge.front.loader import load_run

    return load_run((), config_file=file, trust=args.trust, strict=strict)


def read_file_run(
    args: argparse.Namespace,
    file: str | None,
    *,
    recipe: str | None = None,
    strict: bool = True,
    number: int | None = None,
) -> Run:
    """Return the run of one file, or of the config tree, with overrides written over it."""
    from bridge.front.loader import load_run

    run = load_run(
        _collect_overrides(args, recipe),
        args.config_path,
        file,
        config_name=args.config_name,
        config_dir=args.config_dir,
        strict=strict,
        trust=args.trust,
        choice=_parse_run_choice(args, file, number),
    )
    features = getattr(args, "debug_features", None)
    if features is None:
        return run
    from bridge.read.debug_features import replace_debug_features

    return replace_debug_features(run, features)


def read_branches(args: argparse.Namespace, *, strict: bool = True) -> list[Run]:
    """Return the run that the arguments describe, and the launch on its script's other branches.

    The command line may choose one of them with ``--launch``, or state the mode, which is one for
    all. A branch that is no run of Megatron Core is left out.

    Raises:
        RunConfigError: A strict reading of a run that cannot be planned, or of a script none of
            whose branches states a mode.
    """
    first = read_run(args, strict=False)
    numbers: tuple[int, ...] = ()
    if args.number is None:
        numbers = first.reading.branches
    runs = [first]
    answered = [first.reading.number]
    refused = []
    for number in numbers:
        try:
            runs.append(read_run(args, strict=False, number=number))
        except UnreadFileError:  # the branch trains without Megatron Core; --launch says so
            refused.append(number)
            continue
        answered.append(number)
    if strict:
        from bridge.front.loader import require_plannable

        stated = [run for run in runs if run.reading.mode_decided_by is None]
        for run in stated or runs[:1]:
            require_plannable(run)
    known = [number for number in first.reading.branches if number not in refused]
    branches = []
    for run in runs:
        reading = replace(run.reading, answered_numbers=tuple(answered))
        if run is first:
            reading = replace(reading, branches=tuple(known))
        branches.append(replace(run, reading=reading))
    return branches


def _collect_overrides(args: argparse.Namespace, recipe: str | None) -> list[str]:
    """Return the overrides of a command line in Hydra's words, with another recipe if named."""
    from bridge.read.run_keys import RUN_CONFIG_KEYS

    words = []
    for word in RunArguments.from_args(args).overrides:
        is_override = (
            "=" in word or word.startswith("~") or word.partition(".")[0] in RUN_CONFIG_KEYS
        )
        override = word
        if not is_override:
            override = f"mixed_precision={word}"
        is_replaced = recipe is not None and override.lstrip("+~").startswith("mixed_precision")
        if not is_replaced:
            words.append(_quote_target(override))
    if recipe is not None:
        words.append(_quote_target(f"mixed_precision={recipe}"))
    if args.target is not None:
        words.append(_quote_target(f"target={args.target}"))
    return words


def _quote_target(word: str) -> str:
    """Return ``target=h100x8,te2.8`` with quotes: Hydra takes a comma for a sweep."""
    key, _, value = word.partition("=")
    if key == "target" and "," in value and value[0] not in "['\"":
        return f"{key}='{value}'"
    return word


def _parse_run_choice(
    args: argparse.Namespace, file: str | None, number: int | None
) -> RunChoice | None:
    """Return the run that is meant and the variables of its script.

    None where the command line says neither.
    """
    if number is None:
        number = args.number
    if number is None and not args.context and not args.ask_megatron_bridge:
        return None
    from bridge.preflight.file_reading import RunChoice
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
