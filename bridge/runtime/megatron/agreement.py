"""Agreement of ranks: `require_agreement` compares settings, `compute_on_first_rank` shares an answer.

For a comparison each rank sends a digest of 32 bytes. If digests differ, rank 0 and the first rank
that differs from it send their settings, and every rank raises the same error, before any group of
Megatron exists.
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
"""Settings that the message lists; the others are counted."""
SHARED_ERRORS = (CheckpointError, TrainingError, OSError)
"""Errors that every rank raises if a rank raises them."""


def require_agreement(fingerprint: Mapping[str, str]) -> None:
    """Compare the fingerprints of all ranks; a collective call.

    Raises:
        RunConfigError: Two ranks have different settings; raised on every rank.
    """
    digest = hashlib.sha256(json.dumps(sorted(fingerprint.items())).encode()).digest()
    rank = torch.distributed.get_rank()
    digests = compute_on_all_ranks(lambda: digest)
    differing = [number for number, of_rank in enumerate(digests) if of_rank != digests[0]]
    if not differing:
        return
    other = differing[0]

    def settings() -> tuple[str, dict[str, str]] | None:
        if rank not in (0, other):
            return None
        return socket.gethostname(), dict(fingerprint)

    of_ranks = compute_on_all_ranks(settings)
    of_first, of_other = (of_rank for of_rank in of_ranks if of_rank is not None)
    lines = _describe_differences(of_first, of_other, other)
    if len(differing) > 1:
        lines.append(
            f"  {len(differing)} of {len(of_ranks)} ranks differ from rank 0; "
            f"rank {other} is the first of them."
        )
    rule = f"must be the same on every rank, and rank {other} differs from rank 0"
    remedy = "Start every rank with the same command, environment and packages."
    raise RunConfigError(
        "\n".join([f"The settings of a run {rule}. {remedy}", *lines]), rule=rule, remedy=remedy
    )


def _describe_differences(
    of_first: tuple[str, dict[str, str]], of_other: tuple[str, dict[str, str]], other: int
) -> list[str]:
    """Return lines on the settings in which rank 0 and another rank differ."""
    first_host, first = of_first
    other_host, others = of_other
    paths = []
    for path in sorted({*first, *others}):
        if first.get(path) != others.get(path):
            paths.append(path)
    lines = []
    for path in paths[:MAX_SHOWN_SETTINGS]:
        lines.append(
            f"  {path}: {others.get(path, 'unset')} on rank {other} ({other_host}), "
            f"{first.get(path, 'unset')} on rank 0 ({first_host})"
        )
    if len(paths) > MAX_SHOWN_SETTINGS:
        lines.append(f"  and {len(paths) - MAX_SHOWN_SETTINGS} more")
    return lines


def compute_on_first_rank(compute: Callable[[], T]) -> T:
    """Return the result of `compute` on the first rank, on every rank.

    An error of `SHARED_ERRORS` is raised on every rank.
    """
    sent: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        sent = [_catch_shared_error(compute)]
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(sent, src=0)
    result: T = _get_results(sent)[0]
    return result


def compute_on_all_ranks(compute: Callable[[], T], *, group: Any = None) -> list[T]:
    """Return the results of `compute` on all ranks of a group, on every rank.

    An error of `SHARED_ERRORS` is raised on every rank.
    """
    outcome = _catch_shared_error(compute)
    ranks = torch.distributed.get_world_size(group)
    outcomes: list[Any] = [outcome] * ranks
    if ranks > 1:
        torch.distributed.all_gather_object(outcomes, outcome, group=group)
    return _get_results(outcomes)


def _catch_shared_error(compute: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return the result of a function, or the error of a class that ranks share."""
    try:
        return compute(), None
    except SHARED_ERRORS as error:
        return None, error


def _get_results(outcomes: Sequence[Any]) -> list[Any]:
    """Return the results of all ranks, or raise the first error of them."""
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]
