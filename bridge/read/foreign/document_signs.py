"""`DocumentSign`: settings by which a document is recognised, a row of `recognised`.

    recognised:
    - blocks: [fp16, bf16]                    # one of these is a mapping
      any: [zero_optimization, torch_autocast]  # and one of these is there
      certainty: 0.95
      evidence: has `{blocks}` as a block together with `{any}`

A setting is named from the top of its document ("fp16.enabled"). The columns:

    all        settings of which each has to be there
    any        settings of which one has to be there
    blocks     settings of which one has to be a mapping
    plain      settings of which one has to be there and be no mapping
    none       settings of which none may be there
    matches    a setting and the pattern of its whole value
    certainty  0 to 1, the highest of several systems wins
    evidence   a clause behind "it"; in braces stand the first setting of `any`, `blocks` and `plain` that is there, and
               the `value` of `matches`
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.read.text.dotted import get_dotted_value

if TYPE_CHECKING:
    from bridge.read.text.document import Document

ABSENT_VALUE = object()


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_plain(value: object) -> bool:
    return not isinstance(value, Mapping)


def _is_anything(_value: object) -> bool:
    return True


VALUE_CHECKS: Mapping[str, Callable[[object], bool]] = {
    "any": _is_anything,
    "blocks": _is_mapping,
    "plain": _is_plain,
}
"""Column of which one setting has to be there -> whether a value counts for it."""


@dataclass(frozen=True)
class Recognition:
    """Why a document is taken for a file of some system."""

    certainty: float
    """0 to 1. The highest of several systems wins; a tie is an error that names both."""
    evidence: str
    """A clause behind "it": "has `fp16.enabled` and `zero_optimization`, which only DeepSpeed reads"."""


class DocumentSign:
    """One row of `recognised`."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = columns

    def recognise(self, document: "Document") -> Recognition | None:
        """Return why a document is taken for the system's; None where the row does not fit."""
        content = document.mapping
        if not all(_has_setting(content, name) for name in self.columns.get("all", ())):
            return None
        if any(_has_setting(content, name) for name in self.columns.get("none", ())):
            return None
        facts: dict[str, str] = {}
        for column, counts in VALUE_CHECKS.items():
            if column not in self.columns:
                continue
            name = _find_first_setting(content, self.columns[column], counts)
            if name is None:
                return None
            facts[column] = name
        name, pattern = self.columns.get("matches", ("", ""))
        facts["value"] = str(get_dotted_value(content, name, ""))
        if re.fullmatch(pattern, facts["value"]) is None:
            return None
        return Recognition(self.columns["certainty"], self.columns["evidence"].format(**facts))


def recognise_by_signs(signs: Iterable[DocumentSign], document: "Document") -> Recognition | None:
    """Return why a document is taken for a system's: by the first row that fits."""
    for sign in signs:
        recognised = sign.recognise(document)
        if recognised is not None:
            return recognised
    return None


def _has_setting(
    content: object, name: str, counts: Callable[[object], bool] = _is_anything
) -> bool:
    """Return whether a setting is there with a value that counts."""
    value = get_dotted_value(content, name, ABSENT_VALUE)
    return value is not ABSENT_VALUE and counts(value)


def _find_first_setting(
    content: object, names: Iterable[str], counts: Callable[[object], bool]
) -> str | None:
    """Return the first of several settings that is there with a value that counts, or None."""
    for name in names:
        if _has_setting(content, name, counts):
            return name
    return None
