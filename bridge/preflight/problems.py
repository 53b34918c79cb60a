"""`Problems`: the faults found while a run is read, raised together in one error."""

from __future__ import annotations

from collections.abc import Iterable

from bridge.errors import MAX_LINES, Finding, RunConfigError, close_matches, did_you_mean
from bridge.preflight.origins import Origins
from bridge.target.fields import OWNER_FIELD_NAMES


class Problems:
    """Collects the faults of a run as sentences, each with the origin of its value.

    Args:
        origins: The sources of each key. None: a sentence names no source.
    """

    def __init__(self, origins: Origins | None = None) -> None:
        self.origins = origins or Origins()
        self._sentences: list[str] = []
        self._matches: list[str] = []

    def add(
        self,
        path: str,
        rule: str,
        value: object,
        remedy: str = "",
        matches: Iterable[str] = (),
        *,
        rule_id: str = "",
    ) -> None:
        """Add one fault.

        Args:
            path: The dotted key of the setting.
            rule: The rule that its value breaks, as a clause.
            remedy: What to do, as a sentence; empty: "Give one."
            matches: Names that may have been meant.
            rule_id: The id of a rule of the check, if the fault is one of its findings.
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
        """Add a fault for each finding."""
        for fault in faults:
            self.add(fault.path, fault.rule, fault.value, fault.remedy, rule_id=fault.id)

    def add_unknown(
        self, path: str, value: object, rule: str, known: Iterable[str], *, word: str | None = None
    ) -> None:
        """Add the fault of a key that does not exist, with the nearest known keys.

        Args:
            path: The key.
            value: The value of the key.
            rule: The rule that it breaks, as a clause: "no such field".
            known: The keys that exist.
            word: The wrong part of the key. None: its last part.
        """
        known = list(known)
        matches: list[str] = []
        # Only MAX_LINES lines are shown, and a file may have 40,000 unknown fields.
        if len(self._sentences) < MAX_LINES:
            matches = close_matches(word or path.rpartition(".")[2], known)
        for owner_name, names in OWNER_FIELD_NAMES.items():
            if path in names:  # num_layers for model.num_layers
                matches = [f"{owner_name}.{path}"]
                break
        if matches:
            hint = did_you_mean(matches)
        elif len(known) < 15:
            hint = f"There are {', '.join(known)}."
        else:
            hint = "Remove it."
        self.add(path, rule, value, hint, matches)

    def add_instantiations(self, value: object, path: str = "") -> None:
        """Add a fault for each ``_target_``, with which a config would instantiate an object.

        Args:
            value: Plain data.
            path: The dotted key of the data; empty: the whole config.
        """
        items = value
        if isinstance(value, list):
            items = dict(enumerate(value))
        if not isinstance(items, dict):
            return
        for key, inner in items.items():
            inner_path = str(key)
            if path:
                inner_path = f"{path}.{key}"
            if key == "_target_":
                rule = "configurations are data, and nothing in them is instantiated"
                remedy = "Register a recipe with recipes_from, or set the field's value."
                self.add(inner_path, rule, inner, remedy)
            self.add_instantiations(inner, inner_path)

    def raise_any(self) -> None:
        """Raise the faults that were collected, if any.

        Raises:
            RunConfigError: It has a line for each fault.
        """
        if not self._sentences:
            return
        lines = self._sentences
        if len(lines) > 1:
            lines = [f"{len(self._sentences)} settings of this run cannot be used:"]
            for sentence in self._sentences:
                lines.append(f"  {sentence}")
        raise RunConfigError("\n".join(lines), self._matches)
