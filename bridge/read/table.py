"""A foreign system as a table: `rows/SYSTEM.yaml` has its settings and sentences, and one engine reads any document.

docs/howto/add-a-system.md has a whole table with its module. `settings` are groups: columns next to
`rows` hold for each row of the group, and those that are `decisive` are read by the system's own
function. `needs` has, for each fact, why a setting is not read without it.

A setting is named from the top of its document ("fp8_config.margin"); null counts as not given. `*`
and `[ab]` stand for parts of a name between two dots, `**` in front for any blocks, `<precision>`
for a name that looks as if it bore on precision. Names go before patterns, and the first pattern
that fits counts. A row is a mapping of these columns, or its `detail` alone:

    detail     why the value cannot be converted exactly, a clause
    reason     one of `contract.REASONS`; unsupported where there is none
    remedy     what to do, a sentence; each reason has a usual one
    harmless   values that change nothing; [false] where there are none
    values     value -> the first three columns of it, or the detail alone; such a value is not read any further
    also       value -> the sentence to report where the value is mapped, "torchao.gathered"
    field      the field that the setting becomes
    reads      switch, whole, number, text, named_dtype or section (a block): anything else is an error; or optimizer,
               the name of one, whose detail is a clause of `optimizers.yaml`; or block, of which each setting is asked
               for its row while any other value has this one; without it any value is taken
    words      word -> value of the field, instead of `reads`
    least      the least number
    default    the value that counts where nothing is written, in the release of `since`
    nulls      value or unstated: null is written too, as a value of the field or as one that leaves it unstated
    needs      facts without which nothing reads the setting; the first that does not hold says why, or null for none
    when       a fact without which it is no row
    part       of a group: its name, where it is read alone
    fields     of a group: settings that become the field of the same name, in the place of `rows`

The system's function finds facts, and hands them to `Table.read` with the document, and a function
for the settings without a row, at the top and in blocks that have one. `Table.write` is a part
backwards, by the first row of each field. `data` has whatever else the function reads. A row of
`unwritten` is about the `fields` of an export that are on and not mapped, where the fact `when`
holds, if it has one. A row of `recognised` takes a document that has `all` of its settings, one of
`any`, one of `blocks` that is a mapping, one of `plain` that is none, and none of `none`; in its
evidence stands the first of each column that is there. `matches` is a setting and the pattern of
its value, which stands in the evidence as `value`. Sentences are whole, so that a grep finds them.
In braces stand facts, and `value`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from bridge.errors import PayloadError
from bridge.read.contract import REASONS, Recognised
from bridge.read.text.settings import Settings

if TYPE_CHECKING:
    from bridge.read.builders import ExportBuilder, ImportBuilder
    from bridge.read.text.document import Document

FOLDER = files("bridge.read").joinpath("rows")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""A tenth of the time of PyYAML's own where its C library is there."""
LOOKS_LIKE_PRECISION = re.compile(
    r"fp(8|4|16|32|64)|bf16|tf32|nvfp|mxfp|float\d|bfloat|half|(^|_)(amp|int[48])(_|$)|precision|dtype|data_type"
    r"|quantiz|quant_|amax|hysteresis|loss_scale|grad_reduce_in|autocast|upcast|\dbit"
    r"|query_key_layer"
)
PATTERN = re.compile(r"[*<\[]")
COLUMNS_OF_A_GROUP = ("decisive", "fields", "rows", "part")
ABSENT = object()
PRESENT: Mapping[str, Callable[[object], bool]] = {
    "any": lambda _: True,
    "blocks": lambda value: isinstance(value, Mapping),
    "plain": lambda value: not isinstance(value, Mapping),
}
"""Column of `recognised` -> whether a value counts for it."""


class Record(NamedTuple):
    """Why a setting cannot be converted exactly."""

    reason: str
    """One of `contract.REASONS`."""
    detail: str
    """The difference on the other side, as a clause without a full stop."""
    remedy: str

    def about(self, facts: Mapping[str, object]) -> "Record":
        """Return the record with the facts of a file in it."""
        return Record(self.reason, self.detail.format(**facts), self.remedy.format(**facts))


