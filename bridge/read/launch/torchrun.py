"""`count_torchrun_ranks`: the number of processes that `torchrun` starts, by its arguments."""

from collections.abc import Sequence
from pathlib import PurePosixPath

from bridge.read.launch.shell_word import ShellWord

PROGRAMS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
"""The launcher's command, and the modules that `python -m` starts instead."""
RANKS_OPTION = "nproc_per_node"
NODES_OPTION = "nnodes"


def count_torchrun_ranks(runner: Sequence[ShellWord]) -> int | None:
    """Return the number of training processes of a launch.

    Args:
        runner: The words before the training program.

    Returns:
        The processes of a node times the nodes. None if the launcher is another one, or if a number
        is decided when the run starts.
    """
    if not any(PurePosixPath(word).name in PROGRAMS for word in runner):
        return None
    ranks = _find_number(runner, RANKS_OPTION)
    nodes = _find_number(runner, NODES_OPTION)
    if ranks is None or nodes is None:
        return None
    return ranks * nodes


def _find_number(runner: Sequence[ShellWord], option: str) -> int | None:
    """Return the number of an option: 1 without the option, None if its value is no number."""
    for index, word in enumerate(runner):
        name, equals, value = str(word).partition("=")
        if name.lstrip("-").replace("-", "_") != option or not name.startswith("-"):
            continue
        if not equals:
            value = ""
            if index + 1 < len(runner):
                value = str(runner[index + 1])
        if not value.isdecimal() or int(value) == 0:
            return None
        return int(value)
    return 1
