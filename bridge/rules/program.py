"""`Program`: the program that starts a run, as far as rules ask about it."""

from collections.abc import Sequence
from dataclasses import dataclass

from bridge.errors import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """The program that starts a run, and its command line."""

    is_own: bool = False
    """It is scripts/train.py, whose build does not honour every field."""
    is_bridge: bool = False
    """It is Megatron Bridge, which wrote the run's file."""
    is_resumed: bool = False
    """It reads a checkpoint."""
    refused: Sequence[Finding] = ()
    """Words of the command line that its parser refuses."""
    not_forwarded: Sequence[Finding] = ()
    """Settings of the run's file that its framework does not forward, or hands to other modules than they say."""
