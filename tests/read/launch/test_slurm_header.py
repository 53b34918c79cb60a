"""Variables that Slurm sets for a script, from the `#SBATCH` lines of its header."""

import pytest

from bridge.read.launch.script_launches import read_launches
from bridge.read.launch.slurm_header import find_slurm_variables

RUN = "torchrun --nproc-per-node 4 --nnodes $SLURM_NNODES pretrain_gpt.py --bf16"


@pytest.mark.parametrize(
    ("header", "nodes"),
    [
        ("#SBATCH --nodes=8", "8"),
        ("#SBATCH --nodes 8", "8"),
        ("#SBATCH -N 8", "8"),
        ("#SBATCH -N8 --exclusive", "8"),
        ("\n# Nodes of one switch.\n#SBATCH --job-name=a --nodes=8 # all", "8"),
        ("#SBATCH --nodes=4-8", None),
        ("#SBATCH --nodes=$NODES", None),
        ("##SBATCH --nodes=8", None),
        ("# #SBATCH --nodes=8", None),
        ("set -e\n#SBATCH --nodes=8", None),
        ("#SBATCH --ntasks-per-node=8", None),
    ],
)
def test_the_number_of_nodes_is_that_of_the_header(header: str, nodes: str | None) -> None:
    variables = find_slurm_variables(f"#!/bin/bash\n{header}\n{RUN}")
    assert (variables.get("SLURM_NNODES"), variables.get("SLURM_JOB_NUM_NODES")) == (nodes, nodes)


def test_a_launch_starts_the_processes_of_all_nodes() -> None:
    script = f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\n{RUN} --seed $SLURM_GPUS_PER_NODE"
    (launch,) = read_launches(script)
    assert launch.runner[-1] == "2"
    assert launch.arguments[-1] == "4"
    (launch,) = read_launches(script, variables={"SLURM_NNODES": "16"})
    assert launch.runner[-1] == "16"
