"""`SettingRow`: a setting in the table of a system. `TablePart`: the rows of a document or block.

    margin: {field: fp8_margin, reads: whole, least: 0, default: 0}      # becomes a field
    msamp.enabled: MS-AMP keeps gradients and optimizer state in 8 bits  # cannot be converted

A row is a mapping of the columns below, or only the text of `detail`. A row without `field` is
about a setting that cannot be converted exactly. Its `detail`, `reason` and `remedy` are the
sentence to report (see `bridge.read.foreign.sentence`). It may name facts of the file and `value`.

The result of the setting:

    field      the field that the setting becomes
    detail     the reason why the value cannot be converted exactly, a clause
    reason     a key of `DEFAULT_REMEDIES`; without the column it is unsupported
    remedy     the advice, a sentence; without the column it is the usual one of the reason

Its values:

    reads      the type of the value: switch, whole, number, text, named_dtype or section (a block);
               a value of another type is an error. Without the column any value is accepted.
               `optimizer`: the value names an optimizer, whose clause in `optimizers.yaml` is the
               detail. `block`: the settings inside a mapping have rows themselves, and this row is
               for any other value.
    words      text in the file -> value of the field, instead of `reads`
    least      the least number
    harmless   values that have no effect, and are not reported; without the column only false
    values     value -> its sentence; such a value is not mapped
    also       value -> the sentence to report with a value that is mapped, "torchao.gathered"
    nulls      the meaning of null: `value`, a value of the field; `unstated`, the field stays
               unstated. Without the column a setting with null counts as absent.
    default    the value of an absent setting, in the release of `since`

Facts, which the system's module finds:

    needs      facts without which the system ignores the setting; the sentence of the first false
               fact is reported
    when       a fact without which the row does not count
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from bridge.read.foreign.reports import DEFAULT_REMEDIES
from bridge.read.foreign.row_files import load_rows
from bridge.read.foreign.sentence import Sentence, get_columns
from bridge.read.text.settings import Settings

PRECISION_NAME_PATTERN = re.compile(
    r"fp(8|4|16|32|64)|bf16|tf32|nvfp|mxfp|float\d|bfloat|half|(^|_)(amp|int[48])(_|$)|precision|dtype|data_type"
    r"|quantiz|quant_|amax|hysteresis|loss_scale|grad_reduce_in|autocast|upcast|\dbit"
    r"|query_key_layer"
)
"""A part of a setting's name that shows that the setting is about precision."""
WILDCARD_PATTERN = re.compile(r"[*<\[]")
"""A character in the name of a row that fits several settings."""
GROUP_COLUMNS = ("decisive", "fields", "rows", "part")
"""Columns of a group itself. Every other column of a group is a column of each of its rows."""
UNPARSED_READS = ("", "optimizer", "block")
"""Values of `reads` with which any value of the setting is accepted."""


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """One setting of a system. The fields are the columns that the module docstring describes."""

    detail: str = ""
    reason: str = "unsupported"
    remedy: str | None = None
    harmless: Sequence[object] = ()
    values: Mapping[str, str | Mapping[str, str]] | None = None
    also: Mapping[str, str] | None = None
    field: str | None = None
    reads: str = ""
    words: Mapping[str, object] | None = None
    least: float | None = None
    default: object = None
    since: str = ""
    nulls: str = ""
    needs: Sequence[str] = ()
    when: str | None = None

    def read_value(self, settings: Settings, key: str) -> object:
        """Return the value of the field for the value of the setting.

        Args:
            settings: The mapping that has the setting.
            key: The key of the setting.

        Raises:
            PayloadError: The value has another type, which the system refuses too.
        """
        if self.words is not None:
            return self.words[str(settings.word(key, tuple(self.words)))]
        if self.reads in UNPARSED_READS:
            return settings[key]
        limits = {}
        if self.least is not None:
            limits["least"] = self.least
        read = getattr(settings, self.reads)  # the method of `Settings` with this name
        return read(key, **limits)

    def written(self, field_value: object) -> object:
        """Return the value of the setting for a value of the field: the inverse of `read_value`."""
        if self.words is not None:
            for word, meaning in self.words.items():
                if meaning == field_value:
                    return word
        return field_value

    def is_harmless(self, value: object) -> bool:
        """Return whether a value has no effect. 0 and False are different values here."""
        return any(
            value == harmless and type(value) is type(harmless) for harmless in self.harmless
        )

    def find_unmet_need(self, facts: Mapping[str, object]) -> str | None:
        """Return the first needed fact that is false. None if all are true."""
        for need in self.needs:
            if not facts[need]:
                return need
        return None

    @property
    def sentence(self) -> Sentence:
        """The sentence of the row, for all values that are not in `values`."""
        remedy = self.remedy or DEFAULT_REMEDIES[self.reason]
        return Sentence(reason=self.reason, detail=self.detail, remedy=remedy)

    def find_sentence(self, value: object) -> Sentence | None:
        """Return the sentence about a value; None if the row has none."""
        detail = self.detail
        if self.reads == "optimizer":
            detail = _get_optimizer_clause(value)
        if not detail:
            return None
        return self.sentence._replace(detail=detail)


