"""`quiet_loggers`: silences loggers of Megatron and torch whose lines no user can act on.

They are quiet while Megatron is imported, and for the length of a run.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER_LEVELS = {
    "megatron": logging.WARNING,  # at INFO it prints whole configs
    # 0.19 announces HybridModel at every construction
    "megatron.core.models.gpt.gpt_model": logging.ERROR,
    # 0.19: it computes a layout by itself
    "megatron.core.distributed.distributed_data_parallel": logging.ERROR,
    # fires at each RNG fork where the CPU has the one generator
    "megatron.core.tensor_parallel.random": logging.ERROR,
    # 0.19: on asynchronous saving, not used here
    "megatron.core.dist_checkpointing.strategies.torch": logging.ERROR,
    # 0.17 and later make it report a missing CUDA at import
    "torch.utils.cpp_extension": logging.ERROR,
}
"""Logger -> its level, unless the user has set another."""


@contextmanager
def quiet_loggers() -> Iterator[None]:
    """Set the levels of `LOGGER_LEVELS` for a ``with`` block."""
    loggers = [logging.getLogger(name) for name in LOGGER_LEVELS]
    unset = [logger for logger in loggers if logger.level == logging.NOTSET]
    try:
        for logger in unset:
            logger.setLevel(LOGGER_LEVELS[logger.name])
        yield
    finally:
        for logger in unset:
            logger.setLevel(logging.NOTSET)