def record(columns: str | Mapping[str, str], reason: str = "unsupported") -> Record:
    """Return the record of a sentence's row: its columns, or the detail alone."""
    row = _columns(columns)
    reason = row.get("reason", reason)
    return Record(reason, row["detail"], row.get("remedy", REASONS[reason]))


class Unwritten(NamedTuple):
    """Why an export has no place for some fields."""

    fields: Sequence[str]
    when: str | None
    words: Record


@dataclass(frozen=True, kw_only=True)
class Row:
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

    def value_in(self, given: Settings, key: str) -> object:
        """Return the value as it is read.

        PayloadError for one that the system does not take either.
        """
        if self.words is not None:
            return self.words[str(given.word(key, tuple(self.words)))]
        if self.reads in ("", "optimizer", "block"):
            return given[key]
        limits = {} if self.least is None else {"least": self.least}
        return getattr(given, self.reads)(key, **limits)

    def written(self, value: object) -> object:
        """Return the value of the setting for a value of the field."""
        if self.words is not None:
            for word, meant in self.words.items():
                if meant == value:
                    return word
        return value

    def is_harmless(self, value: object) -> bool:
        """Return whether a value changes nothing."""
        return any(value == usual and type(value) is type(usual) for usual in self.harmless)

    @property
    def record(self) -> Record:
        """The record of any value but those of `values`."""
        return Record(self.reason, self.detail, self.remedy or REASONS[self.reason])

    def words_about(self, value: object) -> Record | None:
        """Return the record of a value; None where there is nothing to report."""
        detail = self.detail
        if self.reads == "optimizer":
            detail = _clause_about_optimizer(value)
        if not detail:
            return None
        return self.record._replace(detail=detail)


def _clause_about_optimizer(value: object) -> str:
    """Return the clause about an optimizer by its name; empty for one without any."""
    name = value.lower() if isinstance(value, str) else ""
    for pattern, clause in rows("optimizers").items():
        if re.search(pattern, name):
            return str(clause or "")
    return ""


class Found(NamedTuple):
    """One setting of a document."""

    name: str
    """From the top of the document."""
    section: Settings
    key: str
    """Its name in the section."""
    row: Row | None


class Part:
    """The rows of a document, or of a block that stands in several places."""

    def __init__(self) -> None:
        self.named: dict[str, Row] = {}
        self.patterns: dict[str, Row] = {}

    def add(self, group: Mapping[str, Any]) -> None:
        """Add the rows of a group, each with the columns that stand next to them."""
        shared = {name: value for name, value in group.items() if name not in COLUMNS_OF_A_GROUP}
        every: dict[str, Mapping[str, Any]] = dict.fromkeys(group.get("decisive", ()), shared)
        for name in group.get("fields", ()):
            every[name] = {**shared, "field": name}
        for name, row in group.get("rows", {}).items():
            every[name] = {"harmless": (False,), **shared, **_columns(row)}
        for name, columns in every.items():
            rows = self.patterns if PATTERN.search(name) else self.named
            rows[name] = Row(**columns)

    def row_of(self, name: str) -> Row | None:
        """Return the row of a setting, the first that fits."""
        if name in self.named:
            return self.named[name]
        for pattern, row in self.patterns.items():
            if self._fits(name, pattern):
                return row
        return None

    def _fits(self, name: str, pattern: str) -> bool:
        segments = name.split(".")
        wanted = pattern.split(".")
        if wanted[0] == "**":
            segments = segments[1 - len(wanted) :]
            wanted = wanted[1:]
        return len(segments) == len(wanted) and all(map(self._is, segments, wanted))

    def _is(self, segment: str, wanted: str) -> bool:
        if wanted == "<precision>":
            return LOOKS_LIKE_PRECISION.search(segment.lower()) is not None
        return fnmatchcase(segment, wanted)


