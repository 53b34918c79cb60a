"""`find_refusals`: the words of a command line that Megatron-LM's parser refuses, so that the run does not start.

A switch takes no value. Only a switch that is on by default has a flag with `no-` or `disable-`
before its name. Options that no release of Megatron-LM has are a program's, and are not judged.

Source: Megatron-LM 0.16 to 2026-08-22, training/arguments.py parse_args and argument_utils.py
ArgumentGroupFactory.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.read.megatron_lm import flags
from bridge.read.megatron_lm.written_arguments import SWITCH_VALUES, Option, WrittenArguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A word that the parser refuses."""

    setting: str
    """The option, with its dashes."""
    value: object
    """The value after it; True for an option without a value."""
    row: str
    """The sentence about it in the table of Megatron-LM."""
    facts: Mapping[str, str]
    """Words that stand in the sentence."""


def find_refusals(run: WrittenArguments) -> list[Refusal]:
    """Return the words of a command line that the parser refuses, in their order."""
    refusals: list[Refusal] = []
    for option in run.options:
        if option.is_key or not option.name.startswith("--"):
            continue
        refusal = _find_refused_negation(option) or _find_refused_value(option)
        if refusal is not None:
            refusals.append(refusal)
    return refusals


def _find_refused_negation(option: Option) -> Refusal | None:
    """Return the refusal of an option with `no-` or `disable-` whose switch has no such flag; None without one."""
    name = flags.get_dest(option.name)
    switch = flags.find_negated_switch(name)
    if (
        switch is None
        or name in flags.load_known_arguments()
        or name in flags.SWITCHED_OFF_ARGUMENTS
    ):
        return None
    facts = {"flag": flags.format_option(switch)}
    return Refusal(setting=str(option.name), value=True, row="no-negation", facts=facts)


def _find_refused_value(option: Option) -> Refusal | None:
    """Return the refusal of a switch with a value; None for another option."""
    value = _find_value(option)
    name = flags.get_dest(option.name)
    if (
        value is None
        or name not in flags.load_known_arguments()
        or not flags.is_switch(option.name)
    ):
        return None
    state = "on"
    if not SWITCH_VALUES.get(value.lower(), True):
        state = "off"
    return Refusal(
        setting=str(option.name), value=value, row="value-behind-a-switch", facts={"state": state}
    )


def _find_value(option: Option) -> str | None:
    """Return the value behind `=`, or a word behind the option that means on or off; None without a value."""
    if option.value is not None:
        return str(option.value)
    following = option.following[:1]
    if following and following[0].lower() in SWITCH_VALUES:
        return str(following[0])
    return None
