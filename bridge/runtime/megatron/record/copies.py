"""The copies of a weight on data-parallel ranks, after Megatron's optimizer gathered it.

Each rank steps on its own part of a weight, in a master, and gathers the other parts. A gather that
goes wrong gives no error: the loss alone shows it, later. So at the end of a forward pass each rank
compares its own part with its master, and all ranks compare a sample of the whole weight. Nothing
else writes to the weights or the masters in between.
"""

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from bridge.runtime.audit.compare import Mismatch, folded
from bridge.runtime.audit.record import layer_order
from bridge.runtime.megatron.agreement import from_all_ranks
from bridge.runtime.megatron.gpt import unwrapped
from bridge.runtime.megatron.optimizer import parts
from bridge.runtime.pytorch.record.health import error_limit, saturated, scale_of
from bridge.runtime.pytorch.record.modules import places
from bridge.runtime.pytorch.record.operand_format import is_quantised, operand_format

SAMPLE = 4096
"""Elements of a weight that are compared between ranks, in equal distances."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """One rank's copy of a weight."""

    layer: str
    module: str
    part: tuple[str, int, int]
    """Path of the parameter in its chunk, and this rank's place in the groups
    that hold different parts of it.
    """
    digest: int
    is_own: bool
    """The rank's own part is that of its master."""


def wrong_copies(copies: list[Copy]) -> tuple[Mismatch, ...]:
    """Return the weights that ranks have other copies of than their masters say.

    A collective call.
    """
    copies_of: dict[tuple[str, str, tuple[str, int, int]], list[Copy]] = {}
    for of_rank in from_all_ranks(lambda: copies):
        for copy in of_rank:
            copies_of.setdefault((copy.layer, copy.module, copy.part), []).append(copy)
    wrong: list[tuple[str, str]] = []
    for (layer, module, _), of_ranks in copies_of.items():
        digests = {copy.digest for copy in of_ranks}
        is_right = len(digests) == 1 and all(copy.is_own for copy in of_ranks)
        if not is_right and (layer, module) not in wrong:
            wrong.append((layer, module))
    mismatches = []
    for layer, module in sorted(wrong, key=lambda place: layer_order(place[0])):
        mismatches.append(
            Mismatch(column="gathered", planned="", ran="", layers=(layer,), modules=(module,))
        )
    return folded(mismatches)


@contextmanager
def watch_copies(model: list[Any], optimizer: Any) -> Iterator[list[Copy]]:
    """Compare the weights of a distributed optimizer in a block.

    It does so at the end of each chunk's first forward pass.
    """
    copies: list[Copy] = []
    ranges: dict[torch.nn.Parameter, slice | None] = {}
    for part in parts(optimizer):
        ranges.update(_ranges(part))
    seen: set[torch.nn.Module] = set()

    def look(chunk: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if ranges and chunk not in seen:
            seen.add(chunk)
            with torch.no_grad():
                copies.extend(_copies(chunk, ranges))

    with ExitStack() as hooks:
        for chunk in model:
            hooks.callback(chunk.register_forward_hook(look).remove)
        yield copies


def _ranges(part: Any) -> Iterator[tuple[torch.nn.Parameter, slice | None]]:
    """Yield the parameters of a distributed optimizer, each with this rank's part of it."""
    for parameter, (buffer, dtype, bucket) in getattr(part, "model_param_gbuf_map", {}).items():
        of_parameter = part.gbuf_ranges[buffer][dtype][bucket]["param_map"].get(parameter)
        if of_parameter is None:
            yield parameter, None
        else:
            yield parameter, slice(of_parameter["param"].start, of_parameter["param"].end)


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
        if is_stored:
            values = parameter.dequantize().reshape(-1)
        else:
            values = parameter.detach().reshape(-1)
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


def _is_own(parameter: Any, values: torch.Tensor, part: slice | None, *, is_stored: bool) -> bool:
    """Return whether this rank's part of a weight is its master, rounded.

    It is True where the rank has no master of the weight.
    """
    master = getattr(parameter, "main_param", None)
    if (
        part is None
        or master is None
        or not master.is_floating_point()
        or master.numel() != part.stop - part.start
    ):
        return True
    own_values = values[part]
    if not is_stored:
        return torch.equal(own_values, master.to(own_values.dtype))
    codes = operand_format(parameter, columnwise=False)
    wanted = saturated(master, codes.format, scale_of(parameter))
    norm = wanted.norm()
    error = (own_values.float() - wanted).norm()
    is_near = bool(error <= error_limit(codes) * norm)
    return is_near or not norm > 0
