"""Megatron-LM's arguments by the names in its code, and the sections of a run that they become.

An argument becomes the field of the same name in every config that has one, as
`core_transformer_config_from_args`, `get_megatron_optimizer_config` and `get_megatron_ddp_config`
do it. `FIELD_OF` and `SETS` hold the others.

Source: Megatron-LM of 2026-08-22, training/arguments.py, argument_utils.py and training.py.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from bridge.errors import WrongValueError
from bridge.precision.values import NO, coerce, number_of_text
from bridge.read.launch.word import Word, joined
from bridge.read.megatron_lm import flags
from bridge.read.megatron_lm.arguments import Option, is_late
from bridge.target.fields import FIELDS

REDUCED = "grad_reduce_in_fp32"
KEPT = "grad_reduce_in_bf16"
LISTS = flags.TABLE.data["lists"]
ONE_FOR_ALL = flags.TABLE.data["one for all"]
MEMBERS = flags.TABLE.data["members"]
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
            made.values.pop(name, None)
            made.unread.pop(name, None)
            if is_late(value):
                made.unread[name] = str(value)
            elif isinstance(value, Word):
                made.values[name] = str(value)
            else:
                made.values[name] = value
    # only --bf16 reads it, and it wins there
    if made.values.get(KEPT) and not made.values.get("fp16"):
        made.unread.pop(REDUCED, None)
        made.values[REDUCED] = False
    return made


def _set_by(option: Option) -> Iterator[tuple[str, Any]]:
    """Yield the argument that an option sets, and the value.

    A switch whose value turns it off sets nothing.
    """
    name = flags.dest(option.name)
    flag = flags.BY_NAME.get(name)
    argument = flags.SPELLED.get(name, name)
    if not option.name:
        return
    if not option.name.startswith("--"):
        if flag is not None and flag.kind != "off":
            argument = flag.field
        yield argument, _plain(name, option.value)
        return
    value = _value_of(option)
    switch = flags.switched_off(name)
    if name == KEPT:
        yield name, _says_yes(value)
    elif flag is not None and flag.kind != "value":
        if _says_yes(value) and flag.sets is None:
            yield flag.field, flag.kind == "on"
        elif _says_yes(value):
            yield flag.field, flag.sets
    elif switch is None:
        yield argument if flag is None else flag.field, value
    elif _says_yes(value):
        yield switch, False


def _value_of(option: Option) -> Any:
    """Return the value of an option on a command line; True for a switch."""
    if option.value is not None or option.is_key:
        return option.value
    if not option.following or flags.is_switch(option.name):
        return True
    if flags.dest(option.name) in LISTS:
        return joined(option.following)
    return joined(option.following[:1])


def _plain(name: str, value: Any) -> Any:
    """Return a printed value with the name of a member in the place of an enum."""
    members = MEMBERS.get(name, ())
    if isinstance(value, int) and 0 < value <= len(members):
        return members[value - 1]
    if isinstance(value, str):
        return ENUM.sub(lambda member: member[1] or member[2], value)
    return value


def sections_of(arguments: Values) -> dict[str, dict[str, Any]]:
    """Return the sections that arguments become.

    A value that cannot be read is left to `arguments.unread`.
    """
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
        words = value
        if not isinstance(value, list):
            words = re.sub(r"[\[\],'\"]", " ", str(value)).split()
        values = [coerce(word, LISTS[name]) for word in words]
        if name in ONE_FOR_ALL and len(values) == 1:
            return values[0]
        return values
    if kind not in ("any", "dtype"):
        return coerce(value, kind)
    if isinstance(value, str):
        return number_of_text(value)
    return value


def _says_yes(value: Any) -> bool:
    """Return whether a value behind a switch leaves it on: every value but those of `NO`."""
    return str(value).lower() not in NO
