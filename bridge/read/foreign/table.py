"""`Table`: the facts about one foreign system, read from `rows/SYSTEM.yaml`, and one engine that applies them.

    TABLE = table("deepspeed")
    TABLE.recognise(document)                            # is it a file of the system?
    TABLE.read(builder, settings, fp16=True)             # its settings into fields, or reports
    TABLE.write(builder, "model", "model", fp16=True)    # fields into settings

The blocks of a table (docs/howto/add-a-system.md has a whole one with its module):

    title       the name of the system in messages
    version     the release that the facts were taken from
    recognised  signs of a document of the system, see `bridge.read.foreign.document_signs`
    settings    groups of rows about settings, see `bridge.read.foreign.setting_row`
    needs       fact -> why a setting that needs it is not read without it; null says nothing
    sentences   further sentences, which the module reports by name, see `bridge.read.foreign.sentence`
    unwritten   sentences of an export about `fields` that are stated and have no setting; a row with
                `when` counts where that fact holds
    data        whatever else the module reads

A group of `settings`:

    rows        name of a setting -> its row. Any other column of a row may stand next to `rows`, and
                then holds for each row of the group.
    fields      settings that become the field of the same name
    decisive    settings that the system's module reads itself
    part        the name of rows that are read by themselves, for a block that stands in several
                places

The module finds the facts of a file, a mapping by name, and hands them to `read` and `write`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

from bridge.errors import PayloadError
from bridge.read.foreign.document_signs import DocumentSign, Recognition, recognise_by_signs
from bridge.read.foreign.row_files import ROWS_FOLDER, load_rows
from bridge.read.foreign.sentence import Sentence
from bridge.read.foreign.setting_row import SettingRow, TablePart
from bridge.read.text.settings import Settings

if TYPE_CHECKING:
    from bridge.read.foreign.export_builder import ExportBuilder
    from bridge.read.foreign.import_builder import ImportBuilder
    from bridge.read.text.document import Document

Facts = Mapping[str, object]
ReadUnknown = Callable[["ImportBuilder", str, str, object], None]
"""Takes a setting without a row: the report, its name from the top of the document, its key and its value."""


@dataclass(frozen=True, kw_only=True)
class UnwrittenFields:
    """Fields that an export has no place for, and why."""

    fields: Sequence[str]
    when: str | None
    """The fact that has to hold, or None."""
    sentence: Sentence


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """One setting of a document."""

    path: str
    """Its name from the top of the part that is read."""
    block: Settings
    """The mapping that it stands in."""
    key: str
    """Its key there."""
    row: SettingRow | None

    @property
    def name(self) -> str:
        """Its name from the top of the document."""
        return self.block.name(self.key)

    @property
    def value(self) -> object:
        """Its value as it is written."""
        return self.block[self.key]


class Table:
    """The table of one system."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.title: str = content.get("title", "")
        self.version: str = content.get("version", "")
        self.data: Mapping[str, Any] = content.get("data", {})
        self.signs = [DocumentSign(columns) for columns in content.get("recognised", ())]
        self.needs: dict[str, Sentence | None] = {}
        for fact, row in content.get("needs", {}).items():
            self.needs[fact] = Sentence.from_row(row, "dead knob") if row else None
        self.sentences: dict[str, Sentence] = {}
        for name, row in content.get("sentences", {}).items():
            self.sentences[name] = Sentence.from_row(row)
        self.unwritten: list[UnwrittenFields] = []
        for row in content.get("unwritten", ()):
            unwritten = UnwrittenFields(
                fields=row["fields"], when=row.get("when"), sentence=Sentence.from_row(row)
            )
            self.unwritten.append(unwritten)
        self.parts: dict[str, TablePart] = {}
        for group in content.get("settings", ()):
            self.parts.setdefault(group.get("part", ""), TablePart()).add(group)

    def recognise(self, document: "Document") -> Recognition | None:
        """Return why a document is taken for the system's, by the first row of `recognised` that fits."""
        return recognise_by_signs(self.signs, document)

    def read(
        self,
        builder: "ImportBuilder",
        settings: Settings,
        part: str = "",
        read_unknown: ReadUnknown | None = None,
        /,
        **facts: object,
    ) -> None:
        """Map or report each setting that has a row, and state each default that counts.

        Args:
            builder: The report of the import.
            settings: The document, or the block that the part is about.
            part: The part of the table; the rows without a part where it is empty.
            read_unknown: Reads the settings without a row, at the top and in blocks that have a row.
            facts: The facts of the file that the rows name.
        """
        part_rows = self.parts[part]
        paths: set[str] = set()
        for setting in _walk_settings(settings, part_rows, facts):
            if setting.row is not None:
                paths.add(setting.path)
                self._read_setting(builder, setting, setting.row, facts)
            elif read_unknown is not None:
                read_unknown(builder, setting.name, setting.key, setting.value)
        for path, row in part_rows.named.items():
            if row.default is not None and path not in paths:
                self._state_default(builder, settings.name(path), row, facts)

    def _read_setting(
        self, builder: "ImportBuilder", setting: _Setting, row: SettingRow, facts: Facts
    ) -> None:
        """Map or report one setting that is written."""
        value = setting.value
        unmet = row.find_unmet_need(facts)
        sentence: Sentence | None
        if row.values is not None and str(value) in row.values:
            sentence = Sentence.from_row(row.values[str(value)], row.reason)
        elif unmet is not None:
            sentence = self.needs[unmet]
        else:
            value = row.read_value(setting.block, setting.key)
            sentence = row.find_sentence(value)
        is_unread = unmet is not None and sentence is None
        is_reported = sentence is not None or row.field is None
        if is_unread or (is_reported and row.is_harmless(value)):
            builder.map(setting.name)
        elif sentence is not None:
            filled = sentence.fill({**facts, "value": value})
            builder.report(setting.name, value, *filled)
        elif row.field is not None:
            if value is None and row.nulls == "unstated":
                builder.map(setting.name)
            else:
                builder.map(setting.name, **{row.field: value})
            _report_mapped_value(builder, setting.name, row, (value, setting.value))

    def _state_default(
        self, builder: "ImportBuilder", name: str, row: SettingRow, facts: Facts
    ) -> None:
        """State the default of a setting that is not written, where something reads it."""
        if row.find_unmet_need(facts) is not None:
            return
        written = row.written(row.default)
        why = f"{written} in {row.since or self.version}"
        builder.imply(name, written, why, **{str(row.field): row.default})
        _report_mapped_value(builder, name, row, (row.default,))

    def write(
        self,
        builder: "ExportBuilder",
        part: str,
        block: str = "",
        acting: Mapping[str, Any] | None = None,
        **facts: object,
    ) -> dict[str, Any]:
        """Return the settings of a part for the fields of a precision, and map the fields to them.

        A field is written by its first row. A setting that needs a fact which does not hold is left
        out.

        Args:
            builder: The report of the export.
            part: The part of the table.
            block: The block that the settings will stand in, as reports name it.
            acting: The values of the fields that act. With them, settings of other fields and values
                that change nothing are left out.
            facts: The facts that the rows need; one that is not there holds.
        """
        settings: dict[str, Any] = {}
        written_fields: set[str] = set()
        values = builder.values if acting is None else acting
        for name, row in self.parts[part].named.items():
            field = row.field or ""
            if field not in values or field in written_fields:
                continue
            if not all(facts.get(need, True) for need in row.needs):
                continue
            if acting is None or not row.is_harmless(values[field]):
                written_fields.add(field)
                builder.map(field, f"{block}.{name}" if block else name)
                settings[name] = row.written(values[field])
        return settings

    def wrong(self, sentence: str, settings: Settings, key: str, **facts: object) -> PayloadError:
        """Return the error about a value that the system refuses, in the words of a sentence."""
        filled = self.sentences[sentence].fill(facts)
        return settings.wrong(key, filled.detail, settings.values.get(key), filled.remedy)


