"""Census of a run's tensors: the dtype and size of each kind, read from the live objects and not from any config."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from bridge.runtime.audit.record import CensusRow
from bridge.runtime.megatron.emulation.stored_weight import StoredWeight
from bridge.runtime.megatron.gpt import bucket_groups, unwrapped
from bridge.runtime.megatron.optimizer import inner_optimizers
from bridge.runtime.pytorch.record.modules import dtype_of
from bridge.runtime.pytorch.record.te import describe, is_quantised, stored_bytes

LINEAR = (ColumnParallelLinear, RowParallelLinear, torch.nn.Linear)


class Activations:
    """Bytes of linear layers' outputs per dtype, filled by `watch_activations`."""

    def __init__(self) -> None:
        self.bytes_of: Counter[str] = Counter()
        self.layers = 0
        self.sent: dict[str, int] = {}
        """Of a micro-batch's output that goes to the next pipeline stage."""


@contextmanager
def watch_activations(model: list[Any]) -> Iterator[Activations]:
    """Record, for the length of a ``with`` block, in which dtypes the linear layers hand on their outputs.

    Only each layer's first forward pass counts, so a step with gradient accumulation shows one micro-batch.
    """
    seen = Activations()
    counted: set[torch.nn.Module] = set()

    def record(module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if module not in counted:
            counted.add(module)
            seen.layers += 1
            tensor = output[0] if isinstance(output, tuple) else output
            seen.bytes_of[dtype_of(tensor)] += tensor.nbytes

    def send(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            seen.sent[dtype_of(output)] = output.nbytes

    with ExitStack() as hooks:
        for chunk in model:
            if not unwrapped(chunk).post_process:
                hooks.callback(chunk.register_forward_hook(send).remove)
            for module in chunk.modules():
                if isinstance(module, LINEAR) or hasattr(
                    module, "quantizers"
                ):  # as modules of Transformer Engine have
                    hooks.callback(module.register_forward_hook(record).remove)
        yield seen


def take_census(
    model: list[Any], optimizer: Any, activations: Activations
) -> tuple[CensusRow, ...]:
    """Return the dtypes and sizes of every kind of tensor after a training step that `watch_activations` recorded."""
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    layers = f"outputs of {activations.layers} linear layers in one step"
    return (
        *_rows("parameters", parameters, "the modules' parameters"),
        *_sized("activations", activations.bytes_of, layers),
        *_sized("sent between stages", activations.sent, "output of the stage"),
        *_rows(
            "gradients",
            [p.main_grad for p in parameters if hasattr(p, "main_grad")],
            "parameter.main_grad",
        ),
        *_reduction(model),
        *_master_weights(parameters, optimizer),
        *_optimizer_state(optimizer),
    )


def _sized(kind: str, sizes: Mapping[str, int], read_from: str) -> list[CensusRow]:
    return [
        CensusRow(kind=kind, dtype=dtype, bytes=size, read_from=read_from)
        for dtype, size in sorted(sizes.items())
    ]


def _rows(kind: str, tensors: Iterable[torch.Tensor], read_from: str) -> list[CensusRow]:
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if is_quantised(tensor):
            held = describe(tensor, columnwise=False)
            sizes[f"{held.format} {held.scheme}"] += stored_bytes(tensor)
        else:
            sizes[dtype_of(tensor)] += tensor.nbytes
    return _sized(kind, sizes, read_from)


def _reduction(model: list[Any]) -> list[CensusRow]:
    buckets = [bucket for group in bucket_groups(model) for bucket in group.buckets]
    ranks = model[0].dp_cp_group.size()
    where = f"bucket.grad_data of {len(buckets)} bucket{'s' * (len(buckets) != 1)}, reduced over {ranks} rank"
    return _rows(
        "gradient reduction", [bucket.grad_data for bucket in buckets], where + "s" * (ranks != 1)
    )


def _master_weights(parameters: list[torch.nn.Parameter], optimizer: Any) -> list[CensusRow]:
    """Return the tensors that the optimizer steps on: copies (or shards of copies), or the parameters' own memory."""
    own_memory = {
        p.untyped_storage().data_ptr() for p in parameters if not isinstance(p, StoredWeight)
    }
    themselves: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            for stepped in group["params"]:
                master = inner.state[stepped].get("master_param", stepped)
                shared = master.untyped_storage().data_ptr() in own_memory
                (themselves if shared else copies).append(master)
    return [
        *_rows("master weights", copies, "the optimizer's own copies"),
        *_rows("master weights", themselves, "the parameters themselves"),
    ]


def _optimizer_state(optimizer: Any) -> list[CensusRow]:
    states = [state for inner in inner_optimizers(optimizer) for state in inner.state.values()]
    rows = []
    for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        moments = [state[name] for state in states if isinstance(state.get(name), torch.Tensor)]
        rows += _rows("optimizer state", moments, f"optimizer.state[...][{name!r}]")
    return rows
