"""`job_environment`: the variables that `ray job submit` gives its job, which has none of the script that submits it.

    ray job submit --runtime-env-json='{"env_vars": {"NVTE_FLASH_ATTN": "0"}}' -- python3 train.py

Source: Ray 2 dashboard/modules/dashboard_sdk.py, `parse_runtime_env_args`: --runtime-env-json is JSON,
--runtime-env a file of YAML, and only one of the two is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from bridge.errors import PayloadError
from bridge.read.launch.word import UNKNOWN, Word
from bridge.read.text.document import Document

SUBMIT = ["ray", "job", "submit"]
"""The command behind its `--` is started."""
TEXT, FILE = "--runtime-env-json", "--runtime-env"
VARIABLES = "env_vars"
LATE = "$_"
"""Stands for a piece with quotes of its own, such as the output of a command."""


class JobEnvironment(NamedTuple):
    """The variables of a job."""

    variables: Mapping[str, Word]
    unread: str = ""
    """The option whose variables could not be read, with its value."""


def is_job(words: Sequence[str]) -> bool:
    """Return whether a command submits a job of Ray."""
    own = list(words[: words.index("--")]) if "--" in words else []
    return any(own[place : place + 3] == SUBMIT for place in range(len(own)))


def job_environment(
    words: Sequence[str], text_of_file: Callable[[Word], str | None]
) -> JobEnvironment:
    """Return the variables of a job of Ray.

    Args:
        words: The command.
        text_of_file: Returns the text of a file that the command names, None where it is not there.
    """
    given = {}
    for word, following in pairwise((*words[: list(words).index("--")], "")):
        option, sign, value = word.partition("=")
        given[option] = Word.of(value if sign else following)
    for option in (TEXT, FILE):
        if option not in given:
            continue
        text = given[option] if option == TEXT else text_of_file(given[option])
        variables = _variables(text, option) if text is not None else None
        if variables is None:
            return JobEnvironment({}, f"{option} {given[option]}" if option == FILE else option)
        return JobEnvironment(variables)
    return JobEnvironment({})


def _variables(text: str, option: str) -> dict[str, Word] | None:
    """Return the variables of a text, None where it is no mapping."""
    plain = UNKNOWN.sub(lambda found: found[0] if found[1] or found[2] else LATE, text)
    try:
        content: Any = Document.of_text(
            plain, option, kind="json" if option == TEXT else "yaml"
        ).content
    except PayloadError:
        return None
    held = content.get(VARIABLES) if isinstance(content, Mapping) else None
    if not isinstance(content, Mapping) or not isinstance(held, Mapping | None):
        return None
    return {str(name): Word.of(str(value)) for name, value in (held or {}).items()}
