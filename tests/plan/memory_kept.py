"""The bytes that autograd keeps of a forward pass through Transformer Engine's Python, for every case of a file.

``python -m tests.plan.memory_kept CASES.json`` writes ``<name>-<rank>.json`` beside the file. Left out are weights with
their copies, and what kernels keep that do not run here: `is_of_a_stand_in` names them.
"""

import json
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from bridge.preflight.gpu_for_te_cpu import declare

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # functions that a GPU compiles run one operator after the other
FUSED = ("bias_activation_fusion", "bias_dropout_fusion")
"""Fields that a run on a CPU switches off, and that are operators of plain torch here."""


def is_of_a_stand_in(module: str, tensor: Any) -> bool:
    """Return whether the fused kernel of a GPU keeps no such tensor: rotary angles, and random states."""
    import torch

    is_angle = tensor.dim() == 4 and tensor.shape[1:3] == (1, 1)
    return is_angle or (module == "context" and tensor.dtype == torch.uint8)


STAND_INS = {"MambaMixer": ("norm",), "GatedDeltaNet": ("out_norm", "conv1d", "act_fn"), "DSAttention": ("indexer",)}
"""Class -> the parts whose operators stand, as its own do, for a kernel that a CPU does not run."""


def stand_ins(chunks: list[Any]) -> set[str]:
    """Return the modules whose own operators stand for a kernel."""
    named = [found for chunk in chunks for found in chunk.named_modules()]
    wholes = {name: STAND_INS[type(module).__name__] for name, module in named if type(module).__name__ in STAND_INS}
    return set(wholes) | {
        name
        for name, _ in named
        for whole, parts in wholes.items()
        if name.startswith(tuple(f"{whole}.{part}" for part in parts)) and ".linear_" not in name
    }


class Saved:
    """A tensor that an operator saved; it goes with the operator's node."""

    def __init__(self, module: str, held: Any) -> None:
        self.module, self.held = module, held


class Kept:
    """The storages that forward passes leave to their backward passes."""

    def __init__(self, chunks: list[Any]) -> None:
        self.chunks, self.modules, self.stand_ins = chunks, ["model"], stand_ins(chunks)
        self.saved: list[weakref.ref[Saved]] = []
        self.nodes: list[weakref.ref[Any]] = []
        buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        self.weights = {
            one.untyped_storage()._cdata
            for buffer in buffers
            for one in (buffer.param_data, buffer.grad_data)
            if one is not None
        }
        for parameter in (one for chunk in chunks for one in chunk.parameters()):
            self.weights |= {storage._cdata for _, storage in _storages(parameter)}
        for name, module in (named for chunk in chunks for named in chunk.named_modules()):
            module.register_forward_pre_hook(lambda *_, name=name: self.modules.append(name))
            module.register_forward_hook(self.leave)

    def leave(self, *_: Any) -> None:
        """Follow the forward pass out of a module."""
        self.modules.pop()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept now; a storage that was given back has none."""
        modules = [module for chunk in self.chunks for module in chunk.modules()]
        copies = [one for module in modules for one in getattr(module, "_fp8_workspaces", {}).values()]
        weights = self.weights | {storage._cdata for copy in copies for _, storage in _storages(copy)}
        found = {
            storage._cdata: storage.nbytes()
            for one in (*alive(self.saved), *self.contexts())
            for tensor, storage in _storages(one.held)
            if one.module not in self.stand_ins and not is_of_a_stand_in(one.module, tensor)
        }
        return sum(size for key, size in found.items() if key not in weights)

    def contexts(self) -> Iterator[Saved]:
        """Yield what the nodes of the graphs hold by themselves."""
        for node in alive(self.nodes):
            for value in vars(node).values():
                held = value if isinstance(value, list | tuple) else [value]
                yield from (Saved("context", one) for one in held)

    def save(self, tensor: Any) -> Saved:
        """Note a tensor that an operator saves."""
        made = Saved(self.modules[-1], tensor)
        self.saved.append(weakref.ref(made))
        return made

    def note_graph(self, output: Any) -> None:
        """Note the nodes of the graph behind a tensor."""
        self.nodes += [weakref.ref(node) for node in _nodes(output.grad_fn) if hasattr(node, "__dict__")]

    @contextmanager
    def record_gemms(self) -> Iterator[None]:
        """Note what operators save."""
        import torch

        with torch.autograd.graph.saved_tensors_hooks(self.save, lambda saved: saved.held):
            yield

    def forward(self, micro_batch_size: int, seq_length: int) -> None:
        """Run a forward pass of the first chunk."""
        import torch

        tokens = torch.randint(0, 256, (micro_batch_size, seq_length))
        positions = torch.arange(seq_length).expand(micro_batch_size, -1)
        with self.record_gemms():
            self.loss = self.chunks[0](tokens, positions, None, labels=tokens)
        self.note_graph(self.loss)


def alive(references: list[Any]) -> list[Any]:
    """Return what weak references still refer to."""
    return [one for one in (reference() for reference in references) if one is not None]


def _nodes(root: Any) -> Iterator[Any]:
    seen, todo = set(), [root]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo += [following for following, _ in node.next_functions]


def _storages(held: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (tensor, storage) of a tensor, or of each tensor inside a quantised one."""
    import torch

    is_plain = type(held) in (torch.Tensor, torch.nn.Parameter)
    is_quantised = not is_plain and (isinstance(held, torch.Tensor) or type(held).__name__.endswith("Storage"))
    for tensor in [held] if is_plain else vars(held).values() if is_quantised else ():
        if isinstance(tensor, torch.Tensor):
            with suppress(NotImplementedError, RuntimeError):  # a wrapper without memory of its own
                yield tensor, tensor.untyped_storage()


