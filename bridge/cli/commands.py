"""The commands of `precision-bridge` in the order of a user's work, and names from before 0.2."""

from __future__ import annotations

import importlib
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of `precision-bridge`."""

    name: str
    text: str
    """Its answer or its work, as an imperative clause."""
    module: str
    """The module of the command in this package.

    It has `add_arguments` and `run`. A module of a Hydra command has `run_hydra_arguments`.
    """
    is_hydra_command: bool = False
    """Whether Hydra parses the arguments."""
    unless: tuple[str, ...] = ()
    """Options with which this package, and not Hydra, parses the arguments of a Hydra command."""

    def load(self) -> ModuleType:
        """Return the module of the command."""
        return importlib.import_module(f"bridge.cli.{self.module}")

    def is_parsed_by_hydra(self, words: Sequence[str]) -> bool:
        """Return whether Hydra parses the arguments of a command line."""
        return self.is_hydra_command and not any(option in words for option in self.unless)


COMMAND_GROUPS: dict[str, tuple[Command, ...]] = {
    "choose a precision": (
        Command(
            name="recipes",
            text="list the recipes; show one, how two differ, or which recipe runs on which GPU",
            module="recipes.command",
        ),
        Command(
            name="explain",
            text="explain a field (its meaning, where Megatron keeps it, when it acts) or a rule",
            module="explain.command",
        ),
        Command(
            name="quantisation-error",
            text="measure what FP8 or FP4 does to a model's operands, per layer",
            module="quantisation_error",
        ),
    ),
    "before a run": (
        Command(
            name="check",
            text="report what is known to go wrong with a run, or with many",
            module="check",
        ),
        Command(
            name="plan",
            text=(
                "show in which format each layer computes; "
                "or the dimensions of its GEMMs, or its modules"
            ),
            module="plan.command",
        ),
        Command(
            name="memory",
            text="show what weights, gradients, states and activations take, and whether it fits",
            module="memory",
        ),
        Command(
            name="rehearse",
            text="train a shrunk copy of a run here, save, resume, and compare it with the plan",
            module="rehearse",
        ),
    ),
    "train": (
        Command(
            name="train",
            text="train in the precision of a recipe, as scripts/train.py does",
            module="train",
            is_hydra_command=True,
        ),
        Command(
            name="compare",
            text=(
                "train with several recipes and judge each loss; "
                "or compare runs, or one batch; or write a twin"
            ),
            module="compare.command",
            is_hydra_command=True,
            unless=("--gradients", "--twin", "--runs"),
        ),
    ),
    "during and after a run": (
        Command(
            name="report",
            text="write a report of finished or unfinished runs, or watch a run in progress",
            module="report.command",
        ),
        Command(
            name="audit",
            text="show what each matmul of a run ran in, or where two runs differ",
            module="audit",
        ),
        Command(
            name="checkpoint",
            text="read the files of a checkpoint: contents, differences, damage",
            module="checkpoint",
        ),
    ),
    "other systems": (
        Command(
            name="convert",
            text="read a precision from another system's file, write it for a third",
            module="convert.command",
        ),
        Command(
            name="manifest",
            text=(
                "write the quantisation config of a system that serves the model, "
                "or compare with one"
            ),
            module="manifest.command",
        ),
    ),
}
"""The moment of a user's work -> its commands."""
COMMANDS = {command.name: command for command in itertools.chain(*COMMAND_GROUPS.values())}
RENAMED_COMMANDS = {
    "show": "recipes",
    "diff": "recipes",
    "support-matrix": "recipes --support",
    "align": "plan --align",
    "modules": "plan --modules",
    "sources": "check --brief",
    "gradients": "compare --gradients",
    "twin": "compare --twin",
    "watch": "report --watch",
}
"""The name of a command before 0.2 -> the command and options that replace it."""


def describe_renamed_command(name: str, words: Sequence[str]) -> str:
    """Return how to write a command line that begins with a name from before 0.2."""
    now = RENAMED_COMMANDS[name]
    command_line = shlex.join([*now.split(), *words])
    return f"`{name}` is `{now}` since 0.2. Run: precision-bridge {command_line}"


def format_command_list() -> str:
    """Return the list of commands, a paragraph for each moment."""
    lines = []
    width = max(map(len, COMMANDS))
    for moment, commands in COMMAND_GROUPS.items():
        lines.append(f"{moment}:")
        for command in commands:
            lines.append(f"  {command.name:<{width}}  {command.text}")
        lines.append("")
    return "\n".join(lines)
