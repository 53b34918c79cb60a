"""`Table`: the facts about a foreign system in `foreign/tables/SYSTEM.yaml`, and the code that applies them.

    TABLE = load_table("deepspeed")
    TABLE.recognise(document)                            # is it a file of the system?
    TABLE.read(builder, settings, fp16=True)             # maps or reports its settings
    TABLE.write(builder, "model", "model", fp16=True)    # writes fields as settings

The blocks of a table (docs/howto/add-a-foreign-system.md has a complete one, with its module):

    title       the name of the system in messages
    version     the release that the facts were taken from
    recognised  signs of a document of the system, see `bridge.read.foreign.document_signs`
    settings    groups of rows about settings, see `bridge.read.foreign.setting_row`
    needs       fact -> the sentence about a setting that needs the fact, reported if the fact is
                false; null: such a setting is not reported
    sentences   further sentences, which the module reports by name, see
                `bridge.read.foreign.sentence`
    unwritten   sentences of an export about stated `fields` that have no setting; a row with `when`
                counts only if that fact is true
    data        any other data that the module reads

A group of `settings`:

    rows        name of a setting -> its row. A column next to `rows` is a column of each row of
                the group.
    fields      settings that become the field of the same name
    decisive    settings that the system's module reads itself
    part        the name of the part that the group belongs to. A part describes a block that
                occurs in several places, and is read separately.

The module of a system finds the facts of a file. It passes them to `read` and `write`, by name.
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
"""Reads a setting without a row. The arguments are the builder, the name of the setting from the
top of the document, its key and its value."""


@dataclass(frozen=True, kw_only=True)
class UnwrittenFields:
    """Fields for which a system has no setting."""

    fields: Sequence[str]
    when: str | None
    """The fact that has to be true. None: the sentence always counts."""
    sentence: Sentence
    """The sentence to report about such a field."""


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """One setting of a document."""

    path: str
    """Its name from the top of the part that is read."""
    block: Settings
    """The mapping that it is in."""
    key: str
    """Its key in that mapping."""
    row: SettingRow | None
    """Its row in the table; None if it has none."""

    @property
    def name(self) -> str:
        """Its name from the top of the document."""
        return self.block.name(self.key)

    @property
    def value(self) -> object:
        """Its value as it is written."""
        return self.block[self.key]


class Table:
    """The table of one system.

    Args:
        content: The content of `foreign/tables/SYSTEM.yaml`.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.title: str = content.get("title", "")
        self.version: str = content.get("version", "")
        self.data: Mapping[str, Any] = content.get("data", {})
        self.signs = [DocumentSign(columns) for columns in content.get("recognised", ())]
        self.needs: dict[str, Sentence | None] = {}
        """Fact -> the sentence about a setting that needs it; None: nothing is reported."""
        for fact, row in content.get("needs", {}).items():
            self.needs[fact] = None
            if row:
                self.needs[fact] = Sentence.from_row(row, "dead knob")
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
        """Return the recognition of a document as one of the system; None if no row fits."""
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
        """Map or report each setting that has a row, and state the default of each absent one.

        Args:
            builder: The report of the import.
            settings: The document, or the block that the part is about.
            part: The part of the table; empty: the rows without a part.
            read_unknown: Reads a setting without a row, at the top or in a block that has a row;
                None: such a setting is ignored.
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
        unmet_need = row.find_unmet_need(facts)
        sentence: Sentence | None
        if row.values is not None and str(value) in row.values:
            sentence = Sentence.from_row(row.values[str(value)], row.reason)
        elif unmet_need is not None:
            sentence = self.needs[unmet_need]
        else:
            value = row.read_value(setting.block, setting.key)
            sentence = row.find_sentence(value)
        is_ignored = unmet_need is not None and sentence is None
        becomes_no_field = sentence is not None or row.field is None
        if is_ignored or (becomes_no_field and row.is_harmless(value)):
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
        """State the default of an absent setting, unless the system ignores the setting."""
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

        A field is written by its first row. A setting is not written if it needs a fact that is
        false.

        Args:
            builder: The report of the export.
            part: The part of the table.
            block: The block of the settings, for their names in the report; empty: the top.
            acting: Field that has an effect -> its value. Other fields, and values without effect,
                are not written. None: every field is written.
            facts: The facts that the rows need. An absent fact counts as true.
        """
        settings: dict[str, Any] = {}
        written_fields: set[str] = set()
        values: Mapping[str, Any] = builder.values
        if acting is not None:
            values = acting
        for name, row in self.parts[part].named.items():
            field = row.field or ""
            if field not in values or field in written_fields:
                continue
            if not all(facts.get(need, True) for need in row.needs):
                continue
            if acting is not None and row.is_harmless(values[field]):
                continue
            setting = name
            if block:
                setting = f"{block}.{name}"
            written_fields.add(field)
            builder.map(field, setting)
            settings[name] = row.written(values[field])
        return settings

    def wrong(
        self, sentence_name: str, settings: Settings, key: str, **facts: object
    ) -> PayloadError:
        """Return the error about a value that the system refuses.

        Args:
            sentence_name: The sentence of this table.
            settings: The mapping that has the setting.
            facts: The facts that the sentence names.
        """
        sentence = self.sentences[sentence_name].fill(facts)
        return settings.wrong(key, sentence.detail, settings.values.get(key), sentence.remedy)


def _walk_settings(
    block: Settings, part: TablePart, facts: Facts, prefix: str = "", *, yields_unknown: bool = True
) -> Iterator[_Setting]:
    """Yield the settings of a block, and of the blocks in it, in their order.

    Args:
        part: The rows of its settings.
        facts: The facts that rows name in `when`.
        prefix: The name of the block from the top of the part, with a dot after it.
        yields_unknown: Whether settings without a row are yielded: at the top, and in a block that
            has a row itself.
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
    """Report a mapped value, if the row has a sentence for it in `also`.

    Args:
        builder: The report of the import.
        name: The setting.
        values: The value of the field, and the value of the setting.
    """
    for value in values:
        if row.also is not None and str(value) in row.also:
            builder.record(row.also[str(value)], name, value)


@cache
def load_table(system: str, folder: Traversable = ROWS_FOLDER) -> Table:
    """Return the table of a system: `foreign/tables/SYSTEM.yaml`."""
    return Table(load_rows(system, folder))


def format_sentence(name: str, /, **facts: object) -> Sentence:
    """Return a sentence with the facts of a file in it.

    Args:
        name: The name of the sentence, "SYSTEM.SENTENCE".
        facts: The facts that it names.
    """
    system, _, sentence_name = name.partition(".")
    return load_table(system).sentences[sentence_name].fill(facts)
