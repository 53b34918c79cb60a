"""`parse_argument_values`: Megatron-LM's arguments by the names that its code has for them.

    values_of(options_of(words)).known["tensor_model_parallel_size"]

An option of a command line, a key of an argument file and a printed line may spell an argument
differently. The last option that sets an argument counts, as in argparse.

Source: Megatron-LM of 2026-08-22, training/arguments.py and argument_utils.py.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bridge.precision.coercion import FALSE_WORDS
from bridge.read.launch.shell_word import ShellWord, join_words
from bridge.read.megatron_lm import flags
from bridge.read.megatron_lm.written_arguments import Option, is_late

REDUCE_IN_FP32 = "grad_reduce_in_fp32"
REDUCE_IN_BF16 = "grad_reduce_in_bf16"
LIST_TYPES = flags.TABLE.data["lists"]
"""Argument that takes several values -> their type."""
ENUM_MEMBERS = flags.TABLE.data["members"]
"""Argument that is an enum in Megatron-LM -> the names of its members, in order of their numbers."""
ENUM_PATTERN = re.compile(r"\A[A-Z]\w*\.(\w+)\Z|<\w+\.(\w+): [^>]*>")
"""A member of an enum as it is printed, by itself or in a list."""


@dataclass(kw_only=True, slots=True)
class ArgumentValues:
    """The arguments of a run by the names that Megatron-LM's code has for them."""

    known: dict[str, Any] = field(default_factory=dict)
    """Argument -> its value; True for a switch."""
    late: dict[str, str] = field(default_factory=dict)
    """Argument whose value only the run decides -> the value as it is written."""

    def set(self, name: str, value: Any) -> None:
        """Set an argument over an earlier value of it."""
        self.known.pop(name, None)
        self.late.pop(name, None)
        if is_late(value):
            self.late[name] = str(value)
        elif isinstance(value, ShellWord):
            self.known[name] = str(value)
        else:
            self.known[name] = value

    @property
    def all(self) -> dict[str, Any]:
        """Every argument -> its value, as it is written where only the run decides it."""
        return self.known | self.late

    @property
    def mode(self) -> str:
        """The mode that the arguments state: bf16, fp16, or else fp32."""
        for name in ("fp16", "bf16"):
            if self.known.get(name):
                return name
        return "fp32"


def parse_argument_values(options: Iterable[Option]) -> ArgumentValues:
    """Return options by the names of their arguments."""
    values = ArgumentValues()
    for option in options:
        for name, value in _parse_option(option):
            values.set(name, value)
    # --grad-reduce-in-bf16 is read under --bf16 alone, and wins there
    if values.known.get(REDUCE_IN_BF16) and not values.known.get("fp16"):
        values.set(REDUCE_IN_FP32, False)
    return values


def _parse_option(option: Option) -> Iterator[tuple[str, Any]]:
    """Yield the argument that an option sets, with its value; nothing for words before the first option."""
    if not option.name:
        return
    if option.name.startswith("--"):
        yield from _parse_command_line_option(option)
    else:
        yield _parse_key(option)


def _parse_key(option: Option) -> tuple[str, Any]:
    """Return the argument that a key of a file sets, with its value."""
    name = flags.get_dest(option.name)
    flag = flags.FLAG_OF_NAME.get(name)
    argument = flags.ARGUMENT_OF_OPTION.get(name, name)
    if flag is not None and flag.kind != "off":
        argument = flag.field
    return argument, _strip_enum(name, option.value)


def _parse_command_line_option(option: Option) -> Iterator[tuple[str, Any]]:
    """Yield the argument that an option of a command line sets, with its value.

    A switch whose value turns it off sets nothing.
    """
    name = flags.get_dest(option.name)
    flag = flags.FLAG_OF_NAME.get(name)
    switch = flags.find_switched_off_argument(name)
    value = _get_command_line_value(option)
    if name == REDUCE_IN_BF16:
        yield name, is_on(value)
    elif flag is not None and flag.kind == "value":
        yield flag.field, value
    elif flag is not None:
        if is_on(value) and flag.sets is None:
            yield flag.field, flag.kind == "on"
        elif is_on(value):
            yield flag.field, flag.sets
    elif switch is None:
        yield flags.ARGUMENT_OF_OPTION.get(name, name), value
    elif is_on(value):
        yield switch, False


def _get_command_line_value(option: Option) -> Any:
    """Return the value of an option on a command line; True for a switch."""
    if option.value is not None or option.is_key:
        return option.value
    if not option.following or flags.is_switch(option.name):
        return True
    if flags.get_dest(option.name) in LIST_TYPES:
        return join_words(option.following)
    return join_words(option.following[:1])


def _strip_enum(name: str, value: Any) -> Any:
    """Return a printed value with the name of a member in the place of an enum."""
    members = ENUM_MEMBERS.get(name, ())
    if isinstance(value, int) and 0 < value <= len(members):
        return members[value - 1]
    if isinstance(value, str):
        return ENUM_PATTERN.sub(lambda member: member[1] or member[2], value)
    return value


def is_on(value: Any) -> bool:
    """Return whether a value behind a switch leaves it on: every value but those of `NO`."""
    return str(value).lower() not in FALSE_WORDS
