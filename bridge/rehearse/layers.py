"""The layers of a run that a rehearsal keeps: the first and the last, and one of each kind between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptLayers:
    """The layers that are kept."""

    layers: tuple[int, ...]
    """Their numbers in the run, from 0, in order."""
    start: int
    """How many of them are first layers that the run keeps in BF16."""
    end: int


def kept_layers(
    kinds: Sequence[str],
    *,
    start: int,
    end: int,
    limit: int,
    chunks: int = 1,
    extra: int = 0,
    least: int = 1,
    wanted: Sequence[int] = (),
) -> KeptLayers:
    """Return the layers to keep.

    Their number is one that the parts of a pipeline can share.

    Args:
        kinds: Kind of each layer of the run.
        start: Layers at its start that stay in BF16.
        end: Layers at its end that do.
        limit: The most layers, where those at both ends and a kind of each between them do not need more.
        chunks: Parts that the layers are split into.
        extra: Places of the split that embedding and output layer take.
        least: The fewest layers.
        wanted: Further layers to keep, where the limit allows them.
    """
    count = len(kinds)
    start, end = min(start, count), min(end, max(0, count - start))
    middle = range(start, count - end)
    firsts = {kinds[layer]: layer for layer in reversed(middle)}
    most = max(2, limit - len(firsts))
    few_start, few_end = (min(start, most), min(end, most)) if start + end <= most else _shared(start, end, most)
    chosen = {*range(few_start), *range(count - few_end, count), *firsts.values()}
    chosen |= set([layer for layer in wanted if layer not in chosen][: max(0, limit - len(chosen))])
    size = next((size for size in range(max(least, len(chosen)), count + 1) if (size + extra) % chunks == 0), count)
    spare = [layer for layer in _spread(middle, size) if layer not in chosen]
    spare += [layer for layer in middle if layer not in chosen and layer not in spare]
    chosen |= set(spare[: size - len(chosen)])
    return KeptLayers(layers=tuple(sorted(chosen)), start=few_start, end=few_end)


def _shared(start: int, end: int, most: int) -> tuple[int, int]:
    """Return counts for both ends that together are at most `most`, at least 1 where there is one."""
    few_start = min(start, max(int(start > 0), most - min(end, most // 2)))
    return few_start, min(end, most - few_start)


def _spread(layers: range, size: int) -> list[int]:
    """Return so many layers, evenly spread."""
    size = min(size, len(layers))
    return [layers[place * len(layers) // size] for place in range(size)] if size else []
