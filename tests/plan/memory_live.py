"""The bytes of live Megatron objects; as a script, those of every case of a JSON file, on each rank of a torchrun."""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

from bridge.front.container import build_container
from bridge.front.loader import make_run
from bridge.read.run_input import RunInput
from bridge.runtime.megatron.backend import choose_backend, use_backend
from bridge.runtime.megatron.model.gpt import adapt_config, build_gpt
from bridge.runtime.megatron.optimizer import build_optimizer, list_torch_optimizers
from bridge.runtime.megatron.process.training_process import training_process
from bridge.training.config import runtime_config_update

VOCABULARY = 256


@contextmanager
def built(case: dict):
    """Build a case as a training run does; yields (settled config, model chunks, optimizer)."""
    config = build_container(
        *make_run(
            RunInput(sections={key: case.get(key, {}) for key in ("model", "optimizer", "ddp", "mixed_precision")})
        )
    )
    runtime_config_update(config)
    with training_process(config.model, seed=1) as process:
        backend = choose_backend("auto", config.model)
        with use_backend(backend):
            settled, _ = adapt_config(config.model, vocab_size=VOCABULARY)
            chunks = build_gpt(settled, config.ddp, process.device, seed=1, backend=backend)
            yield settled, chunks, build_optimizer(config.optimizer, chunks)


def bytes_of(chunks: list, optimizer) -> dict[str, int]:
    """Return what is allocated for each kind of tensor."""
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    owned = {
        parameter.untyped_storage().data_ptr() for parameter in parameters if type(parameter) is torch.nn.Parameter
    }
    masters = states = 0
    for inner in list_torch_optimizers(optimizer):
        for group in inner.param_groups:
            for stepped in group["params"]:
                shared = stepped.untyped_storage().data_ptr() in owned
                masters += 0 if shared else stepped.numel() * stepped.element_size()
        for state in inner.state.values():
            states += sum(state[name].nbytes for name in ("exp_avg", "exp_avg_sq", "momentum_buffer") if name in state)
    return {
        "weights": _weights(buffers, parameters),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "master weights": masters,
        "optimizer state": states,
        "parameters": sum(parameter.numel() for parameter in parameters),
    }


def _weights(buffers: list, parameters: list) -> int:
    """Return the bytes of buffers of parameters, and of parameters that lie in none, scales left out."""
    gradients = {buffer.grad_data.untyped_storage().data_ptr() for buffer in buffers}
    own = [buffer.param_data for buffer in buffers if buffer.param_data is not None]
    own = [tensor for tensor in own if tensor.untyped_storage().data_ptr() not in gradients]
    inside = {tensor.untyped_storage().data_ptr() for tensor in own}
    elements = [parameter.stored.codes if hasattr(parameter, "stored") else parameter for parameter in parameters]
    outside = [tensor for tensor in elements if tensor.untyped_storage().data_ptr() not in inside]
    return sum(tensor.nbytes for tensor in (*own, *outside))


def main(cases: Path) -> None:
    """Write ``<name>-<rank>.json`` beside the file for each of its cases."""
    for name, case in json.loads(cases.read_text()).items():
        with built(case) as (_, chunks, optimizer):
            found = bytes_of(chunks, optimizer)
            path = cases.parent / f"{name}-{os.environ.get('RANK', '0')}.json"
            path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
