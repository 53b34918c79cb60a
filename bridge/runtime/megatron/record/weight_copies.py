"""Functions that compare a weight's copies on data-parallel ranks after the optimizer's gather.

Each rank steps on its part of a weight, in a master, and gathers the other parts. A wrong gather
raises no error, and only the loss shows it, much later. So at the end of a forward pass each rank
compares its part with its master, and all ranks compare a sample of the whole weight. Between the
optimizer's step and this time nothing else writes to the weights or the masters.
"""

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from bridge.runtime.audit.mismatch import Mismatch, fold_mismatches
from bridge.runtime.audit.record import make_layer_sort_key
from bridge.runtime.megatron.model.gpt import unwrap_model
from bridge.runtime.megatron.optimizer import list_chained_optimizers
from bridge.runtime.megatron.process.agreement import compute_on_all_ranks
from bridge.runtime.pytorch.record.health import clamp_to_range, find_scale, get_error_limit
from bridge.runtime.pytorch.record.modules import label_modules
from bridge.runtime.pytorch.record.operand_format import get_operand_format, is_quantised

MAX_SAMPLED_VALUES = 4096
"""Elements of a weight that are compared between ranks, at equal distances."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightCopy:
    """The copy of a weight on a rank."""

    layer: str
    module: str
    part: tuple[str, int, int]
    """Path of the parameter in its chunk, and this rank's numbers in groups with other parts of it.

    The copies with the same part must be equal.
    """
    digest: int
    """Digest of a sample of the weight."""
    is_of_master: bool
    """Whether the rank's part is its master, rounded."""


def find_wrong_copies(copies: list[WeightCopy]) -> tuple[Mismatch, ...]:
    """Return the weights whose copies differ between ranks or from the masters.

    This is a collective call.

    Args:
        copies: The copies of this rank.
    """
    copies_of: dict[tuple[str, str, tuple[str, int, int]], list[WeightCopy]] = {}
    for rank_copies in compute_on_all_ranks(lambda: copies):
        for copy in rank_copies:
            copies_of.setdefault((copy.layer, copy.module, copy.part), []).append(copy)
    wrong: list[tuple[str, str]] = []
    for (layer, module, _), same_part in copies_of.items():
        digests = {copy.digest for copy in same_part}
        is_right = len(digests) == 1 and all(copy.is_of_master for copy in same_part)
        if not is_right and (layer, module) not in wrong:
            wrong.append((layer, module))
    mismatches = []
    for layer, module in sorted(wrong, key=lambda label: make_layer_sort_key(label[0])):
        mismatches.append(
            Mismatch(column="gathered", planned="", ran="", layers=(layer,), modules=(module,))
        )
    return fold_mismatches(mismatches)


@contextmanager
def watch_copies(model: list[Any], optimizer: Any) -> Iterator[list[WeightCopy]]:
    """Collect the copies of a distributed optimizer's weights, in a ``with`` block.

    They are read at the end of each chunk's first forward pass.
    """
    copies: list[WeightCopy] = []
    ranges: dict[torch.nn.Parameter, slice | None] = {}
    for part in list_chained_optimizers(optimizer):
        ranges.update(_list_shard_ranges(part))
    seen: set[torch.nn.Module] = set()

    def collect_once(chunk: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if ranges and chunk not in seen:
            seen.add(chunk)
            with torch.no_grad():
                copies.extend(_collect_copies(chunk, ranges))

    with ExitStack() as hooks:
        for chunk in model:
            hooks.callback(chunk.register_forward_hook(collect_once).remove)
        yield copies


def _list_shard_ranges(part: Any) -> Iterator[tuple[torch.nn.Parameter, slice | None]]:
    """Yield the parameters of a distributed optimizer, each with this rank's part of it."""
    for parameter, (buffer, dtype, bucket) in getattr(part, "model_param_gbuf_map", {}).items():
        of_parameter = part.gbuf_ranges[buffer][dtype][bucket]["param_map"].get(parameter)
        if of_parameter is None:
            yield parameter, None
        else:
            yield parameter, slice(of_parameter["param"].start, of_parameter["param"].end)


def _collect_copies(
    chunk: torch.nn.Module, ranges: dict[torch.nn.Parameter, slice | None]
) -> Iterator[WeightCopy]:
    """Yield this rank's copies of the weights of a chunk that have a range."""
    model = unwrap_model(chunk)
    modules = label_modules([model])
    for path, parameter in model.named_parameters():
        if parameter not in ranges:
            continue
        layer, name = modules[model.get_submodule(path.rpartition(".")[0])]
        is_stored = is_quantised(parameter)
        if is_stored:
            values = parameter.dequantize().reshape(-1)
        else:
            values = parameter.detach().reshape(-1)
        sample = values[:: max(1, len(values) // MAX_SAMPLED_VALUES)].contiguous().cpu()
        yield WeightCopy(
            layer=layer,
            module=name,
            part=(path, *_get_shard_ranks(parameter)),
            digest=zlib.crc32(sample.view(torch.uint8).numpy().tobytes()),
            is_of_master=_equals_master(parameter, values, ranges[parameter], is_stored=is_stored),
        )


def _get_shard_ranks(parameter: torch.nn.Parameter) -> tuple[int, int]:
    """Return this rank's numbers in the groups whose ranks have other parts of a weight."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_tensor_model_parallel_rank(), 0
    return (
        parallel_state.get_expert_tensor_parallel_rank(),
        1 + parallel_state.get_expert_model_parallel_rank(),
    )


def _equals_master(
    parameter: Any, values: torch.Tensor, part: slice | None, *, is_stored: bool
) -> bool:
    """Return whether this rank's part of a weight is its rounded master, or has no master."""
    master = getattr(parameter, "main_param", None)
    if (
        part is None
        or master is None
        or not master.is_floating_point()
        or master.numel() != part.stop - part.start
    ):
        return True
    values = values[part]
    if not is_stored:
        return torch.equal(values, master.to(values.dtype))
    codes = get_operand_format(parameter, columnwise=False)
    wanted = clamp_to_range(master, codes.format, find_scale(parameter))
    norm = wanted.norm()
    error = (values.float() - wanted).norm()
    is_near = bool(error <= get_error_limit(codes) * norm)
    return is_near or not norm > 0