def _get_optimizer_clause(value: object) -> str:
    """Return the clause about an optimizer by its name; empty if the optimizer has none."""
    name = ""
    if isinstance(value, str):
        name = value.lower()
    for pattern, clause in load_rows("optimizers").items():
        if re.search(pattern, name):
            return str(clause or "")
    return ""


class TablePart:
    """The rows of a document, or of a block that occurs in several places.

    The name of a row is the name of a setting ("zero_optimization.stage") or a pattern. `*` and
    `[ab]` fit within the part between two dots. `**` at the beginning fits any blocks.
    `<precision>` fits a name that looks like a setting about precision. The row with the exact name
    counts. If there is no such row, the first pattern that fits counts.
    """

    def __init__(self) -> None:
        self.named: dict[str, SettingRow] = {}
        """Name of a setting -> its row."""
        self.patterns: dict[str, SettingRow] = {}
        """Pattern of names -> its row."""

    def add(self, group: Mapping[str, Any]) -> None:
        """Add the rows of a group, each with the columns next to them."""
        shared = {name: value for name, value in group.items() if name not in GROUP_COLUMNS}
        columns_by_name: dict[str, Mapping[str, Any]] = {}
        for name in group.get("decisive", ()):
            columns_by_name[name] = shared
        for name in group.get("fields", ()):
            columns_by_name[name] = {**shared, "field": name}
        for name, row in group.get("rows", {}).items():
            columns_by_name[name] = {"harmless": (False,), **shared, **get_columns(row)}
        for name, columns in columns_by_name.items():
            if WILDCARD_PATTERN.search(name):
                self.patterns[name] = SettingRow(**columns)
            else:
                self.named[name] = SettingRow(**columns)

    def row_of(self, name: str) -> SettingRow | None:
        """Return the row of a setting; None if none fits."""
        if name in self.named:
            return self.named[name]
        for pattern, row in self.patterns.items():
            if _matches_pattern(name, pattern):
                return row
        return None


def _matches_pattern(name: str, pattern: str) -> bool:
    """Return whether the name of a setting fits the pattern of a row."""
    segments = name.split(".")
    wanted = pattern.split(".")
    if wanted[0] == "**":
        segments = segments[1 - len(wanted) :]
        wanted = wanted[1:]
    return len(segments) == len(wanted) and all(map(_matches_segment, segments, wanted))


def _matches_segment(segment: str, wanted: str) -> bool:
    """Return whether a part of a name between two dots fits a part of a pattern."""
    if wanted == "<precision>":
        return PRECISION_NAME_PATTERN.search(segment.lower()) is not None
    return fnmatchcase(segment, wanted)
