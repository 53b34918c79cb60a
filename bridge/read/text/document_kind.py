"""`detect_document_kind`: the kind of a file.

The kinds are yaml, json, toml, python, shell and env, and text for any other file.
"""

import re
from collections.abc import Sequence
from pathlib import Path

END_OF_PRINTED_ARGUMENTS = "- end of arguments -"
"""A part of the line with which Megatron-LM ends the arguments that it prints into a log."""
KIND_BY_SUFFIX = {
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".toml": "toml",
    ".py": "python",
    ".env": "env",
    ".sh": "shell",
    ".bash": "shell",
    ".slurm": "shell",
    ".sbatch": "shell",
    ".sub": "shell",
    ".slrm": "shell",
}
MAX_LINES_READ = 200
"""Lines of a file by which its kind is detected."""
SBATCH_PATTERN = re.compile(r"^#SBATCH ", re.MULTILINE)
"""A line of a Slurm script."""
ASSIGNMENT_PATTERN = re.compile(r"(export\s+)?[A-Za-z_]\w*=")
"""The beginning of a line of an env file."""
SHELL_LINE_PATTERN = re.compile(
    r"^\s*(torchrun|python3?|srun|sbatch|deepspeed|accelerate|export)\s|^\w+=\(", re.MULTILINE
)
YAML_LINE_PATTERN = re.compile(r"\s*(- )?[\"']?[\w.-]+[\"']?\s*:(\s|$)")


def detect_document_kind(path: str, text: str) -> str:
    """Return the kind of a file, by its name, or by its text if the name does not show it."""
    name = Path(path).name.lower()
    if name == ".env" or name.startswith(".env."):
        return "env"
    suffix = Path(name).suffix
    if suffix in KIND_BY_SUFFIX:
        return KIND_BY_SUFFIX[suffix]
    if END_OF_PRINTED_ARGUMENTS in text:
        return "text"
    return _detect_kind_by_start(text) or _detect_kind_by_lines(text) or "text"


def _detect_kind_by_start(text: str) -> str:
    """Return the kind by the beginning of a text. Empty if the beginning does not show it."""
    start = text.lstrip()[:400]
    if re.match(r"#!.*python", start):
        return "python"
    if start.startswith("#!") or SBATCH_PATTERN.search(start):
        return "shell"
    if start.startswith("{"):
        return "json"
    return ""


def _detect_kind_by_lines(text: str) -> str:
    """Return the kind by the form of the lines. Empty if the lines do not show it."""
    lines: list[str] = []
    for line in text.splitlines()[:MAX_LINES_READ]:
        if line.strip() and not line.lstrip().startswith("#"):
            lines.append(line)
    if lines and all(ASSIGNMENT_PATTERN.match(line) for line in lines):
        return "env"
    if SHELL_LINE_PATTERN.search(text):
        return "shell"
    if _are_mostly_yaml(lines):
        return "yaml"
    return ""


def _are_mostly_yaml(lines: Sequence[str]) -> bool:
    """Return whether more than half of the lines are keys of YAML."""
    count = 0
    for line in lines:
        if YAML_LINE_PATTERN.match(line):
            count += 1
    return count * 2 > len(lines)
