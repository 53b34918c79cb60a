"""The bytes that a rank of a pipeline keeps at its fullest, under Megatron's schedules, for every case of a file.

``python -m tests.plan.memory_in_flight CASES.json`` writes ``<name>-<rank>.json`` beside the file: the bytes, and how
many micro-batches of each model chunk are alive then, by what autograd holds of them.
"""

import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from bridge.preflight.gpu_for_te_cpu import declare
from tests.plan.memory_kept import Kept, Saved, alive, built

NO_PASS = (-1, 0)


class InFlight(Kept):
    """What is kept at each moment of a schedule, of which the fullest is remembered."""

    def __init__(self, chunks: list[Any]) -> None:
        super().__init__(chunks)
        self.passes, self.now = 0, NO_PASS
        self.fullest, self.alive = 0, [0] * len(chunks)
        self.outputs: list[weakref.ref[Any]] = []
        for number, chunk in enumerate(chunks):
            chunk.register_forward_pre_hook(lambda *_, number=number: self.begin(number))
            chunk.register_forward_hook(self.end)

    def begin(self, chunk: int) -> None:
        """Begin the forward pass of a micro-batch."""
        self.passes += 1
        self.now = chunk, self.passes

    def end(self, _chunk: Any, _inputs: Any, output: Any) -> None:
        """End a forward pass."""
        self.outputs.append(weakref.ref(output))
        self.look(output)
        self.now = NO_PASS

    def leave(self, _module: Any, _inputs: Any, output: Any) -> None:
        """Look as soon as a module ran that is computed again."""
        super().leave()
        first = output[0] if isinstance(output, tuple) else output
        if self.now == NO_PASS and getattr(first, "grad_fn", None) is not None:
            self.look(first)

    def contexts(self) -> Iterator[Saved]:
        """Yield what nodes hold, and the outputs that the schedule holds."""
        yield from super().contexts()
        yield from (Saved("output", output) for output in alive(self.outputs))

    def save(self, tensor: Any) -> Saved:
        """Note the micro-batch for which an operator saves a tensor."""
        made = super().save(tensor)
        made.of = self.now
        return made

    def look(self, output: Any) -> None:
        """Remember this moment, if more is kept than ever before."""
        self.note_graph(output)
        kept = self.nbytes
        if kept > self.fullest:
            held = Counter(chunk for chunk, _ in {one.of for one in alive(self.saved)} - {NO_PASS})
            self.fullest, self.alive = kept, [held[number] for number in range(len(self.chunks))]


def run_schedule(case: dict) -> dict[str, Any]:
    """Run the forward and backward passes of one step."""
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    train = case["train"]

    def forward(_: Any, model: Any) -> tuple[Any, Any]:
        tokens = torch.randint(0, 256, (train["micro_batch_size"], settled.seq_length))
        positions = torch.arange(settled.seq_length).expand(tokens.shape[0], -1)
        output = model(tokens, positions, None, labels=tokens)
        return output, lambda losses: (losses.float().mean(), {})

    with built(case) as (settled, chunks):
        kept = InFlight(chunks)
        ranks = torch.distributed.get_world_size() // settled.pipeline_model_parallel_size
        with kept.record_gemms():
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=[None] * len(chunks),
                model=chunks,
                num_microbatches=train["global_batch_size"] // (train["micro_batch_size"] * ranks),
                seq_length=settled.seq_length,
                micro_batch_size=train["micro_batch_size"],
            )
        return {"bytes": kept.fullest, "in flight": kept.alive}


def main(path: Path) -> None:
    """Write what each case keeps."""
    cases = json.loads(path.read_text())
    declare(schemes=[case.pop("scheme") for case in cases.values()])
    import_module("bridge.runtime.megatron")  # before anything of Megatron Core
    for name, case in cases.items():
        found = run_schedule(case)
        (path.parent / f"{name}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
