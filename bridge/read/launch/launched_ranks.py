"""`count_launched_ranks`: the number of processes that a launcher starts, by its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from bridge.read.launch.shell_word import ShellWord


@dataclass(frozen=True, kw_only=True, slots=True)
class Launcher:
    """A launcher of training processes."""

    programs: tuple[str, ...]
    """Its command, and the modules that `python -m` starts instead."""
    ranks_option: str
    """The option with the number of processes of a node."""
    nodes_option: str
    """The option with the number of nodes; without it there is 1."""
    default_ranks: int | None = None
    """The processes of a node without the option. None: the machine decides."""
    host_options: tuple[str, ...] = ()
    """Options that name the nodes; with them the number of nodes has to be stated."""


LAUNCHERS = (
    Launcher(
        programs=("torchrun", "torch.distributed.run", "torch.distributed.launch"),
        ranks_option="nproc_per_node",
        nodes_option="nnodes",
        default_ranks=1,
    ),
    Launcher(
        programs=("deepspeed",),
        ranks_option="num_gpus",
        nodes_option="num_nodes",
        host_options=("hostfile", "H", "include", "i", "exclude", "e"),
    ),
)
"""Source: PyTorch torch/distributed/run.py; DeepSpeed 0.17 deepspeed/launcher/runner.py."""


def count_launched_ranks(runner: Sequence[ShellWord]) -> int | None:
    """Return the number of training processes of a launch.

    Args:
        runner: The words before the training program.

    Returns:
        The processes of a node times the nodes. None if the launcher is another one, or if a number
        is decided when the run starts.
    """
    names = {PurePosixPath(word).name for word in runner}
    for launcher in LAUNCHERS:
        if names.isdisjoint(launcher.programs):
            continue
        default_nodes: int | None = 1
        for option in launcher.host_options:
            if _find_value(runner, option) is not None:
                default_nodes = None
        ranks = _find_number(runner, launcher.ranks_option, launcher.default_ranks)
        nodes = _find_number(runner, launcher.nodes_option, default_nodes)
        if ranks is not None and nodes is not None:
            return ranks * nodes
    return None


def _find_number(runner: Sequence[ShellWord], option: str, default: int | None) -> int | None:
    """Return the number of an option: the default without the option, None if its value is no number."""
    value = _find_value(runner, option)
    if value is None:
        return default
    if not value.isdecimal() or int(value) == 0:
        return None
    return int(value)


def _find_value(runner: Sequence[ShellWord], option: str) -> str | None:
    """Return the text of an option's value; None without the option."""
    for index, word in enumerate(runner):
        name, equals, value = str(word).partition("=")
        if name.lstrip("-").replace("-", "_") != option or not name.startswith("-"):
            continue
        if equals:
            return value
        if index + 1 < len(runner):
            return str(runner[index + 1])
        return ""
    return None
