"""`find_slurm_variables`: the variables that Slurm sets for a script, from the header of the script.

    find_slurm_variables("#SBATCH --nodes=4")
    # {"SLURM_NNODES": "4", "SLURM_JOB_NUM_NODES": "4"}

Slurm reads the lines before the first command. Only a plain number is read: with a range of nodes
Slurm decides.

Source: Slurm 24.05, the pages of sbatch about its options and its output environment variables.
"""

from __future__ import annotations

import re

DIRECTIVE_PATTERN = re.compile(r"#SBATCH\s+(?P<options>.*)")
NUMBER_PATTERN = re.compile(
    r"(?<!\S)(?P<name>--nodes|-N|--gpus-per-node)(?:=|\s*)(?P<number>\d+)(?!\S)"
)
"""An option with a plain number, of the options below."""
VARIABLES_OF_OPTION = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "-N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE",),
}
"""Option of sbatch -> the variables that have its value."""


def find_slurm_variables(text: str) -> dict[str, str]:
    """Return the variables that the header of a script decides; none without a header."""
    variables: dict[str, str] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        directive = DIRECTIVE_PATTERN.match(line)
        if directive is None:
            continue
        for option in NUMBER_PATTERN.finditer(directive["options"]):
            for name in VARIABLES_OF_OPTION[option["name"]]:
                variables[name] = option["number"]
    return variables
