"""Faults of a run that show before data and model are built."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bridge.errors import Finding
from bridge.runtime.checkpoint.folder import load_fault
from bridge.runtime.megatron.data.corpus import path_fault
from bridge.training.config import ConfigContainer
from bridge.training.honoured import refused_fields
from bridge.training.values import batch_fault, value_faults


def early_faults(config: ConfigContainer, origin_of: Callable[[str], str]) -> list[Finding]:
    """Return all faults that are known before data and model are built.

    Args:
        config: The run.
        origin_of: Returns the origin of a dotted key, for the messages.
    """
    faults = value_faults(config, origin_of)
    further: list[Finding | None] = []
    sizes = {"train.micro_batch_size", "train.global_batch_size"}
    if sizes.isdisjoint(fault.path for fault in faults):
        further.append(
            batch_fault(config.train, ranks=_data_parallel_ranks(config.model), origin_of=origin_of)
        )
    if config.data.path is not None:
        further.append(path_fault(config.data.path))
    if config.checkpoint.load is not None:
        further.append(load_fault(Path(config.checkpoint.load)))
    for fault in further:
        if fault is not None:
            faults.append(fault)
    return [*faults, *refused_fields(config)]


def _data_parallel_ranks(model: Any) -> int | None:
    """Return the number of data-parallel ranks of this launch, None for a single rank.

    It is None too where the launcher does not state the number of processes.
    """
    world = os.environ.get("WORLD_SIZE", "")
    if not world.isdecimal():
        return None
    sizes = (
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.context_parallel_size,
    )
    ranks: int = int(world) // max(1, math.prod(sizes))
    if ranks < 2:
        return None
    return ranks
