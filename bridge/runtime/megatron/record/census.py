"""`take_census`: the dtype and size of each kind of tensor of a run, read from the live objects."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from bridge.runtime.audit.record import CensusRow
from bridge.runtime.megatron.emulation.stored_weight import StoredWeight
from bridge.runtime.megatron.model.gpt import list_bucket_groups, unwrap_model
from bridge.runtime.megatron.optimizer import list_torch_optimizers
from bridge.runtime.pytorch.record.modules import get_dtype_name
from bridge.runtime.pytorch.record.operand_format import (
    count_stored_bytes,
    get_operand_format,
    is_quantised,
)

LINEAR_CLASSES = (ColumnParallelLinear, RowParallelLinear, torch.nn.Linear)


class Activations:
    """The outputs of linear layers in one micro-batch, filled by `watch_activations`."""

    def __init__(self) -> None:
        self.bytes_of: Counter[str] = Counter()
        """Dtype -> bytes of outputs."""
        self.layers = 0
        """Number of linear layers."""
        self.sent: dict[str, int] = {}
        """Dtype -> bytes of the output that goes to the next pipeline stage."""


@contextmanager
def watch_activations(model: list[Any]) -> Iterator[Activations]:
    """Record the dtypes of linear layers' outputs, in a ``with`` block.

    The first forward pass of each layer counts, so that a step with gradient accumulation shows a
    single micro-batch.
    """
    activations = Activations()
    counted: set[torch.nn.Module] = set()

    def count_output(module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if module not in counted:
            counted.add(module)
            activations.layers += 1
            if isinstance(output, tuple):
                output = output[0]
            activations.bytes_of[get_dtype_name(output)] += output.nbytes

    def count_sent(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            activations.sent[get_dtype_name(output)] = output.nbytes

    with ExitStack() as hooks:
        for chunk in model:
            if not unwrap_model(chunk).post_process:
                hooks.callback(chunk.register_forward_hook(count_sent).remove)
            for module in chunk.modules():
                # Modules of Transformer Engine have quantizers.
                if isinstance(module, LINEAR_CLASSES) or hasattr(module, "quantizers"):
                    hooks.callback(module.register_forward_hook(count_output).remove)
        yield activations


def take_census(
    model: list[Any], optimizer: Any, activations: Activations
) -> tuple[CensusRow, ...]:
    """Return the dtypes and sizes of every kind of tensor after a training step.

    Args:
        model: Chunks of this rank.
        optimizer: Megatron's optimizer.
        activations: Result of `watch_activations` around the step.
    """
    parameters: list[torch.nn.Parameter] = []
    for chunk in model:
        parameters.extend(chunk.parameters())
    gradients = [p.main_grad for p in parameters if hasattr(p, "main_grad")]
    layers = f"outputs of {activations.layers} linear layers in one step"
    return (
        *_make_tensor_rows("parameters", parameters, "the modules' parameters"),
        *_make_rows("activations", activations.bytes_of, layers),
        *_make_rows("sent between stages", activations.sent, "output of the stage"),
        *_make_tensor_rows("gradients", gradients, "parameter.main_grad"),
        *_make_reduction_rows(model),
        *_make_master_rows(parameters, optimizer),
        *_make_state_rows(optimizer),
    )


def _make_rows(kind: str, sizes: Mapping[str, int], read_from: str) -> list[CensusRow]:
    """Return a row per dtype, from the bytes of each."""
    rows = []
    for dtype, size in sorted(sizes.items()):
        rows.append(CensusRow(kind=kind, dtype=dtype, bytes=size, read_from=read_from))
    return rows


def _make_tensor_rows(
    kind: str, tensors: Iterable[torch.Tensor], read_from: str
) -> list[CensusRow]:
    """Return a row per dtype of some tensors."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if is_quantised(tensor):
            codes = get_operand_format(tensor, columnwise=False)
            sizes[f"{codes.format} {codes.scheme}"] += count_stored_bytes(tensor)
        else:
            sizes[get_dtype_name(tensor)] += tensor.nbytes
    return _make_rows(kind, sizes, read_from)


def _make_reduction_rows(model: list[Any]) -> list[CensusRow]:
    """Return the rows of the buffers in which gradients are reduced."""
    gradients: list[torch.Tensor] = []
    for group in list_bucket_groups(model):
        gradients.extend(bucket.grad_data for bucket in group.buckets)
    buckets = _format_count(len(gradients), "bucket")
    ranks = _format_count(model[0].dp_cp_group.size(), "rank")
    read_from = f"bucket.grad_data of {buckets}, reduced over {ranks}"
    return _make_tensor_rows("gradient reduction", gradients, read_from)


def _format_count(number: int, noun: str) -> str:
    """Return a number with its noun, which is in the plural unless the number is 1."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"


def _make_master_rows(parameters: list[torch.nn.Parameter], optimizer: Any) -> list[CensusRow]:
    """Return the rows of the tensors that the optimizer updates.

    They are copies of the parameters, shards of copies, or the parameters themselves.
    """
    memory_of_parameters = set()
    for parameter in parameters:
        if not isinstance(parameter, StoredWeight):
            memory_of_parameters.add(parameter.untyped_storage().data_ptr())
    themselves: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []
    for inner in list_torch_optimizers(optimizer):
        for group in inner.param_groups:
            for stepped in group["params"]:
                master = inner.state[stepped].get("master_param", stepped)
                if master.untyped_storage().data_ptr() in memory_of_parameters:
                    themselves.append(master)
                else:
                    copies.append(master)
    return [
        *_make_tensor_rows("master weights", copies, "the optimizer's own copies"),
        *_make_tensor_rows("master weights", themselves, "the parameters themselves"),
    ]


def _make_state_rows(optimizer: Any) -> list[CensusRow]:
    """Return the rows of the optimizer's moments."""
    states: list[Any] = []
    for inner in list_torch_optimizers(optimizer):
        states.extend(inner.state.values())
    rows = []
    for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        moments = [state[name] for state in states if isinstance(state.get(name), torch.Tensor)]
        rows += _make_tensor_rows("optimizer state", moments, f"optimizer.state[...][{name!r}]")
    return rows
