"""`unread_options`: options that may bear on a run's layout, layers or bytes, and that nothing here reads.

An argument that Megatron-LM's parser has in some release from 0.16 on is known: what it does to a plan is read, or it
does nothing, but for the few in the table. Any other option is a program's or a fork's own. Whether it bears on them
is then told by its words: `--moe-expert-parallel-size` may, `--rollout-batch-size` does not.

`known_arguments.json` is written by ``scripts/write_megatron_arguments.py`` from the sources of these releases.
"""

import re
from collections.abc import Mapping
from typing import Any

from bridge.read.megatron_lm import flags

GROUPS = [
    (re.compile(rf"(?:^|_)(?:{row['words']})(?=_|$)", re.VERBOSE), row["opens"])
    for row in flags.TABLE.data["bears on"]
]
"""Words of an option, and the settings that it may change."""
HARMLESS = re.compile(flags.TABLE.data["harmless words"])
UNREAD: Mapping[str, list[str]] = flags.TABLE.data["unread arguments"]
OF_EXPERTS = re.compile(r"(?:^|_)(?:moe|experts?)(?:_|$)")
"""Options that change nothing in a model without experts."""
NOTHING = (None, False, "", "0", "0.0", "none", "None", "false", "False")
"""Values with which an option changes nothing."""


def unread_options(arguments: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return each option that may bear on layout, layers or bytes and is not read -> the settings that it may change.

    Args:
        arguments: Name of an argument -> its value, or the value as it is written where only the run decides it.
    """
    found = {}
    has_experts = str(arguments.get("num_experts")) not in (
        *map(str, NOTHING),
        "1",
    )  # DeepSpeed's word for a dense model
    for name, value in arguments.items():
        if not _is_neutral(name, value) and (has_experts or not OF_EXPERTS.search(name)):
            opened = _opened(name)
            if opened:
                found[name] = opened
    return found


def _opened(name: str) -> tuple[str, ...]:
    """Return the settings that an argument may change without being read."""
    if name in UNREAD:
        return tuple(UNREAD[name])
    if is_known(name) or HARMLESS.search(name):
        return ()
    opened: dict[str, None] = {}
    for words, paths in GROUPS:
        if words.search(name):
            opened |= dict.fromkeys(paths)
    return tuple(opened)


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether an option with this value is as if it were absent: off, or one rank."""
    text = str(value)
    return value in NOTHING or text in NOTHING or (name.endswith("_size") and text == "1")


def is_known(name: str) -> bool:
    """Return whether an argument is one of Megatron-LM's, or of those that another part of the reading reads."""
    own = flags.SPELLED.get(name, name)
    tables = (
        flags.known_arguments(),
        flags.BY_NAME,
        flags.SETS,
        flags.OTHER_SETTINGS,
        flags.PARALLELISM,
        flags.NOT_PRECISION,
    )
    if any(name in table for table in tables):
        return True
    if (
        f"no_{own}" in tables[0] or f"disable_{own}" in tables[0]
    ):  # its name in the parsed arguments
        return True
    return bool(flags.fields_of(own)) or flags.switched_off(name) is not None
