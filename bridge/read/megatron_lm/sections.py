"""Megatron-LM's arguments by the names that its own code has for them, and the sections of a run that they become.

An argument becomes the field of the same name in every config that has one, as `core_transformer_config_from_args`,
`get_megatron_optimizer_config` and `get_megatron_ddp_config` do it. `FIELD_OF` and `SETS` hold the others.

Source: Megatron-LM of 2026-08-22, training/arguments.py, argument_utils.py and training.py.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from bridge.errors import WrongValueError
from bridge.precision.values import NO, YES, coerce, number_of_text
from bridge.read.launch.word import Word, joined
from bridge.read.megatron_lm import flags
from bridge.read.megatron_lm.arguments import Option, is_late
from bridge.target.fields import FIELDS

REDUCED, KEPT = "grad_reduce_in_fp32", "grad_reduce_in_bf16"
LISTS, ONE_FOR_ALL, MEMBERS = (
    flags.TABLE.data[name] for name in ("lists", "one for all", "members")
)
ENUM = re.compile(r"\A[A-Z]\w*\.(\w+)\Z|<\w+\.(\w+): [^>]*>")
"""A member of an enum as it is printed, by itself or in a list."""


class Values(NamedTuple):
    """The arguments of one run by the names that Megatron-LM's code has for them."""

    values: dict[str, Any]
    """Argument -> its value; True for a switch."""
    unread: dict[str, str]
    """Argument whose value only the run decides -> its value as it is written."""


def values_of(options: Iterable[Option]) -> Values:
    """Return options by the names of their arguments; of several that set one, the last counts."""
    made = Values({}, {})
    for option in options:
        for name, value in _set_by(option):
            for held in made:
                held.pop(name, None)
            (made.unread if is_late(value) else made.values)[name] = (
                str(value) if isinstance(value, Word) else value
            )
    if made.values.get(KEPT) and not made.values.get(
        "fp16"
    ):  # only --bf16 reads it, and it wins there
        made.unread.pop(REDUCED, None)
        made.values[REDUCED] = False
    return made


def _set_by(option: Option) -> Iterator[tuple[str, Any]]:
    """Yield the argument that an option sets, and the value; none for a switch with a value that says no."""
    name, value, flag = (
        flags.dest(option.name),
        option.value,
        flags.BY_NAME.get(flags.dest(option.name)),
    )
    own = flags.SPELLED.get(name, name)
    if not option.name.startswith("--"):
        if option.name:
            yield own if flag is None or flag.kind == "off" else flag.field, _plain(name, value)
        return
    if value is None and not option.is_key:
        is_alone = not option.following or flags.is_switch(option.name)
        words = option.following if name in LISTS else option.following[:1]
        value = True if is_alone else joined(words)
    switch = flags.switched_off(name)
    if name == KEPT:
        yield name, _says_yes(value)
    elif flag is not None and flag.kind != "value":
        if _says_yes(value):
            yield flag.field, flag.kind == "on" if flag.sets is None else flag.sets
    elif switch is None:
        yield own if flag is None else flag.field, value
    elif _says_yes(value):
        yield switch, False


def _plain(name: str, value: Any) -> Any:
    """Return a printed value with the name of a member in the place of an enum."""
    members = MEMBERS.get(name, ())
    if isinstance(value, int) and 0 < value <= len(members):
        return members[value - 1]
    return ENUM.sub(lambda found: found[1] or found[2], value) if isinstance(value, str) else value


def sections_of(arguments: Values) -> dict[str, dict[str, Any]]:
    """Return the sections that arguments become; a value that cannot be read is left to `arguments.unread`."""
    made: dict[str, dict[str, Any]] = {role: {} for role in (*flags.OWNERS, "train")}
    for name, value in arguments.values.items():
        if name in flags.SETS and _says_yes(value):
            made["model"] |= flags.SETS[name]
    for name, value in arguments.values.items():
        for path in flags.fields_of(name):
            role, _, attribute = path.partition(".")
            try:
                made[role][attribute] = _value(attribute, FIELDS[role][attribute].kind, value)
            except WrongValueError:
                arguments.unread[name] = str(value)
    if not _says_yes(arguments.values.get("group_query_attention", False)):
        made["model"].pop("num_query_groups", None)
    if "hybrid_layer_pattern" in made["model"]:
        made["model"]["is_hybrid_model"] = True
    return made


def _value(name: str, kind: str, value: Any) -> Any:
    """Return the value of a field; WrongValueError for one that is none."""
    if name in LISTS:
        given = value if isinstance(value, list) else re.sub(r"[\[\],'\"]", " ", str(value)).split()
        several = [coerce(one, LISTS[name]) for one in given]
        return several[0] if name in ONE_FOR_ALL and len(several) == 1 else several
    if kind in ("any", "dtype"):
        return number_of_text(value) if isinstance(value, str) else value
    return coerce(value, kind)


def _says_yes(value: Any) -> bool:
    """Return whether a value behind a switch leaves it on; a word that says neither is a word of its own."""
    text = str(value).lower()
    return text in YES or text not in NO
