"""Functions that find and load the weights of a checkpoint's linear layers as matrices.

A weight is read from its FP32 master if the checkpoint has one.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING

from bridge.errors import CheckpointError, DamagedCheckpointError
from bridge.runtime.checkpoint.contents import OPTIMIZER_STATE_PREFIX
from bridge.runtime.checkpoint.pickles import find_pickle_fault, read_listing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

    from bridge.runtime.checkpoint.pickles import Tensor

LINEAR_WEIGHT_PATTERN = re.compile(
    r"(?:^|\.)(?:linear_\w+|in_proj|out_proj|eh_proj|fc\d_latent_proj)\.weight\d*\Z"
)
"""Megatron's names of the weights of linear layers; experts have a number at the end."""
MASTER_PREFIXES = (f"{OPTIMIZER_STATE_PREFIX}param.", f"{OPTIMIZER_STATE_PREFIX}fp32_param.")
"""Beginnings of the name of a weight's master, before the name of the weight."""
MAX_TENSOR_BYTES = 8 * 2**30
"""FP32 bytes of the largest tensor that is read. A checkpoint has one tensor for all layers."""


def find_linear_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Return key -> tensor of each weight of a linear layer, or of its FP32 master.

    A master counts only if it has the weight's shape. Masters of a sharded optimizer are flat.

    Raises:
        DamagedCheckpointError: The pickles of the checkpoint must not be read.
        CheckpointError: The checkpoint has no linear layer.
    """
    fault = find_pickle_fault(checkpoint)
    if fault is not None:
        raise DamagedCheckpointError(checkpoint, fault)
    tensors = read_listing(checkpoint).tensors
    weights: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if _is_linear_weight(key, tensor):
            source = _find_master(key, tensors) or key
            weights[source] = tensors[source]
    if not weights:
        raise CheckpointError(
            f"{checkpoint}: holds no weight of a linear layer. Give a checkpoint of a GPT or Mamba."
        )
    return weights


def _is_linear_weight(key: str, tensor: Tensor) -> bool:
    """Return whether a tensor is the weight of a linear layer, and not a state of the optimizer."""
    if key.startswith(OPTIMIZER_STATE_PREFIX):
        return False
    return LINEAR_WEIGHT_PATTERN.search(key) is not None and len(tensor.shape) >= 2


def _find_master(key: str, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the key of a weight's FP32 master with the weight's shape.

    The result is None without a master.
    """
    for prefix in MASTER_PREFIXES:
        master = prefix + key
        if master in tensors and tensors[master].shape == tensors[key].shape:
            return master
    return None


def load_matrices(checkpoint: Path, tensors: dict[str, Tensor]) -> Iterator[torch.Tensor]:
    """Yield the matrices (N, K) of some weights, one per layer and expert.

    The tensors are loaded one after the other.

    Args:
        tensors: Tensors that `find_linear_weights` returned for this checkpoint. It has checked the
            pickles, which torch reads without a list of allowed names.
    """
    import torch  # heavy, and only for the values of a checkpoint
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    for key, tensor in tensors.items():
        state = {key: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about reading in a single process
            load(state, storage_reader=FileSystemReader(checkpoint), no_dist=True)
        yield from state[key].reshape(-1, *tensor.shape[-2:])


def list_too_large(tensors: dict[str, Tensor]) -> list[str]:
    """Return the keys of tensors that are larger than `MAX_TENSOR_BYTES` in FP32."""
    return [key for key, tensor in tensors.items() if tensor.elements * 4 > MAX_TENSOR_BYTES]
