"""Functions by which ranks agree: equal settings on all ranks, and results that ranks share.

`require_agreement` compares the settings of all ranks. Each rank sends a digest of 32 bytes. If
digests differ, rank 0 and the first rank that differs from it send their settings, and every rank
raises the same error, before any group of Megatron exists.

`compute_on_first_rank` and `compute_on_all_ranks` share results, and errors of some classes.
"""

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from bridge.errors import CheckpointError, RunConfigError, TrainingError

T = TypeVar("T")

MAX_SHOWN_SETTINGS = 20
"""The largest number of settings that the message lists. The others are counted."""
SHARED_ERRORS = (CheckpointError, TrainingError, OSError)
"""Errors that every rank raises if a rank raises them."""


def require_agreement(fingerprint: Mapping[str, str]) -> None:
    """Compare the settings of all ranks in a collective call.

    Args:
        fingerprint: Path -> value of this rank's settings.

    Raises:
        RunConfigError: Two ranks have different settings. Every rank raises the error.
    """
    digest = hashlib.sha256(json.dumps(sorted(fingerprint.items())).encode()).digest()
    rank = torch.distributed.get_rank()
    digests = compute_on_all_ranks(lambda: digest)
    differing = [number for number, other in enumerate(digests) if other != digests[0]]
    if not differing:
        return
    other_rank = differing[0]

    def get_shown_settings() -> tuple[str, dict[str, str]] | None:
        if rank not in (0, other_rank):
            return None
        return socket.gethostname(), dict(fingerprint)

    settings_of_ranks = compute_on_all_ranks(get_shown_settings)
    first, other = (settings for settings in settings_of_ranks if settings is not None)
    lines = _describe_differences(first, other, other_rank)
    if len(differing) > 1:
        lines.append(
            f"  {len(differing)} of {len(digests)} ranks differ from rank 0; "
            f"rank {other_rank} is the first of them."
        )
    rule = f"must be the same on every rank, and rank {other_rank} differs from rank 0"
    remedy = "Start every rank with the same command, environment and packages."
    raise RunConfigError(
        "\n".join([f"The settings of a run {rule}. {remedy}", *lines]), rule=rule, remedy=remedy
    )


def _describe_differences(
    first: tuple[str, dict[str, str]], other: tuple[str, dict[str, str]], other_rank: int
) -> list[str]:
    """Return lines on the settings in which rank 0 and another rank differ.

    Args:
        first: Host and settings of rank 0.
        other: Host and settings of the other rank.
        other_rank: Number of the other rank.
    """
    first_host, first_settings = first
    other_host, other_settings = other
    paths = []
    for path in sorted({*first_settings, *other_settings}):
        if first_settings.get(path) != other_settings.get(path):
            paths.append(path)
    lines = []
    for path in paths[:MAX_SHOWN_SETTINGS]:
        lines.append(
            f"  {path}: {other_settings.get(path, 'unset')} on rank {other_rank} ({other_host}), "
            f"{first_settings.get(path, 'unset')} on rank 0 ({first_host})"
        )
    if len(paths) > MAX_SHOWN_SETTINGS:
        lines.append(f"  and {len(paths) - MAX_SHOWN_SETTINGS} more")
    return lines


def compute_on_first_rank(compute: Callable[[], T]) -> T:
    """Call a function on the first rank, and return its result on every rank.

    This is a collective call. If the function raises an error of `SHARED_ERRORS`, every rank raises
    it.
    """
    outcomes: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        outcomes = [_catch_shared_error(compute)]
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(outcomes, src=0)
    result: T = _get_results(outcomes)[0]
    return result


def compute_on_all_ranks(compute: Callable[[], T], *, group: Any = None) -> list[T]:
    """Call a function on all ranks of a group, and return all results on each rank.

    This is a collective call. If the function raises an error of `SHARED_ERRORS` on a rank, every
    rank raises it.

    Args:
        compute: The function.
        group: The ranks. None: all ranks.

    Returns:
        The results in the order of the ranks.
    """
    outcome = _catch_shared_error(compute)
    ranks = torch.distributed.get_world_size(group)
    outcomes: list[Any] = [outcome] * ranks
    if ranks > 1:
        torch.distributed.all_gather_object(outcomes, outcome, group=group)
    return _get_results(outcomes)


def _catch_shared_error(compute: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (result, None) of a function, or (None, error) for an error of `SHARED_ERRORS`."""
    try:
        return compute(), None
    except SHARED_ERRORS as error:
        return None, error


def _get_results(outcomes: Sequence[Any]) -> list[Any]:
    """Return the results of all ranks, or raise the first error of a rank."""
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]
