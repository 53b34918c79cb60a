"""`find_early_faults`: faults of a run that are known before data and model are built."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bridge.errors import Finding
from bridge.runtime.checkpoint.folder import find_load_fault
from bridge.runtime.megatron.data.pair_path import find_path_fault
from bridge.training.config import ConfigContainer
from bridge.training.unsupported_settings import find_unsupported_settings
from bridge.training.value_checks import find_batch_fault, find_value_faults


def find_early_faults(config: ConfigContainer, origin_of: Callable[[str], str]) -> list[Finding]:
    """Return all faults that are known before data and model are built.

    Args:
        config: The run.
        origin_of: Returns the origin of a dotted key, for the messages.
    """
    faults = find_value_faults(config, origin_of)
    further: list[Finding | None] = []
    sizes = {"train.micro_batch_size", "train.global_batch_size"}
    # A batch size that has a fault already is not compared with the ranks.
    if sizes.isdisjoint(fault.path for fault in faults):
        further.append(
            find_batch_fault(
                config.train, ranks=_count_data_parallel_ranks(config.model), origin_of=origin_of
            )
        )
    if config.data.path is not None:
        further.append(find_path_fault(config.data.path))
    if config.checkpoint.load is not None:
        further.append(find_load_fault(Path(config.checkpoint.load)))
    for fault in further:
        if fault is not None:
            faults.append(fault)
    return [*faults, *find_unsupported_settings(config)]


def _count_data_parallel_ranks(model: Any) -> int | None:
    """Return the number of data-parallel ranks of this launch.

    Args:
        model: The model config with the parallel sizes.

    Returns:
        The number, or None if there is a single rank, or if the launcher does not state the number
        of processes.
    """
    world_size = os.environ.get("WORLD_SIZE", "")
    if not world_size.isdecimal():
        return None
    sizes = (
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.context_parallel_size,
    )
    ranks: int = int(world_size) // max(1, math.prod(sizes))
    if ranks < 2:
        return None
    return ranks
