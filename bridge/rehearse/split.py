"""The split of a run's layers over pipeline stages, at two stages: even, uneven at an end, or a layout of the run's."""

from dataclasses import dataclass
from typing import Any

from bridge.rules.shape.parallel import LAYOUT, Parallel

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
FIELDS = (FIRST, LAST, LAYOUT, EMBEDDING, LOSS)
"""Fields of the model that say how the layers are split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How a run splits its layers."""

    parallel: Parallel
    num_layers: int
    """Layers of the run."""
    virtual: int
    """Model chunks of each of the two stages."""

    def shares(self, size: int) -> bool:
        """Return whether the chunks can share so many layers; a layout of the run's own gives each what it likes."""
        if self.parallel.pipeline == 1 or self.parallel.layout is not None:
            return True
        places = size + self.parallel.embedding_counts + self.parallel.loss_counts
        return places % (self.virtual * (1 if self._ends else 2)) == 0

    @property
    def least(self) -> int:
        """The fewest layers that show the split."""
        if self.parallel.pipeline == 1:
            return 1
        if self.parallel.layout is not None:
            return 2 * self.virtual
        before, after = self._ends or (1, 1)
        return self.virtual * (2 if before == after else 3)

    @property
    def _ends(self) -> tuple[int, int] | None:
        """Return the layers of two stages of the run of which one has a number of its own; None where none has."""
        first, last = self.parallel.first_stage_layers, self.parallel.last_stage_layers
        if self.parallel.pipeline == 1 or (first is None and last is None):
            return None
        held = [0] * self.parallel.pipeline
        for place in self.parallel.places(self.num_layers):
            held[place.stage] += len(place.layers)
        if first is None:
            return held[-2], held[-1]
        return held[0], held[-1] if last is not None else held[1]

    def fields(self, size: int) -> dict[str, Any]:
        """Return the model fields that split so many layers over two stages; none for equal stages."""
        parallel = self.parallel
        if parallel.pipeline == 1:
            return {}
        if parallel.layout is not None:
            return {LAYOUT: self._layout(size)}
        if self._ends is None:
            counted = {EMBEDDING: parallel.embedding_counts, LOSS: parallel.loss_counts}
            return {name: True for name, is_on in counted.items() if is_on}
        before, after = self._ends
        few = self.virtual
        first = few if before < after else size - few
        if before == after:
            first = size // few // 2 * few
        stated = {FIRST: (parallel.first_stage_layers, first), LAST: (parallel.last_stage_layers, size - first)}
        return {name: here for name, (there, here) in stated.items() if there is not None}

    def _layout(self, size: int) -> list[list[str]]:
        """Return the content of each chunk: first and last as in the run, with one layer where they have some."""
        given = self.parallel.layout or ()
        counts = [0] * (2 * self.virtual)
        counts[0], counts[-1] = min(1, given[0].count("decoder")), min(1, given[-1].count("decoder"))
        between = list(range(1, len(counts) - 1)) or [0 if counts[0] else 1]
        for number in range(size - counts[0] - counts[-1]):
            counts[between[number % len(between)]] += 1
        chunks = [["decoder"] * count for count in counts]
        chunks[0].insert(0, "embedding")
        stands_alone = "mtp" not in given[-1] and self.virtual > 1
        chunks[-2 if stands_alone else -1] += [part for chunk in given for part in chunk if part == "mtp"][:2]
        chunks[-1].append("loss")
        return chunks
