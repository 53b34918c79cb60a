"""`Problems`: the faults that are found while a run is read, raised together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bridge.errors import MAX_LINES, Finding, RunConfigError, close_matches, did_you_mean
from bridge.preflight.origins import Origins
from bridge.target.fields import NAMES


class Problems:
    """Collects sentences; each names who set the value."""

    def __init__(self, origins: Origins | None = None) -> None:
        self.origins = origins or Origins()
        self._sentences: list[str] = []
        self._matches: list[str] = []

    def add(
        self,
        path: str,
        rule: str,
        value: Any,
        remedy: str = "",
        matches: Iterable[str] = (),
        *,
        rule_id: str = "",
    ) -> None:
        """Add one fault, with the remedy "Give one." where there is none, and the id of its rule of the check."""
        remedy = remedy or "Give one."
        end = "" if remedy.endswith((".", "?")) else "."
        given = "null" if value is None else repr(value)
        sentence = f"{path}: {rule}, got {given} ({self.origins.of(path)}). {remedy}{end}"
        self._sentences.append(f"{rule_id} {sentence}".lstrip())
        self._matches.extend(matches)

    def add_all(self, faults: Iterable[Finding]) -> None:
        """Add findings, each as it would be added by itself."""
        for one in faults:
            self.add(one.path, one.rule, one.value, one.remedy, rule_id=one.id)

    def unknown(
        self, path: str, value: Any, rule: str, known: Iterable[str], *, word: str | None = None
    ) -> None:
        """Add a key that does not exist, with the nearest ones that do; `word` is the wrong part, else the last one."""
        known = list(known)
        is_shown = len(self._sentences) < MAX_LINES  # of a file of 40,000 fields, for example
        matches = close_matches(word or path.rpartition(".")[2], known) if is_shown else []
        section = next(
            (role for role in NAMES if path in NAMES[role]), None
        )  # num_layers for model.num_layers
        if section is not None:
            matches = [f"{section}.{path}"]
        hint = did_you_mean(matches) or (
            f"There are {', '.join(known)}." if len(known) < 15 else "Remove it."
        )
        self.add(path, rule, value, hint, matches)

    def refuse_targets(self, value: Any, path: str = "") -> None:
        """Add every ``_target_`` in plain data below `path`."""
        items = dict(enumerate(value)) if isinstance(value, list) else value
        if not isinstance(items, dict):
            return
        for key, inner in items.items():
            where = f"{path}.{key}" if path else str(key)
            if key == "_target_":
                rule = "configurations are data, and nothing in them is instantiated"
                self.add(
                    where,
                    rule,
                    inner,
                    "Register a recipe with recipes_from, or set the field's value.",
                )
            self.refuse_targets(inner, where)

    def raise_any(self) -> None:
        """Raise RunConfigError with everything collected so far, or do nothing."""
        if not self._sentences:
            return
        lines = self._sentences
        if len(lines) > 1:
            lines = [
                f"{len(lines)} settings of this run cannot be used:",
                *(f"  {line}" for line in lines),
            ]
        raise RunConfigError("\n".join(lines), self._matches)