class Table:
    """The table of one system."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.title: str = content.get("title", "")
        self.version: str = content.get("version", "")
        self.data: Mapping[str, Any] = content.get("data", {})
        self.recognised: Sequence[Mapping[str, Any]] = content.get("recognised", ())
        self.needs: dict[str, Record | None] = {}
        for fact, words in content.get("needs", {}).items():
            self.needs[fact] = record(words, "dead knob") if words else None
        sentences: Mapping[str, Any] = content.get("sentences", {})
        self.sentences = {name: record(words) for name, words in sentences.items()}
        self.unwritten: list[Unwritten] = []
        for row in content.get("unwritten", ()):
            self.unwritten.append(Unwritten(row["fields"], row.get("when"), record(row)))
        self.parts: dict[str, Part] = {}
        for group in content.get("settings", ()):
            self.parts.setdefault(group.get("part", ""), Part()).add(group)

    def read(
        self,
        builder: "ImportBuilder",
        given: Settings,
        part: str = "",
        others: Callable[["ImportBuilder", str, str, object], None] | None = None,
        /,
        **facts: object,
    ) -> None:
        """Map or report each setting that has a row, and state each default that counts."""
        rows = self.parts[part]
        taken: set[str] = set()
        for setting in self._found(given, rows, facts):
            if setting.row is not None:
                taken.add(setting.name)
                self._take(builder, setting.section, setting.key, setting.row, facts)
            elif others is not None:
                where = setting.section.name(setting.key)
                others(builder, where, setting.key, setting.section[setting.key])
        for name, row in rows.named.items():
            if row.default is None or name in taken:
                continue
            if all(facts[need] for need in row.needs):
                written = row.written(row.default)
                why = f"{written} in {row.since or self.version}"
                builder.implied(given.name(name), written, why, **{str(row.field): row.default})
                self._report_also(builder, given.name(name), row, (row.default,))

    def _found(
        self,
        given: Settings,
        rows: Part,
        facts: Mapping[str, object],
        under: str = "",
        *,
        is_known: bool = True,
    ) -> Iterator["Found"]:
        """Yield the settings of a block that have a row, and in one that `is_known` the others too."""
        for key, value in given.values.items():
            row = rows.row_of(under + key)
            if row is not None and row.when is not None and not facts[row.when]:
                row = None
            is_block = isinstance(value, Mapping)
            has_rows_inside = is_block and (row is None or row.reads == "block")
            if row is None:
                is_read = is_known
            else:
                is_read = bool(value is not None or row.nulls) and not has_rows_inside
                if is_block and not (row.detail or row.field):
                    has_rows_inside = True
            if is_read:
                yield Found(under + key, given, key, row)
            if has_rows_inside:
                inner = given.section(key)
                yield from self._found(
                    inner, rows, facts, f"{under}{key}.", is_known=row is not None
                )

    def _take(
        self,
        builder: "ImportBuilder",
        given: Settings,
        key: str,
        row: Row,
        facts: Mapping[str, object],
    ) -> None:
        """Map or report one setting that is given."""
        name = given.name(key)
        value = given[key]
        unmet = _first_unmet(row, facts)
        if row.values is not None and str(value) in row.values:
            words: Record | None = record(row.values[str(value)], row.reason)
        elif unmet is not None:
            words = self.needs[unmet]
        else:
            value = row.value_in(given, key)
            words = row.words_about(value)
        is_unread = unmet is not None and words is None
        if is_unread or ((words is not None or row.field is None) and row.is_harmless(value)):
            builder.map(name)
        elif words is not None:
            builder.report(name, value, *words.about({**facts, "value": value}))
        elif row.field is not None:
            if value is None and row.nulls == "unstated":
                builder.map(name)
            else:
                builder.map(name, **{row.field: value})
            self._report_also(builder, name, row, (value, given[key]))

    def _report_also(
        self, builder: "ImportBuilder", name: str, row: Row, values: Sequence[object]
    ) -> None:
        """Report a value that is mapped, read or as it is written, where the row has a sentence for it."""
        for value in values:
            if row.also is not None and str(value) in row.also:
                builder.record(row.also[str(value)], name, value)

    def write(
        self,
        builder: "ExportBuilder",
        part: str,
        block: str = "",
        acting: Mapping[str, Any] | None = None,
        **facts: object,
    ) -> dict[str, Any]:
        """Return the settings of a part for the fields of a precision, and map the fields to them.

        The names of the settings stand under `block`. A setting that needs a fact which does not
        hold is left out. With the values of the fields that act, settings of other fields and
        values that change nothing are left out too.
        """
        settings: dict[str, Any] = {}
        written: set[str] = set()
        values = builder.values if acting is None else acting
        for name, row in self.parts[part].named.items():
            field = row.field or ""
            if field not in values or field in written:
                continue
            if not all(facts.get(need, True) for need in row.needs):
                continue
            if acting is None or not row.is_harmless(values[field]):
                written.add(field)
                builder.map(field, f"{block}.{name}" if block else name)
                settings[name] = row.written(values[field])
        return settings

    def recognise(self, document: "Document") -> Recognised | None:
        """Return why a document is taken for the system's: the first row of `recognised` that fits."""
        content = document.mapping
        for row in self.recognised:
            if not all(_is_there(content, key) for key in row.get("all", ())):
                continue
            if any(_is_there(content, key) for key in row.get("none", ())):
                continue
            first: dict[str, str | None] = {}
            for column, counts in PRESENT.items():
                if column in row:
                    first[column] = _first_there(content, row[column], counts)
            name, pattern = row.get("matches", ("", ""))
            value = str(at(content, name, ""))
            if None not in first.values() and re.fullmatch(pattern, value):
                return Recognised(row["certainty"], row["evidence"].format(**first, value=value))
        return None

    def wrong(self, sentence: str, given: Settings, key: str, **facts: object) -> PayloadError:
        """Return the error to raise about a value that the system refuses, in the words of a row."""
        words = self.sentences[sentence].about(facts)
        return given.wrong(key, words.detail, given.values.get(key), words.remedy)


