"""`SettingRow`: what a table says of one setting of a system, and `TablePart`, the rows of a document or block.

    margin: {field: fp8_margin, reads: whole, least: 0, default: 0}      # becomes a field
    msamp.enabled: MS-AMP keeps gradients and optimizer state in 8 bits  # cannot be converted

A row is a mapping of the columns below, or its `detail` alone. A row that has no `field` is about a
setting that cannot be converted exactly, and its `detail`, `reason` and `remedy` are the sentence to
report (see `bridge.read.foreign.sentence`). In the sentence stand facts of the file, and `value`.

The setting, in a report and in a recipe:

    field      the field that the setting becomes
    detail     why the value cannot be converted exactly, a clause
    reason     a key of `reports.REASONS`; unsupported where there is none
    remedy     what to do, a sentence; each reason has a usual one

Its values:

    reads      how the value is read: switch, whole, number, text, named_dtype or section (a block);
               any other kind of value is an error. Without the column any value is taken.
               `optimizer`: the value names an optimizer, whose clause in `optimizers.yaml` is the
               detail. `block`: the settings inside a mapping have rows themselves, and this row is
               for any other value.
    words      word -> value of the field, instead of `reads`
    least      the least number
    harmless   values that change nothing, and are not reported; [false] where there are none
    values     value -> its sentence; such a value is not read any further
    also       value -> the sentence to report where the value is mapped, "torchao.gathered"
    nulls      how null is taken: `value`, as a value of the field; `unstated`, as one that leaves
               the field unstated. Without the column null counts as not written.
    default    the value that counts where nothing is written, in the release of `since`

Facts, which the system's module finds:

    needs      facts without which nothing reads the setting; the first that does not hold says why
    when       a fact without which the row does not exist
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
WILDCARD_PATTERN = re.compile(r"[*<\[]")
"""In the name of a row that fits several settings."""
GROUP_COLUMNS = ("decisive", "fields", "rows", "part")
"""Columns of a group; the others are shared by its rows."""
UNPARSED_READS = ("", "optimizer", "block")
"""Values of `reads` for which any value is taken."""


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """One setting of a system, with the columns of the table."""

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
        """Return the value of the field, or of the setting, that is written under a key.

        Raises:
            PayloadError: The system does not take the value either.
        """
        if self.words is not None:
            return self.words[str(settings.word(key, tuple(self.words)))]
        if self.reads in UNPARSED_READS:
            return settings[key]
        limits = {}
        if self.least is not None:
            limits["least"] = self.least
        return getattr(settings, self.reads)(key, **limits)

    def written(self, field_value: object) -> object:
        """Return the value of the setting for a value of the field."""
        if self.words is not None:
            for word, meaning in self.words.items():
                if meaning == field_value:
                    return word
        return field_value

    def is_harmless(self, value: object) -> bool:
        """Return whether a value changes nothing; 0 is not False here."""
        return any(value == usual and type(value) is type(usual) for usual in self.harmless)

    def find_unmet_need(self, facts: Mapping[str, object]) -> str | None:
        """Return the first fact that the row needs and that does not hold; None where all hold."""
        for need in self.needs:
            if not facts[need]:
                return need
        return None

    @property
    def sentence(self) -> Sentence:
        """The sentence of the row itself, for any value but those of `values`."""
        remedy = self.remedy or DEFAULT_REMEDIES[self.reason]
        return Sentence(reason=self.reason, detail=self.detail, remedy=remedy)

    def find_sentence(self, value: object) -> Sentence | None:
        """Return the sentence about a value that was read; None where there is nothing to report."""
        detail = self.detail
        if self.reads == "optimizer":
            detail = _get_optimizer_clause(value)
        if not detail:
            return None
        return self.sentence._replace(detail=detail)


def _get_optimizer_clause(value: object) -> str:
    """Return the clause about an optimizer by its name; empty for an optimizer without a clause."""
    name = ""
    if isinstance(value, str):
        name = value.lower()
    for pattern, clause in load_rows("optimizers").items():
        if re.search(pattern, name):
            return str(clause or "")
    return ""


class TablePart:
    """The rows of a document, or of a block that stands in several places.

    The name of a row is that of a setting ("zero_optimization.stage") or a pattern: `*` and `[ab]`
    stand for parts of a name between two dots, `**` in front for any blocks, `<precision>` for a
    name that looks as if it bore on precision. Names go before patterns, and the first pattern that
    fits counts.
    """

    def __init__(self) -> None:
        self.named: dict[str, SettingRow] = {}
        self.patterns: dict[str, SettingRow] = {}

    def add(self, group: Mapping[str, Any]) -> None:
        """Add the rows of a group, each with the columns that stand next to them."""
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
        """Return the row of a setting, the first that fits."""
        if name in self.named:
            return self.named[name]
        for pattern, row in self.patterns.items():
            if _matches_pattern(name, pattern):
                return row
        return None


def _matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a setting's name fits the pattern of a row."""
    segments = name.split(".")
    wanted = pattern.split(".")
    if wanted[0] == "**":
        segments = segments[1 - len(wanted) :]
        wanted = wanted[1:]
    return len(segments) == len(wanted) and all(map(_matches_segment, segments, wanted))


def _matches_segment(segment: str, wanted: str) -> bool:
    if wanted == "<precision>":
        return PRECISION_NAME_PATTERN.search(segment.lower()) is not None
    return fnmatchcase(segment, wanted)
