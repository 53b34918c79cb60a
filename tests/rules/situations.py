"""What the tests of the check share."""

from typing import Any

from bridge.preflight.check import Setup
from bridge.target.target import parse_target


def setup_of(said: dict[str, Any]) -> Setup:
    """The setup that a row of a topic in `cases` describes."""
    said = dict(said)
    target = said.pop("target", None)
    return Setup(said.pop("precision", None), target=parse_target(target) if target else None, **said)
