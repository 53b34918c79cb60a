"""References of a config (``${...}``), bounded while they are resolved.

OmegaConf resolves a reference as often as it is named, so that thirty lines of ``a: ${b}${b}`` would make a gigabyte.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf.base import Container
from omegaconf.errors import InterpolationResolutionError

MAX_REFERENCES = 2_000
"""A run's config resolves fewer than a hundred."""
MAX_CHARACTERS = 2**20
"""Of one value."""


@contextmanager
def bounded_references() -> Iterator[None]:
    """Let OmegaConf refuse references that multiply, for the length of a ``with`` block."""
    resolve, numbers = Container.resolve_parse_tree, itertools.count(1)

    def bounded(self: Container, *arguments: Any, **named: Any) -> Any:
        found = resolve(self, *arguments, **named) if next(numbers) <= MAX_REFERENCES else None
        if found is None or (isinstance(found, str) and len(found) > MAX_CHARACTERS):
            raise InterpolationResolutionError("references that multiply are refused")
        return found

    Container.resolve_parse_tree = bounded  # type: ignore[method-assign]
    try:
        yield
    finally:
        Container.resolve_parse_tree = resolve  # type: ignore[method-assign]
