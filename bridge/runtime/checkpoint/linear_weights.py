"""The weights of a checkpoint's linear layers as matrices: FP32 masters, or weights without masters."""

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
MASTER_PREFIXES = (f"{OPTIMIZER_STATE_PREFIX}param.", f"{OPTIMIZER_STATE_PREFIX}fp32_param.")
MAX_TENSOR_BYTES = 8 * 2**30
"""Bytes of the largest tensor that is read; a checkpoint has one tensor for all layers."""


def find_linear_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Return the tensors of linear layers, by key; an FP32 master of the same shape comes first.

    Raises:
        DamagedCheckpointError: The pickles of the checkpoint must not be read.
        CheckpointError: The checkpoint has no linear layer.
    """
    fault = find_pickle_fault(checkpoint)
    if fault is not None:
        raise DamagedCheckpointError(checkpoint, fault)
    tensors = read_listing(checkpoint).tensors
    linear: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if (
            not LINEAR_WEIGHT_PATTERN.search(key)
            or key.startswith(OPTIMIZER_STATE_PREFIX)
            or len(tensor.shape) < 2
        ):
            continue
        master = _find_master(key, tensors)
        if master is None:
            linear[key] = tensor
        else:
            linear[master] = tensors[master]
    if not linear:
        raise CheckpointError(
            f"{checkpoint}: holds no weight of a linear layer. Give a checkpoint of a GPT or Mamba."
        )
    return linear


def _find_master(key: str, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the key of the FP32 master of a weight that has the weight's shape, or None."""
    for prefix in MASTER_PREFIXES:
        name = prefix + key
        if name in tensors and tensors[name].shape == tensors[key].shape:
            return name
    return None


def load_matrices(checkpoint: Path, tensors: dict[str, Tensor]) -> Iterator[torch.Tensor]:
    """Yield each layer's and expert's matrix of some tensors of a checkpoint.

    `find_linear_weights` has checked the tensors.
    """
    import torch  # heavy, and only for the values of a checkpoint
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    for key, tensor in tensors.items():
        state = {key: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a single process reads
            load(state, storage_reader=FileSystemReader(checkpoint), no_dist=True)
        yield from state[key].reshape(-1, *tensor.shape[-2:])


def list_too_large(tensors: dict[str, Tensor]) -> list[str]:
    """Return the keys of tensors that do not fit into memory at once."""
    return [key for key, tensor in tensors.items() if tensor.elements * 4 > MAX_TENSOR_BYTES]
