"""`find_refusals`: the words of a command line that Megatron-LM's parser refuses. The run does not start.

    --bf16 true        a switch takes no value
    --no-bf16          the parser has no negation of a switch that is off by default

A switch takes no value. Only a switch that is on by default has an option with `no-` or `disable-`
before its name. An option that no release of Megatron-LM has may be an option of the program
itself, and is not refused.

Source: Megatron-LM 0.16 to 2026-08-22, training/arguments.py parse_args and argument_utils.py
ArgumentGroupFactory.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.read.megatron_lm import flags
from bridge.read.megatron_lm.written_arguments import (
    SWITCH_VALUES,
    Option,
    WrittenArguments,
    list_value_words,
)

NO_NEGATION = "no-negation"
"""Sentence about an option that negates a switch and that the parser lacks."""
VALUE_BEHIND_SWITCH = "value-behind-a-switch"
"""Sentence about a switch that has a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A word that the parser refuses."""

    setting: str
    """The option, with its dashes."""
    value: object
    """The value after it; True for an option without a value."""
    sentence_name: str
    """The sentence about it in the table of Megatron-LM."""
    facts: Mapping[str, str]
    """Values for the placeholders of the sentence."""


def find_refusals(written: WrittenArguments) -> list[Refusal]:
    """Return the words of a command line that the parser refuses, in their order."""
    refusals: list[Refusal] = []
    for option in written.options:
        if option.is_key or not option.name.startswith("--"):
            continue
        refusal = _find_refused_negation(option) or _find_refused_value(option)
        if refusal is not None:
            refusals.append(refusal)
    return refusals


def _find_refused_negation(option: Option) -> Refusal | None:
    """Return the refusal of an option with `no-` or `disable-` that the parser lacks; None for another option."""
    name = flags.get_dest(option.name)
    switch = flags.find_negated_switch(name)
    if switch is None:
        return None
    if name in flags.load_known_arguments() or name in flags.SWITCHED_OFF_ARGUMENTS:
        return None
    return Refusal(
        setting=str(option.name),
        value=True,
        sentence_name=NO_NEGATION,
        facts={"flag": flags.format_option(switch)},
    )


def _find_refused_value(option: Option) -> Refusal | None:
    """Return the refusal of a switch that has a value; None for another option."""
    is_known = flags.get_dest(option.name) in flags.load_known_arguments()
    if not is_known or not flags.is_switch(option.name):
        return None
    words = list_value_words(option)
    if option.value is not None:
        value = str(option.value)
    elif words:
        value = str(words[0])
    else:
        return None
    meaning = "on"
    if not SWITCH_VALUES.get(value.lower(), True):
        meaning = "off"
    return Refusal(
        setting=str(option.name),
        value=value,
        sentence_name=VALUE_BEHIND_SWITCH,
        facts={"state": meaning},
    )
