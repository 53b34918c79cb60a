"""The number of processes that a launch of torchrun or DeepSpeed starts."""

from __future__ import annotations

import pytest

from bridge.read.launch.launched_ranks import count_launched_ranks
from bridge.read.launch.script_launches import read_launches


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("torchrun --nproc_per_node 8", 8),
        ("torchrun --nproc-per-node=8 --nnodes=2", 16),
        ("python -m torch.distributed.run --nnodes 2 --nproc_per_node 4", 8),
        ("torchrun", 1),
        ("torchrun --nproc_per_node gpu", None),
        ("torchrun --nproc_per_node 8 --nnodes 1:4", None),
        ("torchrun --nproc_per_node 8 --nnodes $NODES", None),
        ("deepspeed --num_nodes 2 --num_gpus=4", 8),
        ("deepspeed --num_gpus 4", 4),
        ("deepspeed --hostfile hosts --num_gpus 4", None),
        ("deepspeed --hostfile hosts --num_nodes 2 --num_gpus 4", 8),
        ("deepspeed", None),
        ("srun -N 2", None),
        ("python", None),
    ],
)
def test_processes_are_those_of_a_node_times_the_nodes(launcher: str, ranks: int | None) -> None:
    (launch,) = read_launches(f"{launcher} pretrain_gpt.py --num-layers 2 --bf16\n", "run.sh")
    assert count_launched_ranks(launch.runner) == ranks
