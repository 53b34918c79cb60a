"""`precision-bridge sources`: recipes in Python programs, read and never run."""

from pathlib import Path

import pytest

from bridge.convert.survey.source import Source, of_program
from bridge.errors import PayloadError
from bridge.read.text.document import Document

SAMPLES = Path(__file__).parents[2] / "read" / "samples"
HEAD = """
import os, torch
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.mixed_precision import *
"""
SAYS = {
    'get_mixed_precision_config("bf16_with_mxfp8_mixed")': "bf16 + fp8 mxfp8",
    'get_mixed_precision_config(name="fp16_mixed")': "fp16",
    'ConfigContainer(model=m, mixed_precision="bf16_mixed")': "bf16",
    'MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="delayed")': "bf16 + fp8 delayed",
    "bf16_with_fp8_current_scaling_mixed()": "bf16 + fp8 tensorwise",
}
"""Call -> precision."""
LATE = {
    "get_mixed_precision_config(cfg.recipe)": "get_mixed_precision_config(cfg.recipe), decided at run time",
    "ConfigContainer(mixed_precision=chosen)": "ConfigContainer(mixed_precision=chosen), decided at run time",
    "MixedPrecisionConfig(bf16=use)": "MixedPrecisionConfig(bf16=use), decided at run time",
}
SILENT = [
    '# get_mixed_precision_config("bf16_mixed")',
    'if False:\n    get_mixed_precision_config("bf16_mixed")',
    "ConfigContainer(model=m)",
    'from mine import get_mixed_precision_config\nget_mixed_precision_config("bf16_mixed")',
    'Accelerator(mixed_precision="fp16")',
    'os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"',
]


def said(text: str, unread: dict[str, str] | None = None) -> list[Source]:
    document = Document.of_text(HEAD + text, "train.py")
    return list(of_program(document, "train.py", {} if unread is None else unread))


@pytest.mark.parametrize("call", SAYS)
def test_a_call_with_its_values_written_out_states_the_precision(call: str) -> None:
    (source,) = said(call)
    assert (source.system, source.precision, source.kind) == ("megatron-bridge", SAYS[call], "program")
    assert source.run == "line 5"


@pytest.mark.parametrize("call", LATE)
def test_a_value_that_only_a_run_knows_is_listed_as_written(call: str) -> None:
    (source,) = said(call)
    assert (source.says, source.precision) == (LATE[call], None)


@pytest.mark.parametrize(
    ("call", "stated"),
    [
        ('Accelerator(mixed_precision="fp16")', "Accelerator(mixed_precision='fp16')"),
        ("TrainingArguments(output_dir='a', bf16=True)", "TrainingArguments(bf16=True)"),
        ("L.Trainer(precision=args.p)", "Trainer(precision=args.p)"),
    ],
)
def test_a_call_of_a_trainer_that_is_not_read_is_named(call: str, stated: str) -> None:
    unread: dict[str, str] = {}
    assert said(call, unread) == []
    assert unread == {
        "train.py, line 5": f"train.py, line 5: {stated} states a precision, and such calls are not read. Look there."
    }


@pytest.mark.parametrize("call", ["TrainingArguments(bf16=False)", "Trainer(max_steps=2)", "Accelerator()"])
def test_a_call_of_a_trainer_that_states_none_is_not_named(call: str) -> None:
    unread: dict[str, str] = {}
    said(call, unread)
    assert unread == {}


@pytest.mark.parametrize("text", SILENT)
def test_what_is_no_such_call_is_not_listed(text: str) -> None:
    assert said(text) == []


def test_a_value_that_the_registry_refuses_is_named_with_the_reason() -> None:
    unread: dict[str, str] = {}
    (source,) = said('get_mixed_precision_config("bf16_mixd")', unread)
    assert source.precision is None
    assert list(unread) == ["train.py, line 5"]
    assert "bf16_mixed" in unread["train.py, line 5"]


def test_the_plugin_of_nemo_is_read_by_its_system() -> None:
    document = Document.load(SAMPLES / "nemo2_plugin.py")
    found = list(of_program(document, "plugin.py", {}))
    assert [(source.system, source.precision) for source in found] == [
        ("nemo2", "bf16 + fp8 delayed"),
        ("nemo2", "fp16"),
        ("nemo2", "bf16 + fp8 mxfp8"),
    ]
    assert list(of_program(Document.of_text('"MegatronMixedPrecision()"', "a.py"), "a.py", {})) == []


@pytest.mark.parametrize("depth", [300, 900, 20_000])
def test_a_program_as_deep_as_no_person_writes_is_refused_or_read(depth: int) -> None:
    for text in ("-" * depth + "1", "not " * depth + "x", "x" + ".half" * depth + "()"):
        try:
            assert said(f"y = {text}\nConfigContainer(mixed_precision={text})")[0].precision is None
        except PayloadError as error:
            assert "Python" in str(error)


def test_nothing_is_run(tmp_path: Path, capfd) -> None:
    said(f'os.system("echo here")\nopen("{tmp_path / "made"}", "w")\nget_mixed_precision_config("bf16_mixed")')
    assert capfd.readouterr().out == ""
    assert not (tmp_path / "made").exists()