def at(content: Any, name: str, default: Any = None) -> Any:
    """Return a value by its dotted name from the top, `default` where there is none."""
    for key in name.split("."):
        content = content.get(key, default) if isinstance(content, Mapping) else default
    return content


def _is_there(
    content: object, name: str, counts: Callable[[object], bool] = PRESENT["any"]
) -> bool:
    value = at(content, name, ABSENT)
    return value is not ABSENT and counts(value)


def _first_there(
    content: object, names: Iterable[str], counts: Callable[[object], bool]
) -> str | None:
    """Return the first of several names that a mapping has a value of which counts.

    None without any.
    """
    for name in names:
        if _is_there(content, name, counts):
            return name
    return None


def _first_unmet(row: Row, facts: Mapping[str, object]) -> str | None:
    """Return the first fact that a row needs and that does not hold; None where all do."""
    for need in row.needs:
        if not facts[need]:
            return need
    return None


def _columns(row: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(row, str):
        return {"detail": row}
    return dict(row)


@cache
def table(system: str, folder: Traversable = FOLDER) -> Table:
    """Return the table of a system."""
    return Table(rows(system, folder))


def rows(name: str, folder: Traversable = FOLDER) -> dict[str, Any]:
    """Return the content of a file of rows."""
    content: dict[str, Any] = yaml.load(folder.joinpath(f"{name}.yaml").read_text("utf-8"), LOADER)  # noqa: S506  safe
    return content


def record_named(name: str, /, **facts: object) -> Record:
    """Return the record of a sentence, "SYSTEM.SENTENCE", with the facts of a file in it."""
    system, _, sentence = name.partition(".")
    return table(system).sentences[sentence].about(facts)
