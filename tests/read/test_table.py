"""The row engine: a small system's table, read over documents and written backwards."""

from typing import Any

import pytest
import yaml

from bridge.errors import BridgeError
from bridge.read.foreign.export_builder import ExportBuilder
from bridge.read.foreign.import_builder import ImportBuilder
from bridge.read.foreign.reports import ImportReport
from bridge.read.foreign.table import Table
from bridge.read.text.document import Document
from bridge.read.text.settings import Settings
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from tests.read.properties import reasons

TABLE = Table(
    yaml.safe_load("""
title: Example
version: Example 1.0
recognised:
- all: [run.name]
  plain: [bf16]
  any: [steps, epochs]
  none: [model.megatron]
  certainty: 0.9
  evidence: has `{plain}` and `{any}`
- blocks: [bf16]
  certainty: 0.5
  evidence: has `{blocks}` as a block
needs:
  fp8: nothing is FP8 without fp8
settings:
- decisive: [fp8]
- needs: [fp8]
  harmless: []
  rows:
    margin: {field: fp8_margin, reads: whole, least: 0, default: 0}
- values:
    auto: {reason: implied default, detail: auto is off}
  rows:
    scale: "gradients are scaled by {value}"
- rows:
    kwargs: {reads: block, detail: arguments in a word}
    kwargs.dtype: a dtype
- rows:
    plugin: a block that is not looked into
- reason: dead knob
  harmless: []
  rows:
    "**.<precision>": not a setting
- part: recipe
  rows:
    format: {field: fp8, words: {HYBRID: hybrid, E4M3: e4m3}}
""")
)


def read(document: dict[str, Any], **facts: object) -> ImportReport:
    builder = ImportBuilder(TABLE.title)
    TABLE.read(builder, Settings(document, TABLE.title), **{"fp8": True, **facts})
    return builder.finish("fp32")


def test_a_setting_that_nothing_reads_may_have_any_value_and_no_default_counts() -> None:
    imported = read({"margin": "x"}, fp8=False)
    assert (reasons(imported, "margin"), imported.config.stated) == (["dead knob"], frozenset())
    with pytest.raises(BridgeError, match="Example: margin: must be a finite number, got 'x'"):
        read({"margin": "x"})


def test_a_default_is_stated_and_reported_where_nothing_is_written() -> None:
    imported = read({})
    assert (imported.config.fp8_margin, reasons(imported, "margin")) == (0, ["implied default"])
    assert reasons(read({"margin": 2}), "margin") == []


def test_a_value_has_columns_of_its_own() -> None:
    assert reasons(read({"scale": "auto"}), "scale") == ["implied default"]
    assert reasons(read({"scale": True}), "scale") == ["unsupported"]
    assert read({"scale": False}).mapped["scale"] == ()


def test_a_block_is_looked_into_and_another_value_is_reported() -> None:
    assert reasons(read({"kwargs": {"dtype": "bf16"}}), "kwargs.dtype") == ["unsupported"]
    assert reasons(read({"kwargs": "{}"}), "kwargs") == ["unsupported"]


def test_names_that_look_like_precision_are_found_below_any_block_but_not_in_one_with_a_sentence() -> None:
    imported = read({"a": {"b": {"fp8_x": 1}}, "plugin": {"fp8_x": 1}, "FP8": 1})
    assert reasons(imported, "a.b.fp8_x") == reasons(imported, "FP8") == ["dead knob"]
    assert reasons(imported, "plugin.fp8_x") == []


@pytest.mark.parametrize(
    ("content", "evidence"),
    [
        ({"run": {"name": "x"}, "bf16": True, "epochs": 1}, "has `bf16` and `epochs`"),
        ({"run": {"name": "x"}, "bf16": True}, None),
        ({"run": {"name": "x"}, "bf16": True, "steps": 1, "model": {"megatron": None}}, None),
        ({"run": {"name": "x"}, "bf16": {}, "steps": 1}, "has `bf16` as a block"),
    ],
)
def test_a_document_is_recognised_by_dotted_names_and_kinds_of_value(
    content: dict[str, Any], evidence: str | None
) -> None:
    found = TABLE.recognise(Document(path="run.yaml", text="", kind="yaml", of=content))
    assert (found and found.evidence) == evidence


def test_a_part_is_written_as_it_is_read() -> None:
    builder = ExportBuilder(MixedPrecisionConfig.from_dict({"bf16": True, "fp8": "hybrid"}), TABLE.title)
    assert TABLE.write(builder, "recipe", "recipe") == {"format": "HYBRID"}
    assert builder.mapped["fp8"] == ("recipe.format",)
