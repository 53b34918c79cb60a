"""`Problems`: the faults that are found while a run is read, raised together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bridge.errors import MAX_LINES, Finding, RunConfigError, close_matches, did_you_mean
from bridge.preflight.origins import Origins
from bridge.target.fields import OWNER_FIELD_NAMES


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
        """Add one fault, with the remedy "Give one." where there is none.

        `rule_id` is the id of its rule of the check.
        """
        remedy = remedy or "Give one."
        if not remedy.endswith((".", "?")):
            remedy += "."
        shown_value = repr(value)
        if value is None:
            shown_value = "null"
        sentence = f"{path}: {rule}, got {shown_value} ({self.origins.get_origin(path)}). {remedy}"
        self._sentences.append(f"{rule_id} {sentence}".lstrip())
        self._matches.extend(matches)

    def add_all(self, faults: Iterable[Finding]) -> None:
        """Add findings, each as it would be added by itself."""
        for fault in faults:
            self.add(fault.path, fault.rule, fault.value, fault.remedy, rule_id=fault.id)

    def unknown(
        self, path: str, value: Any, rule: str, known: Iterable[str], *, word: str | None = None
    ) -> None:
        """Add a key that does not exist, with the nearest ones that do.

        `word` is the wrong part of the key; None: its last part.
        """
        known = list(known)
        matches: list[str] = []
        if len(self._sentences) < MAX_LINES:  # of a file of 40,000 fields, for example
            matches = close_matches(word or path.rpartition(".")[2], known)
        for role, names in OWNER_FIELD_NAMES.items():
            if path in names:  # num_layers for model.num_layers
                matches = [f"{role}.{path}"]
                break
        if matches:
            hint = did_you_mean(matches)
        elif len(known) < 15:
            hint = f"There are {', '.join(known)}."
        else:
            hint = "Remove it."
        self.add(path, rule, value, hint, matches)

    def refuse_targets(self, value: Any, path: str = "") -> None:
        """Add every ``_target_`` in plain data below `path`."""
        items = value
        if isinstance(value, list):
            items = dict(enumerate(value))
        if not isinstance(items, dict):
            return
        for key, inner in items.items():
            where = str(key)
            if path:
                where = f"{path}.{key}"
            if key == "_target_":
                rule = "configurations are data, and nothing in them is instantiated"
                remedy = "Register a recipe with recipes_from, or set the field's value."
                self.add(where, rule, inner, remedy)
            self.refuse_targets(inner, where)

    def raise_any(self) -> None:
        """Raise RunConfigError with everything collected so far, or do nothing."""
        if not self._sentences:
            return
        lines = self._sentences
        if len(lines) > 1:
            lines = [f"{len(self._sentences)} settings of this run cannot be used:"]
            for sentence in self._sentences:
                lines.append(f"  {sentence}")
        raise RunConfigError("\n".join(lines), self._matches)
