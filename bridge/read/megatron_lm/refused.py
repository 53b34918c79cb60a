"""`refused_words`: the words of a command line that Megatron-LM's parser refuses, so that the run does not start.

A switch takes no value, and only a switch that is on by itself has a flag with `no-` or `disable-`
before its name. Options that no release of Megatron-LM has are a program's own, and are not judged.

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
    """The value after it; True for an option without one."""
    row: str
    """The sentence about it in the table of Megatron-LM."""
    facts: Mapping[str, str]
    """Words that stand in the sentence."""


def refused_words(run: Arguments) -> list[Refusal]:
    """Return the words of one run that the parser refuses, in their order.

    Keys of a mapping are no words of it.
    """
    found = []
    for option in run.options:
        if option.is_key or not option.name.startswith("--"):
            continue
        name, value = flags.dest(option.name), _value_of(option)
        negated = flags.negated(name)
        if (
            negated is not None
            and name not in flags.known_arguments()
            and name not in flags.SWITCHED_OFF
        ):
            facts = {"flag": f"--{negated.replace('_', '-')}"}
            found.append(
                Refusal(setting=str(option.name), value=True, row="no-negation", facts=facts)
            )
        elif value is not None and name in flags.known_arguments() and flags.is_switch(option.name):
            state = "on"
            if not TRUTH.get(value.lower(), True):
                state = "off"
            found.append(
                Refusal(
                    setting=str(option.name), value=value, row="refused", facts={"state": state}
                )
            )
    return found


def _value_of(option: Option) -> str | None:
    """Return the value that an option is given after `=`, or as a word that says on or off.

    None without one.
    """
    if option.value is not None:
        return str(option.value)
    following = option.following[:1]
    if following and following[0].lower() in TRUTH:
        return str(following[0])
    return None
