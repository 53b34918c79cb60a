"""`precision-bridge train [OVERRIDES]`: the training script, with the config tree here or the one of this package."""

from __future__ import annotations

from typing import Any

__all__ = ["NAME", "add_parser", "run"]

NAME = "train"


def add_parser(commands: Any) -> None:
    """List the command; `run` reads its words, which are Hydra's."""
    commands.add_parser(NAME, add_help=False, help="train in the precision of a recipe, as scripts/train.py does")


def run(words: list[str]) -> int:
    """Train; a run that fails ends the process with its exit code."""
    from bridge.front.train import main_train  # Hydra is heavy

    main_train(words)
    return 0
