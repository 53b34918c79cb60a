"""`parse_argument_values`: Megatron-LM's arguments by the names that its code has for them.

    values = parse_argument_values(parse_options(words))
    values.known["tensor_model_parallel_size"]

An option of a command line, a key of an argument file and a printed line may spell an argument
differently. The last option that sets an argument counts, as in argparse.

Source: Megatron-LM of 2026-08-22, training/arguments.py and argument_utils.py.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from bridge.precision.coercion import FALSE_WORDS
from bridge.read.launch.shell_word import ShellWord, join_words
from bridge.read.megatron_lm import flags
from bridge.read.megatron_lm.written_arguments import Option, is_open_value, list_value_words

REDUCE_IN_FP32 = "grad_reduce_in_fp32"
REDUCE_IN_BF16 = "grad_reduce_in_bf16"
ENUM_MEMBERS: Mapping[str, list[str]] = flags.TABLE.data["members"]
"""Argument that is an enum in Megatron-LM -> the names of its members, in order of their numbers."""
ENUM_PATTERN = re.compile(r"\A[A-Z]\w*\.(\w+)\Z|<\w+\.(\w+): [^>]*>")
"""A printed member of an enum: `AttnBackend.flash` if it is the value, `<AttnBackend.flash: 1>` in a list."""


@dataclass(kw_only=True, slots=True)
class ArgumentValues:
    """The arguments of a run by the names that Megatron-LM's code has for them."""

    known: dict[str, object] = field(default_factory=dict)
    """Argument -> its value; True for a switch."""
    open_values: dict[str, str] = field(default_factory=dict)
    """Argument whose value only the started run decides -> the value as it is written."""

    def set(self, name: str, value: object) -> None:
        """Set an argument. An earlier value of it is dropped."""
        self.known.pop(name, None)
        self.open_values.pop(name, None)
        if is_open_value(value):
            self.open_values[name] = str(value)
        elif isinstance(value, ShellWord):
            self.known[name] = str(value)
        else:
            self.known[name] = value

    @property
    def all(self) -> dict[str, object]:
        """Every argument -> its value. A value that only the started run decides is as it is written."""
        return self.known | self.open_values

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
    # The parser reads --grad-reduce-in-bf16 only under --bf16, where it wins over a switch for FP32.
    if values.known.get(REDUCE_IN_BF16) and not values.known.get("fp16"):
        values.set(REDUCE_IN_FP32, False)
    return values


def _parse_option(option: Option) -> Iterator[tuple[str, object]]:
    """Yield the argument that an option sets, with its value.

    Words before the first option set no argument.
    """
    if not option.name:
        return
    if option.name.startswith("--"):
        yield from _parse_command_line_option(option)
    else:
        yield _parse_key(option)


def _parse_key(option: Option) -> tuple[str, object]:
    """Return the argument that a key of a file sets, with its value."""
    name = flags.get_dest(option.name)
    flag = flags.FLAG_OF_NAME.get(name)
    argument = flags.ARGUMENT_OF_OPTION.get(name, name)
    if flag is not None and flag.kind != "off":
        argument = flag.field
    return argument, _strip_enum(name, option.value)


def _parse_command_line_option(option: Option) -> Iterator[tuple[str, object]]:
    """Yield the argument that an option of a command line sets, with its value.

    A switch whose value turns it off sets no argument.
    """
    name = flags.get_dest(option.name)
    value = _get_command_line_value(option)
    flag = flags.FLAG_OF_NAME.get(name)
    switched_off = flags.find_switched_off_argument(name)
    if name == REDUCE_IN_BF16:
        yield name, is_on(value)
    elif flag is not None:
        yield from _apply_flag(flag, value)
    elif switched_off is None:
        yield flags.ARGUMENT_OF_OPTION.get(name, name), value
    elif is_on(value):
        yield switched_off, False


def _apply_flag(flag: flags.Flag, value: object) -> Iterator[tuple[str, object]]:
    """Yield the field of a flag, with the value that the flag sets."""
    if flag.kind == "value":
        yield flag.field, value
    elif is_on(value) and flag.sets is None:
        yield flag.field, flag.kind == "on"
    elif is_on(value):
        yield flag.field, flag.sets


def _get_command_line_value(option: Option) -> object:
    """Return the value of an option on a command line; True for a switch."""
    if option.value is not None or option.is_key:
        return option.value
    words = list_value_words(option)
    if not words or flags.is_switch(option.name):
        return True
    return join_words(words)


def _strip_enum(name: str, value: object) -> object:
    """Return a value of a file or a log with the names of its enum members only.

    A checkpoint's arguments may hold the number of a member, a log its printed form.
    """
    members = ENUM_MEMBERS.get(name, ())
    if isinstance(value, int) and 0 < value <= len(members):
        return members[value - 1]
    if isinstance(value, str):
        return ENUM_PATTERN.sub(lambda member: member[1] or member[2], value)
    return value


def is_on(value: object) -> bool:
    """Return whether a value after a switch leaves the switch on: every value but `FALSE_WORDS`."""
    return str(value).lower() not in FALSE_WORDS
