"""`Problems`: the faults of a run's configuration, collected so that one error reports all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.errors import RunConfigError, close_matches, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bridge.front.origin import Origins

__all__ = ["Problems"]


class Problems:
    """Collects sentences; each names who set the value."""

    def __init__(self, origins: Origins) -> None:
        self.origins = origins
        self._sentences: list[str] = []
        self._matches: list[str] = []

    def add(self, path: str, rule: str, value: Any, remedy: str = "", matches: Iterable[str] = ()) -> None:
        """Add one fault.

        Args:
            path: The key.
            rule: A clause: "must be a whole number".
            value: The value that was found.
            remedy: One sentence; empty: "Give one."
            matches: The nearest names that exist.
        """
        remedy = remedy or "Give one."
        end = "" if remedy.endswith((".", "?")) else "."
        self._sentences.append(f"{path}: {rule}, got {value!r} ({self.origins.of(path)}). {remedy}{end}")
        self._matches.extend(matches)

    def unknown(self, path: str, value: Any, rule: str, known: Iterable[str], *, word: str | None = None) -> None:
        """Add a key that does not exist, with the nearest ones that do; `word` is the wrong part, else the last one."""
        known = list(known)
        matches = close_matches(word or path.rpartition(".")[2], known)
        hint = did_you_mean(matches) or (f"There are {', '.join(known)}." if len(known) < 15 else "Remove it.")
        self.add(path, rule, value, hint, matches)

    def raise_any(self) -> None:
        """Raise RunConfigError with everything collected so far, or do nothing."""
        if not self._sentences:
            return
        lines = self._sentences
        if len(lines) > 1:
            lines = [f"{len(lines)} settings of this run cannot be used:", *(f"  {line}" for line in lines)]
        raise RunConfigError("\n".join(lines), self._matches)
