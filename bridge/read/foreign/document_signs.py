"""`DocumentSign`: the settings by which a document is recognised, a row of `recognised` in a table.

    recognised:
    - blocks: [fp16, bf16]                      # the file has a mapping of one of these names
      any: [zero_optimization, torch_autocast]  # and has one of these settings
      certainty: 0.95
      evidence: has `{blocks}` as a block together with `{any}`

A setting is named from the top of its document ("fp16.enabled"). All columns of a row have to fit:

    all        settings that the file has, each of them
    any        settings of which the file has one
    blocks     settings of which one is a mapping
    plain      settings of which one has another value than a mapping
    none       settings that the file does not have
    matches    a setting, and the pattern of its complete value
    certainty  0 to 1; the system with the highest certainty wins
    evidence   a clause after "it"; braces name the first setting that fits `any`, `blocks` or
               `plain`, and `{value}` is the value that fits `matches`
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.read.text.dotted import get_dotted_value

if TYPE_CHECKING:
    from bridge.read.text.document import Document

ABSENT_VALUE = object()
"""The value of an absent setting. It is not None, because a setting can have the value None."""


def _is_mapping(value: object) -> bool:
    """Return whether a value is a mapping: it fits `blocks`."""
    return isinstance(value, Mapping)


def _is_plain(value: object) -> bool:
    """Return whether a value is not a mapping: it fits `plain`."""
    return not isinstance(value, Mapping)


def _is_anything(_value: object) -> bool:
    """Return True: any value fits `any`."""
    return True


VALUE_CHECKS: Mapping[str, Callable[[object], bool]] = {
    "any": _is_anything,
    "blocks": _is_mapping,
    "plain": _is_plain,
}
"""Column of which one setting has to fit -> whether a value fits it."""


@dataclass(frozen=True)
class Recognition:
    """The certainty that a document is a file of a system, with the evidence."""

    certainty: float
    """0 to 1. The system with the highest certainty wins. A tie is an error that names both."""
    evidence: str
    """A clause after "it", such as "has `fp16.enabled`, which only DeepSpeed reads"."""


class DocumentSign:
    """One row of `recognised`."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self.columns = columns

    def recognise(self, document: "Document") -> Recognition | None:
        """Return the recognition of a document by this row; None if the row does not fit."""
        content = document.mapping
        if not all(_has_setting(content, name) for name in self.columns.get("all", ())):
            return None
        if any(_has_setting(content, name) for name in self.columns.get("none", ())):
            return None
        facts: dict[str, str] = {}
        for column, fits in VALUE_CHECKS.items():
            if column not in self.columns:
                continue
            name = _find_first_setting(content, self.columns[column], fits)
            if name is None:
                return None
            facts[column] = name
        # Without the column `matches`, the setting "" has the value "", and the empty pattern fits.
        name, pattern = self.columns.get("matches", ("", ""))
        facts["value"] = str(get_dotted_value(content, name, ""))
        if re.fullmatch(pattern, facts["value"]) is None:
            return None
        return Recognition(self.columns["certainty"], self.columns["evidence"].format(**facts))


def recognise_by_signs(signs: Iterable[DocumentSign], document: "Document") -> Recognition | None:
    """Return the recognition of a document by the first row that fits; None if none does."""
    for sign in signs:
        recognised = sign.recognise(document)
        if recognised is not None:
            return recognised
    return None


def _has_setting(content: object, name: str, fits: Callable[[object], bool] = _is_anything) -> bool:
    """Return whether a document has a setting with a value that fits."""
    value = get_dotted_value(content, name, ABSENT_VALUE)
    return value is not ABSENT_VALUE and fits(value)


def _find_first_setting(
    content: object, names: Iterable[str], fits: Callable[[object], bool]
) -> str | None:
    """Return the first of several settings that a document has with a fitting value, or None."""
    for name in names:
        if _has_setting(content, name, fits):
            return name
    return None
