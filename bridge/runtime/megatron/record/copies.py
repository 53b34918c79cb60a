"""The copies that data-parallel ranks have of a weight, after Megatron's distributed optimizer gathered it.

Each rank steps on its own part of a weight, in a master, and gathers the other parts. A gather that goes wrong gives no
error: the loss alone shows it, later. So at the end of a forward pass each rank compares its own part with its master,
and all ranks compare a sample of the whole weight. Nothing else writes to the weights or the masters in between.
"""

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from bridge.precision.grouping import grouped
from bridge.runtime.audit.compare import Mismatch, folded
from bridge.runtime.audit.record import layer_order
from bridge.runtime.megatron.agreement import from_all_ranks
from bridge.runtime.megatron.gpt import unwrapped
from bridge.runtime.megatron.optimizer import parts
from bridge.runtime.pytorch.record.health import error_limit, in_range, scale_of
from bridge.runtime.pytorch.record.modules import places
from bridge.runtime.pytorch.record.te import describe, is_quantised

SAMPLE = 4096
"""Elements of a weight that are compared between ranks, in equal distances."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One rank's copy of a weight."""

    layer: str
    module: str
    part: tuple[str, int, int]
    """Path of the parameter in its chunk, and this rank's place in the groups that hold different parts of it."""
    digest: int
    is_own: bool
    """The rank's own part is that of its master."""


def wrong_copies(copies: list[Copy]) -> tuple[Mismatch, ...]:
    """Return the weights that ranks have other copies of than their masters say; a collective call."""
    everywhere = (row for rows in from_all_ranks(lambda: copies) for row in rows)
    wrong = {
        (layer, module): None
        for (layer, module, _), own in grouped(
            ((row.layer, row.module, row.part), row) for row in everywhere
        ).items()
        if len({row.digest for row in own}) > 1 or not all(row.is_own for row in own)
    }
    ordered = sorted(wrong, key=lambda place: layer_order(place[0]))
    return folded(
        Mismatch(column="gathered", planned="", ran="", layers=(at,), modules=(name,))
        for at, name in ordered
    )


@contextmanager
def watch_copies(model: list[Any], optimizer: Any) -> Iterator[list[Copy]]:
    """Compare the weights of a distributed optimizer at the end of each chunk's first forward pass in a block."""
    found: list[Copy] = []
    ranges = {parameter: one for part in parts(optimizer) for parameter, one in _ranges(part)}
    seen: set[torch.nn.Module] = set()

    def look(chunk: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if ranges and chunk not in seen:
            seen.add(chunk)
            with torch.no_grad():
                found.extend(_copies(chunk, ranges))

    with ExitStack() as hooks:
        for chunk in model:
            hooks.callback(chunk.register_forward_hook(look).remove)
        yield found


def _ranges(part: Any) -> Iterator[tuple[torch.nn.Parameter, slice | None]]:
    """Yield the parameters of a distributed optimizer, each with this rank's part of it."""
    for parameter, (buffer, dtype, bucket) in getattr(part, "model_param_gbuf_map", {}).items():
        own = part.gbuf_ranges[buffer][dtype][bucket]["param_map"].get(parameter)
        yield parameter, slice(own["param"].start, own["param"].end) if own is not None else None


def _copies(
    chunk: torch.nn.Module, ranges: dict[torch.nn.Parameter, slice | None]
) -> Iterator[Copy]:
    model = unwrapped(chunk)
    modules = places([model])
    for path, parameter in model.named_parameters():
        if parameter not in ranges:
            continue
        layer, name = modules[model.get_submodule(path.rpartition(".")[0])]
        is_stored = is_quantised(parameter)
        values = (parameter.dequantize() if is_stored else parameter.detach()).reshape(-1)
        sample = values[:: max(1, len(values) // SAMPLE)].contiguous().cpu()
        yield Copy(
            layer=layer,
            module=name,
            part=(path, *_place(parameter)),
            digest=zlib.crc32(sample.view(torch.uint8).numpy().tobytes()),
            is_own=_is_own(parameter, values, ranges[parameter], is_stored=is_stored),
        )


def _place(parameter: torch.nn.Parameter) -> tuple[int, int]:
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_tensor_model_parallel_rank(), 0
    return (
        parallel_state.get_expert_tensor_parallel_rank(),
        1 + parallel_state.get_expert_model_parallel_rank(),
    )


def _is_own(parameter: Any, values: torch.Tensor, own: slice | None, *, is_stored: bool) -> bool:
    """Return whether this rank's part of a weight is its master, rounded; True without a master of its own."""
    master = getattr(parameter, "main_param", None)
    if (
        own is None
        or master is None
        or not master.is_floating_point()
        or master.numel() != own.stop - own.start
    ):
        return True
    held = values[own]
    if not is_stored:
        return torch.equal(held, master.to(held.dtype))
    row = describe(parameter, columnwise=False)
    wanted = in_range(master, row.format, scale_of(parameter))
    norm = wanted.norm()
    return (
        bool((held.float() - wanted).norm() <= error_limit(row.format, row.scheme) * norm)
        or not norm > 0
    )
