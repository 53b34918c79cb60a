"""`read_ray_job_environment` returns the variables that `ray job submit` gives its job.

The job has none of the variables of the script that submits it:

    ray job submit --runtime-env-json='{"env_vars": {"NVTE_FLASH_ATTN": "0"}}' -- python3 train.py

Source: Ray 2 dashboard/modules/dashboard_sdk.py, `parse_runtime_env_args`: --runtime-env-json is
JSON, --runtime-env a file of YAML, and only one of the two is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from bridge.errors import PayloadError
from bridge.read.launch.shell_word import UNKNOWN_PATTERN, ShellWord
from bridge.read.text.document import Document

RAY_SUBMIT_COMMAND = ["ray", "job", "submit"]
"""The command that submits a job; the words behind its `--` are started."""
TEXT, FILE = "--runtime-env-json", "--runtime-env"
VARIABLES_KEY = "env_vars"
DEFERRED_PLACEHOLDER = "$_"
"""Stands for a piece with quotes of its own, such as the output of a command."""


class RayJobEnvironment(NamedTuple):
    """The variables of a job."""

    variables: Mapping[str, ShellWord]
    unread: str = ""
    """The option whose variables could not be read, with the file that it names; empty: none."""


def is_ray_job(words: Sequence[str]) -> bool:
    """Return whether a command submits a job of Ray."""
    if "--" not in words:
        return False
    submitter = list(words[: words.index("--")])
    return any(
        submitter[index : index + 3] == RAY_SUBMIT_COMMAND for index in range(len(submitter))
    )


def read_ray_job_environment(
    words: Sequence[str], text_named: Callable[[ShellWord], str | None]
) -> RayJobEnvironment:
    """Return the variables of a job of Ray.

    Args:
        words: The command.
        text_named: Returns the text of a file that the command names, or None.
    """
    options: dict[str, ShellWord] = {}
    for word, following in pairwise((*words[: list(words).index("--")], "")):
        option, sign, value = word.partition("=")
        options[option] = ShellWord.from_text(value if sign else following)
    if TEXT in options:
        variables = _parse_variables(options[TEXT], TEXT, kind="json")
        if variables is None:
            return RayJobEnvironment({}, TEXT)
        return RayJobEnvironment(variables)
    if FILE in options:
        variables = None
        text = text_named(options[FILE])
        if text is not None:
            variables = _parse_variables(text, FILE, kind="yaml")
        if variables is None:
            return RayJobEnvironment({}, f"{FILE} {options[FILE]}")
        return RayJobEnvironment(variables)
    return RayJobEnvironment({})


def _parse_variables(text: str, option: str, *, kind: str) -> dict[str, ShellWord] | None:
    """Return the variables of a text, None where it is no mapping."""
    try:
        content = Document.from_text(
            UNKNOWN_PATTERN.sub(_replace_deferred, text), option, kind=kind
        ).content
    except PayloadError:
        return None
    if not isinstance(content, Mapping):
        return None
    variables = content.get(VARIABLES_KEY)
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        return None
    return {str(name): ShellWord.from_text(str(value)) for name, value in variables.items()}


def _replace_deferred(piece: re.Match[str]) -> str:
    """Return a variable as it is written, and a sign for any other piece that the run decides."""
    is_variable = bool(piece[1] or piece[2])
    return piece[0] if is_variable else DEFERRED_PLACEHOLDER
