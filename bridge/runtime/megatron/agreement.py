"""Ranks that agree: `require_agreement` compares their settings, `from_first_rank` gives all of them one answer.

Each rank sends a digest of 32 bytes. Only where digests differ are the settings of two ranks sent: those of rank 0 and
of the first rank that differs from it. Every rank then raises the same error, before any group of Megatron exists.
"""

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from bridge.errors import CheckpointError, RunConfigError, TrainingError

T = TypeVar("T")

SHOWN = 20
"""Settings that the message lists; the others are counted."""
SHARED = (CheckpointError, TrainingError, OSError)
"""Errors of one rank that every rank raises."""


def require_agreement(fingerprint: Mapping[str, str]) -> None:
    """Compare the fingerprints of all ranks; a collective call of a process group that has just been started.

    RunConfigError, on every rank, where two ranks have different settings.
    """
    digest = hashlib.sha256(json.dumps(sorted(fingerprint.items())).encode()).digest()
    rank = torch.distributed.get_rank()
    digests = from_all_ranks(lambda: digest)
    differing = [number for number, own in enumerate(digests) if own != digests[0]]
    if not differing:
        return
    other = differing[0]
    seen = from_all_ranks(
        lambda: (socket.gethostname(), dict(fingerprint)) if rank in (0, other) else None
    )
    (first_host, first), (other_host, others) = (found for found in seen if found is not None)
    paths = [path for path in sorted({*first, *others}) if first.get(path) != others.get(path)]
    lines = [
        f"  {path}: {others.get(path, 'unset')} on rank {other} ({other_host}), {first.get(path, 'unset')} on rank 0 "
        f"({first_host})"
        for path in paths[:SHOWN]
    ]
    if len(paths) > SHOWN:
        lines.append(f"  and {len(paths) - SHOWN} more")
    if len(differing) > 1:
        lines.append(
            f"  {len(differing)} of {len(seen)} ranks differ from rank 0; rank {other} is the first of them."
        )
    rule = f"must be the same on every rank, and rank {other} differs from rank 0"
    remedy = "Start every rank with the same command, environment and packages."
    raise RunConfigError(
        "\n".join([f"The settings of a run {rule}. {remedy}", *lines]), rule=rule, remedy=remedy
    )


def from_first_rank(compute: Callable[[], T]) -> T:
    """Return on every rank what `compute` returns on the first one; an error of `SHARED` is raised on every rank."""
    sent = [_outcome(compute) if torch.distributed.get_rank() == 0 else None]
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(sent, src=0)
    result: T = _results(sent)[0]
    return result


def from_all_ranks(compute: Callable[[], T], *, group: Any = None) -> list[T]:
    """Return on every rank of a group what `compute` returns on each; an error of `SHARED` is raised on all of them."""
    own, ranks = _outcome(compute), torch.distributed.get_world_size(group)
    seen: list[Any] = [own] * ranks
    if ranks > 1:
        torch.distributed.all_gather_object(seen, own, group=group)
    return _results(seen)


def _outcome(compute: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return compute(), None
    except SHARED as error:
        return None, error


def _results(outcomes: Sequence[Any]) -> list[Any]:
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]
