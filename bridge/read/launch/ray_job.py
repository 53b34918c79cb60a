"""`read_ray_job_environment`: the environment that `ray job submit` gives its job.

The job has none of the variables of the script that submits it. It has those of one option:

    ray job submit --runtime-env-json='{"env_vars": {"NVTE_FLASH_ATTN": "0"}}' -- python3 train.py

Source: Ray 2 dashboard/modules/dashboard_sdk.py, `parse_runtime_env_args`: --runtime-env-json is
JSON, --runtime-env a file of YAML, and only one of the two is taken. The file is not read: of 1,956
shell scripts of public repositories a single script has this option.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from bridge.errors import PayloadError
from bridge.read.launch.bash.environment import ProgramEnvironment
from bridge.read.launch.shell_word import OPEN_PIECE_PATTERN, UNKNOWN_VARIABLE, ShellWord
from bridge.read.text.document import Document

RAY_SUBMIT_COMMAND = ["ray", "job", "submit"]
"""The command that submits a job; the words after its `--` are started."""
JSON_OPTION = "--runtime-env-json"
FILE_OPTION = "--runtime-env"
VARIABLES_KEY = "env_vars"


def is_ray_job(words: Sequence[str]) -> bool:
    """Return whether a command submits a Ray job."""
    if "--" not in words:
        return False
    submitter = list(words[: words.index("--")])
    return any(
        submitter[index : index + 3] == RAY_SUBMIT_COMMAND for index in range(len(submitter))
    )


def read_ray_job_environment(words: Sequence[str]) -> ProgramEnvironment:
    """Return the environment of a Ray job.

    Args:
        words: The command, for which `is_ray_job` is True.
    """
    options: dict[str, ShellWord] = {}
    before_job = words[: list(words).index("--")]
    for word, next_word in pairwise((*before_job, "")):
        option, sign, value = word.partition("=")
        if not sign:
            value = next_word
        options[option] = ShellWord.from_text(value)
    if JSON_OPTION in options:
        variables = _parse_variables(options[JSON_OPTION])
        if variables is None:
            return ProgramEnvironment({}, JSON_OPTION)
        return ProgramEnvironment(variables)
    if FILE_OPTION in options:
        return ProgramEnvironment({}, f"{FILE_OPTION} {options[FILE_OPTION]}")
    return ProgramEnvironment({})


def _parse_variables(text: str) -> dict[str, ShellWord] | None:
    """Return the variables of a runtime environment.

    Args:
        text: The JSON of the environment.

    Returns:
        None if the text cannot be parsed, or if it is no mapping.
    """
    parseable = OPEN_PIECE_PATTERN.sub(_replace_deferred, text)
    try:
        content = Document.from_text(parseable, JSON_OPTION, kind="json").content
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
    """Return a variable as it is written, and an unknown variable for any other deferred piece.

    The quotes of a piece such as `$(cat "file")` would end the string of the JSON around it.
    """
    is_variable = bool(piece[1] or piece[2])
    if is_variable:
        return piece[0]
    return UNKNOWN_VARIABLE
