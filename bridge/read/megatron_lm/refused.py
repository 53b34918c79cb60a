"""`refused_words`: the words of a command line that Megatron-LM's parser refuses, so that the run does not start.

A switch takes no value. Only a switch that is on by default has a flag with `no-` or `disable-`
before its name. Options that no release of Megatron-LM has are a program's, and are not judged.

Source: Megatron-LM 0.16 to 2026-08-22, training/arguments.py parse_args and argument_utils.py
ArgumentGroupFactory.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bridge.read.megatron_lm import flags
from bridge.read.megatron_lm.arguments import TRUTH, Arguments, Option


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


def refused_words(run: Arguments) -> list[Refusal]:
    """Return the words of a command line that the parser refuses, in their order."""
    refusals: list[Refusal] = []
    for option in run.options:
        if option.is_key or not option.name.startswith("--"):
            continue
        refusal = _refused_negation(option) or _refused_value(option)
        if refusal is not None:
            refusals.append(refusal)
    return refusals


def _refused_negation(option: Option) -> Refusal | None:
    """Return the refusal of an option with `no-` or `disable-` whose switch has no such flag; None without one."""
    name = flags.dest(option.name)
    switch = flags.negated(name)
    if switch is None or name in flags.known_arguments() or name in flags.SWITCHED_OFF:
        return None
    facts = {"flag": flags.option_of(switch)}
    return Refusal(setting=str(option.name), value=True, row="no-negation", facts=facts)


def _refused_value(option: Option) -> Refusal | None:
    """Return the refusal of a switch with a value; None for another option."""
    value = _value_of(option)
    name = flags.dest(option.name)
    if value is None or name not in flags.known_arguments() or not flags.is_switch(option.name):
        return None
    state = "on"
    if not TRUTH.get(value.lower(), True):
        state = "off"
    return Refusal(
        setting=str(option.name), value=value, row="value-behind-a-switch", facts={"state": state}
    )


def _value_of(option: Option) -> str | None:
    """Return the value behind `=`, or a word behind the option that means on or off; None without a value."""
    if option.value is not None:
        return str(option.value)
    following = option.following[:1]
    if following and following[0].lower() in TRUTH:
        return str(following[0])
    return None
