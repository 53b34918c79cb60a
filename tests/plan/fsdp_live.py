"""The bytes of Megatron-FSDP's live buffers, for every case of a JSON file, on each rank of a torchrun.

A CPU has no device mesh of CUDA devices: the mesh and the current device are replaced, all else is Megatron's.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from bridge.front.container import build_container
from bridge.front.loader import make_run
from bridge.read.run_input import RunInput
from bridge.runtime.megatron.backend import choose_backend, use_backend
from bridge.runtime.megatron.model import gpt
from bridge.runtime.megatron.process.training_process import training_process
from bridge.training.config import runtime_config_update
from tests.plan.memory_live import VOCABULARY


class CpuMesh:
    """Megatron's mesh of CUDA devices, on CPUs."""

    @staticmethod
    def from_group(groups: list, *, device_type: str, **given: object) -> object:
        """Return the mesh of these groups."""
        del device_type
        return torch.distributed.DeviceMesh.from_group(groups, device_type="cpu", **given)


def live(case: dict) -> dict[str, int]:
    """Build a case, and return what is allocated for each kind of tensor."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter as adapter

    adapter.DeviceMesh = CpuMesh
    if not isinstance(getattr(adapter, "TELinear", object), type):  # without Transformer Engine there is no such layer
        adapter.TELinear = ()
    ddp = case.pop("ddp")
    config = build_container(*make_run(RunInput(sections=case)))
    runtime_config_update(config)
    for name, value in ddp.items():
        setattr(config.ddp, name, value)
    with training_process(config.model, seed=1) as process:
        backend = choose_backend("auto", config.model)
        with use_backend(backend):
            settled, _ = gpt.adapt_config(config.model, vocab_size=VOCABULARY)
            given = {"seed": 1, "backend": backend, "vp_stage": None, "phases": ()}
            module = gpt._build_chunk(settled, config.ddp, process.device, **given)
            torch.cuda.current_device = lambda: 0
            groups = two_instances() if config.ddp.num_distributed_optimizer_instances > 1 else None
            given = {"device": torch.device("cpu"), "pg_collection": groups}
            wrapped = adapter.FullyShardedDataParallel(settled, config.ddp, module, **given)
            return bytes_of(wrapped.param_and_grad_buffer)


def two_instances() -> SimpleNamespace:
    """Return the groups of four ranks in two instances of the optimizer, which this process was not started with."""

    def own(*groups: list[int]) -> object:
        made = [torch.distributed.new_group(ranks) for ranks in groups]
        (mine,) = (one for one, ranks in zip(made, groups, strict=True) if torch.distributed.get_rank() in ranks)
        return mine

    inside, between, alone = own([0, 1], [2, 3]), own([0, 2], [1, 3]), own([0], [1], [2], [3])
    everywhere = own([0, 1, 2, 3])
    return SimpleNamespace(tp=alone, expt_tp=alone, intra_dp_cp=inside, inter_dist_opt=between, dp_cp=everywhere)


def bytes_of(buffer: object) -> dict[str, int]:
    """Return the bytes that stay allocated; Adam keeps two FP32 moments of what the optimizer is given."""
    groups = buffer.parameter_groups
    outer = "hsdp_wbuf" if hasattr(groups[0], "hsdp_wbuf") else "hfsdp_helper_wbuf"  # its name from 0.19 on
    weights = [getattr(group, outer) or group.model_weight_buffer for group in groups]
    stepped = [to_local(parameter) for _, parameter in buffer.optimizer_named_parameters]
    plain = [one for group in groups if group.model_weight_buffer is None for one in group.params]
    return {
        "weights": sum(one.data.nbytes for one in (*filter(None, weights), *plain)),
        "gradients": sum(one.nbytes for one in buffer.buffer.values()),
        "master weights": sum(group.main_weight_buffer.data.nbytes for group in groups),
        "optimizer state": sum(2 * 4 * one.numel() for one in stepped),
    }


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a rank's own part of a distributed tensor."""
    return tensor.data.to_local() if hasattr(tensor.data, "to_local") else tensor.data


def main(cases: Path) -> None:
    """Write ``<name>-<rank>.json`` beside the file for each of its cases."""
    for name, case in json.loads(cases.read_text()).items():
        (cases.parent / f"{name}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(live(case)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