@contextmanager
def built(case: dict) -> Iterator[tuple[Any, Any]]:
    """Build a case with Transformer Engine's layers, or Megatron's own; yields (settled config, model chunks)."""
    from bridge.front.container import build_container
    from bridge.front.loader import make_run
    from bridge.read.run_input import RunInput
    from bridge.runtime.megatron.backend import Backend, choose_backend, use_backend
    from bridge.runtime.megatron.model import gpt
    from bridge.runtime.megatron.process.training_process import training_process
    from bridge.training.config import runtime_config_update

    is_local = case["model"].get("transformer_impl") == "local"
    backend, stated = "te_cpu", "te_cpu"
    if is_local:
        backend, stated = "local", "emulated"
    config = build_container(*make_run(RunInput(sections={**case, "precision_backend": stated})))
    runtime_config_update(config)
    gpt._CUDA_ONLY_SWITCHES = {name: why for name, why in gpt._CUDA_ONLY_SWITCHES.items() if name not in FUSED}
    with training_process(config.model, seed=1) as process, use_backend(choose_backend(stated, config.model)):
        settled, _ = gpt.adapt_config(config.model, vocab_size=256, backend=backend)
        yield settled, gpt.build_gpt(settled, config.ddp, process.device, seed=1, backend=Backend(name=backend))


def spread_tokens_evenly() -> None:
    """Let each token choose the next experts in turn, as an even load does."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    score = TopKRouter.gating

    def in_turn(router: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits = score(router, tokens)
        chosen = torch.arange(logits[..., 0].numel() * router.topk).view(-1, router.topk) % logits.shape[-1]
        raised = torch.zeros(chosen.shape[0], logits.shape[-1]).scatter_(1, chosen, 1e4)
        return logits + raised.view_as(logits).to(logits.dtype)

    TopKRouter.gating = in_turn


def main(path: Path) -> None:
    """Write what each case keeps."""
    cases = json.loads(path.read_text())
    schemes = [case.pop("scheme") for case in cases.values()]
    if not all(case["model"].get("transformer_impl") == "local" for case in cases.values()):
        declare(schemes=schemes)
    import_module("bridge.runtime.megatron")  # before anything of Megatron Core
    spread_tokens_evenly()
    for name, case in cases.items():
        with built(case) as (settled, chunks):
            kept = Kept(chunks)
            kept.forward(case["train"]["micro_batch_size"], settled.seq_length)
            (path.parent / f"{name}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(kept.nbytes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
