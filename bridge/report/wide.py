"""A console that gives a table the width it needs: words broken over lines are harder to read than a long line."""

from __future__ import annotations

from rich.console import Console

__all__ = ["wide_console"]


def wide_console(least: int = 116) -> Console:
    """Return a console on standard output, at least `least` columns wide."""
    console = Console()
    return console if console.width >= least else Console(width=least)
