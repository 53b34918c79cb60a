"""`job_environment` returns the variables that `ray job submit` gives its job.

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
from bridge.read.launch.word import UNKNOWN, Word
from bridge.read.text.document import Document

SUBMIT = ["ray", "job", "submit"]
"""The command that submits a job; the words behind its `--` are started."""
TEXT, FILE = "--runtime-env-json", "--runtime-env"
VARIABLES = "env_vars"
LATE = "$_"
"""Stands for a piece with quotes of its own, such as the output of a command."""


class JobEnvironment(NamedTuple):
    """The variables of a job."""

    variables: Mapping[str, Word]
    unread: str = ""
    """The option whose variables could not be read, with the file that it names; empty: none."""


def is_job(words: Sequence[str]) -> bool:
    """Return whether a command submits a job of Ray."""
    if "--" not in words:
        return False
    submitter = list(words[: words.index("--")])
    return any(submitter[place : place + 3] == SUBMIT for place in range(len(submitter)))


def job_environment(
    words: Sequence[str], text_named: Callable[[Word], str | None]
) -> JobEnvironment:
    """Return the variables of a job of Ray.

    Args:
        words: The command.
        text_named: Returns the text of a file that the command names, or None.
    """
    options: dict[str, Word] = {}
    for word, following in pairwise((*words[: list(words).index("--")], "")):
        option, sign, value = word.partition("=")
        options[option] = Word.of(value if sign else following)
    if TEXT in options:
        variables = _variables(options[TEXT], TEXT, kind="json")
        if variables is None:
            return JobEnvironment({}, TEXT)
        return JobEnvironment(variables)
    if FILE in options:
        variables = None
        text = text_named(options[FILE])
        if text is not None:
            variables = _variables(text, FILE, kind="yaml")
        if variables is None:
            return JobEnvironment({}, f"{FILE} {options[FILE]}")
        return JobEnvironment(variables)
    return JobEnvironment({})


def _variables(text: str, option: str, *, kind: str) -> dict[str, Word] | None:
    """Return the variables of a text, None where it is no mapping."""
    try:
        content = Document.of_text(UNKNOWN.sub(_plain, text), option, kind=kind).content
    except PayloadError:
        return None
    if not isinstance(content, Mapping):
        return None
    variables = content.get(VARIABLES)
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        return None
    return {str(name): Word.of(str(value)) for name, value in variables.items()}


def _plain(piece: re.Match[str]) -> str:
    """Return a variable as it is written, and a sign for any other piece that the run decides."""
    is_variable = bool(piece[1] or piece[2])
    return piece[0] if is_variable else LATE