def _walk_settings(
    block: Settings, part: TablePart, facts: Facts, prefix: str = "", *, yields_unknown: bool = True
) -> Iterator[_Setting]:
    """Yield the settings of a block, and of the blocks in it, in their order.

    A setting without a row is yielded at the top, and in a block that has a row itself.
    """
    for key, value in block.values.items():
        row = part.row_of(prefix + key)
        if row is not None and row.when is not None and not facts[row.when]:
            row = None
        is_block = isinstance(value, Mapping)
        if row is None:
            is_yielded = yields_unknown
            is_entered = is_block
        else:
            is_written = value is not None or bool(row.nulls)
            has_rows_inside = is_block and row.reads == "block"
            is_yielded = is_written and not has_rows_inside
            is_entered = is_block and (has_rows_inside or not (row.detail or row.field))
        if is_yielded:
            yield _Setting(path=prefix + key, block=block, key=key, row=row)
        if is_entered:
            inner = block.section(key)
            is_known = row is not None
            yield from _walk_settings(
                inner, part, facts, f"{prefix}{key}.", yields_unknown=is_known
            )


def _report_mapped_value(
    builder: "ImportBuilder", name: str, row: SettingRow, values: Sequence[object]
) -> None:
    """Report a value that is mapped, where the row has a sentence for it."""
    for value in values:
        if row.also is not None and str(value) in row.also:
            builder.record(row.also[str(value)], name, value)


@cache
def load_table(system: str, folder: Traversable = ROWS_FOLDER) -> Table:
    """Return the table of a system."""
    return Table(load_rows(system, folder))


def format_sentence(name: str, /, **facts: object) -> Sentence:
    """Return a sentence by its name, "SYSTEM.SENTENCE", with the facts of a file in it."""
    system, _, sentence = name.partition(".")
    return load_table(system).sentences[sentence].fill(facts)
