"""`find_unread_options`: options that may change a run's layout, layers or bytes and that are not read.

    find_unread_options({"moe_expert_parallel_size": 8})    # the option -> the settings that it may change

There are three kinds of options:

- An argument that Megatron-LM's parser has in some release from 0.16 on is known. Its effect on a
  plan is read, or it has none. `UNREAD_ARGUMENTS` has the exceptions.
- An option with words of `WORD_GROUPS` in its name may change the settings of that group:
  `--moe-expert-parallel-size` for example.
- Any other option is read by the program alone and is harmless: `--rollout-batch-size` for example.

`known_arguments.json` is written by ``scripts/write_megatron_arguments.py`` from the sources of
these releases.
"""

import re
from collections.abc import Mapping, Sequence

from bridge.read.megatron_lm import flags
from bridge.read.megatron_lm.written_arguments import WrittenArguments

WORD_GROUPS: list[tuple[re.Pattern[str], Sequence[str]]] = [
    (re.compile(rf"(?:^|_)(?:{row['words']})(?=_|$)", re.VERBOSE), row["opens"])
    for row in flags.TABLE.data["bears on"]
]
"""Words in the name of an option, and the settings that such an option may change."""
HARMLESS_WORDS = re.compile(flags.TABLE.data["harmless words"])
"""Words in the name of an option that changes no such setting."""
UNREAD_ARGUMENTS: Mapping[str, list[str]] = flags.TABLE.data["unread arguments"]
"""Argument of Megatron-LM that is not read -> the settings that it may change."""
EXPERT_OPTION = re.compile(r"(?:^|_)(?:moe|experts?)(?:_|$)")
"""Options that change nothing in a model without experts."""
OFF_VALUES = (None, False, "", "0", "0.0", "none", "None", "false", "False")
"""Values with which an option changes nothing."""
DENSE_EXPERT_COUNTS = (*map(str, OFF_VALUES), "1")
"""Values of `num_experts` for a dense model. DeepSpeed writes 1 for it."""


def find_unread_options(arguments: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Return each option that may change layout, layers or bytes and is not read -> the settings that it may change.

    Args:
        arguments: Name of an argument -> its value. A value that is decided when the run starts is as
            it is written.
    """
    has_experts = str(arguments.get("num_experts")) not in DENSE_EXPERT_COUNTS
    unread: dict[str, tuple[str, ...]] = {}
    for name, value in arguments.items():
        if _is_neutral(name, value):
            continue
        if EXPERT_OPTION.search(name) and not has_experts:
            continue
        settings = _get_settings(name)
        if settings:
            unread[name] = settings
    return unread


def find_misspelt_options(
    written: WrittenArguments, arguments: Mapping[str, object]
) -> dict[str, str]:
    """Return each option that differs from an argument's name by a letter or two -> that argument.

    A run that printed all arguments has none, since its parser had them all.

    Args:
        written: The arguments as they are written.
        arguments: Name of an argument -> its value.
    """
    if written.has_every_default:
        return {}
    return flags.find_misspelt(arguments)


def _get_settings(name: str) -> tuple[str, ...]:
    """Return the settings that an option may change without being read, each once."""
    if name in UNREAD_ARGUMENTS:
        return tuple(UNREAD_ARGUMENTS[name])
    if is_known_option(name) or HARMLESS_WORDS.search(name):
        return ()
    settings: list[str] = []
    for words, paths in WORD_GROUPS:
        if words.search(name):
            settings.extend(paths)
    return tuple(dict.fromkeys(settings))


def _is_neutral(name: str, value: object) -> bool:
    """Return whether an option with this value acts as if it were absent: off, or the size of a single rank."""
    text = str(value)
    is_one_rank = name.endswith("_size") and text == "1"
    return is_one_rank or value in OFF_VALUES or text in OFF_VALUES


def is_known_option(name: str) -> bool:
    """Return whether an option is an argument of Megatron-LM, or is read by another part of the reader."""
    parser_arguments = flags.load_known_arguments()
    tables = (
        parser_arguments,
        flags.FLAG_OF_NAME,
        flags.FIELDS_OF_SWITCH,
        flags.OTHER_SETTINGS,
        flags.PARALLELISM_SWITCHES,
        flags.NON_PRECISION_NAMES,
    )
    if any(name in table for table in tables):
        return True
    argument = flags.ARGUMENT_OF_OPTION.get(name, name)
    # A log prints the plain name of a switch that the parser has only in its negated form.
    if f"no_{argument}" in parser_arguments or f"disable_{argument}" in parser_arguments:
        return True
    return (
        bool(flags.get_argument_fields(argument))
        or flags.find_switched_off_argument(name) is not None
    )
