"""One run folder for one run: every process of a launch reads the same clock.

Hydra names the folder after the time at which a process composes its config, and the processes of one `torchrun` do so
seconds apart. ``${launched:%H-%M-%S}`` is the time at which their common parent was started instead.
"""

from __future__ import annotations

import os
from datetime import datetime

import psutil  # type: ignore[import-untyped]
from omegaconf import OmegaConf

__all__ = ["is_first_process", "register_launch_time"]


def register_launch_time() -> None:
    """Offer ``${launched:FORMAT}`` to configs: the time of the launch, or now where there is one process."""
    OmegaConf.register_new_resolver("launched", _launched, use_cache=True, replace=True)


def is_first_process() -> bool:
    """Return whether this process is the one that writes about the run."""
    return os.environ.get("RANK", "0") == "0"


def _launched(pattern: str) -> str:
    if "RANK" not in os.environ:
        return datetime.now().astimezone().strftime(pattern)
    started: float = psutil.Process(os.getppid()).create_time()
    return datetime.fromtimestamp(started).astimezone().strftime(pattern)
