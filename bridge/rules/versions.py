"""Versions that a rule may depend on, and the answer "unknown" where nobody has said which one it is."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from bridge.errors import RunConfigError

__all__ = ["Version", "VersionRange", "at_least", "installed", "parse_version", "shown"]

Version = tuple[int, ...]
"""(2, 8) stands for every 2.8.x: where the part that decides is missing, the answer is unknown."""

DISTRIBUTIONS = {"mcore": "megatron-core", "te": "transformer-engine"}
"""Product -> name of its installed distribution."""
TITLES = {"mcore": "megatron-core", "te": "Transformer Engine", "cuda": "CUDA", "cudnn": "cuDNN", "torch": "torch"}
"""Product -> what people call it."""


def parse_version(text: str) -> Version:
    """Return the leading numbers of a version ("2.8.0.dev0" -> (2, 8, 0)).

    Raises:
        RunConfigError: It begins with no number.
    """
    found = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    if found is None:
        raise RunConfigError(f"version: must begin with a number, got {text!r}. Write 2.8, say.")
    return tuple(int(part) for part in found[1].split("."))


def shown(version: Version) -> str:
    """Return ``2.8`` of (2, 8)."""
    return ".".join(map(str, version))


def at_least(version: Version | None, least: Version) -> bool | None:
    """Return whether `version` is `least` or later; None where it is unknown, or not known well enough."""
    if version is None:
        return None
    if version >= least:
        return True
    if version == least[: len(version)] and any(least[len(version) :]):
        return None  # 0.17 may be 0.17.0 or 0.17.1
    return version == least[: len(version)]


@functools.cache
def installed(product: str) -> Version | None:
    """Return the installed version of `mcore` or `te`, None without one. Nothing is imported for that."""
    try:
        return parse_version(installed_version(DISTRIBUTIONS[product]))
    except (PackageNotFoundError, RunConfigError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRange:
    """The versions of one product for which something holds."""

    product: str
    """mcore, te, cuda, cudnn or torch."""
    since: Version | None = None
    """First version for which it holds; None: from the beginning."""
    until: Version | None = None
    """First version for which it no longer holds; None: to this day."""

    def holds(self, version: Version | None) -> bool | None:
        """Return whether `version` is in the range; None where that is not known."""
        begun = True if self.since is None else at_least(version, self.since)
        ended = False if self.until is None else at_least(version, self.until)
        if begun is False or ended is True:
            return False
        return None if begun is None or ended is None else True

    def __str__(self) -> str:
        parts = [f"from {shown(self.since)}"] if self.since else []
        parts += [f"before {shown(self.until)}"] if self.until else []
        return f"{TITLES[self.product]} {' and '.join(parts)}"
