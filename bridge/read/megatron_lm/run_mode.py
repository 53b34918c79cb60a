"""`RunMode`: the mode that a run has by its arguments, and the source that decides it.

find_run_mode(parse_runs(["--bf16"])[0])    # RunMode("bf16", ModeSource.SWITCH)
"""

from enum import Enum, auto
from typing import NamedTuple

from bridge.read.megatron_lm.written_arguments import WrittenArguments


class ModeSource(Enum):
    """A source that decides the mode of a run."""

    SWITCH = auto()
    """`--bf16` or `--fp16`."""
    FRAMEWORK = auto()
    """The code of the run's framework."""
    DEFAULT = auto()
    """The default of Megatron-LM's parser."""
    ENGINE = auto()
    """The JSON of DeepSpeed's engine."""
    UNREAD = auto()
    """A source that is not read: `WrittenArguments.mode_decider`."""


class RunMode(NamedTuple):
    """The mode of a run."""

    name: str
    """bf16, fp16 or fp32; fp32 for a source that is not read."""
    source: ModeSource


def find_run_mode(written: WrittenArguments) -> RunMode:
    """Return the mode of a run that no engine of DeepSpeed decides.

    The switches decide, then the framework, then a source that is not read, and at last
    Megatron-LM's default. If both switches are on, `--bf16` counts.
    """
    for name in ("bf16", "fp16"):
        if name in written:
            return RunMode(name, ModeSource.SWITCH)
    is_whole = not written.open_words and not written.launch.unread_sources
    framework = written.framework
    if framework is not None and framework.mode and is_whole:
        return RunMode(framework.mode, ModeSource.FRAMEWORK)
    if written.mode_decider and not _has_switch_turned_off(written):
        return RunMode("fp32", ModeSource.UNREAD)
    return RunMode("fp32", ModeSource.DEFAULT)


def _has_switch_turned_off(written: WrittenArguments) -> bool:
    """Return whether the arguments turn a switch of a mode off."""
    switches = [written.settings[name] for name in ("fp16", "bf16") if name in written.settings]
    return any(switch.value is False for switch in switches)
