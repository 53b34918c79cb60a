"""`precision-bridge sources`: what Python programs say, read and never run."""

import re
from pathlib import Path

import pytest

from bridge.errors import PayloadError
from bridge.interop.document import Document
from bridge.interop.project_calls import CALLS
from bridge.interop.project_program import sources_of_program
from bridge.interop.project_source import Source
from bridge.interop.python_calls import program_of

SAMPLES = Path(__file__).parent / "samples"
HEAD = """
import os, torch, deepspeed
import lightning as L
import pytorch_lightning as pl
import transformer_engine.pytorch as te
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs
from functools import partial
from lightning.fabric import Fabric
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.mixed_precision import *
from torch.cuda.amp import GradScaler, autocast
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from transformers import Seq2SeqTrainingArguments, TrainingArguments as TA
from trl import SFTConfig
"""
SAYS = {
    'Accelerator(mixed_precision="bf16", log_with="wandb")': ("accelerate", "bf16"),
    'Accelerator(mixed_precision="no")': ("accelerate", "fp32"),
    'partial(Accelerator, mixed_precision="fp16")': ("accelerate", "fp16"),
    'Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()])': ("accelerate", "bf16 + fp8 delayed"),
    'TA("out", bf16=True, tf32=args.tf32)': ("huggingface", "bf16"),
    "Seq2SeqTrainingArguments(fp16=True, **more)": ("huggingface", "fp16"),
    "SFTConfig(bf16=True)": ("huggingface", "bf16"),
    'L.Trainer(precision="bf16-mixed", strategy=FSDPStrategy())': ("lightning", "bf16"),
    "pl.Trainer(precision=16)": ("lightning", "fp16"),
    'L.pytorch.Trainer(precision="32-true")': ("lightning", "fp32"),
    'Fabric(precision="bf16-true")': ("lightning", "bf16"),
    "MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)": ("fsdp", "bf16"),
    "MixedPrecisionPolicy(torch.float16)": ("fsdp", "fp16"),
    'get_mixed_precision_config("bf16_with_mxfp8_mixed")': ("megatron-bridge", "bf16 + fp8 mxfp8"),
    'ConfigContainer(model=m, mixed_precision="bf16_mixed")': ("megatron-bridge", "bf16"),
    'MixedPrecisionConfig(bf16=True, fp8="hybrid", fp8_recipe="delayed")': ("megatron-bridge", "bf16 + fp8 delayed"),
    "bf16_with_fp8_current_scaling_mixed()": ("megatron-bridge", "bf16 + fp8 tensorwise"),
    'deepspeed.initialize(model=m, config={"fp16": {"enabled": True}})': ("deepspeed", "fp16"),
}
"""Call -> system and precision."""
MENTIONS = {
    'torch.autocast("cuda", dtype=torch.bfloat16)': "torch.autocast('cuda', dtype=torch.bfloat16)",
    "autocast(dtype=torch.float16)": None,
    "GradScaler(init_scale=1024)": None,
    "model.half()": None,
    "self.unet.bfloat16()": None,
    'torch.set_float32_matmul_precision("high")': "torch.set_float32_matmul_precision('high')",
    "torch.set_default_dtype(torch.bfloat16)": None,
    "te.fp8_autocast(enabled=True, fp8_recipe=recipe)": None,
    "te.autocast(recipe=recipe)": None,
    "model.to(torch.bfloat16)": "model.to(torch.bfloat16)",
    "self.model.to(device, dtype=torch.float16)": None,
    "convert_to_float8_training(model)": None,
    'Float8LinearConfig.from_recipe_name("rowwise")': "Float8LinearConfig.from_recipe_name('rowwise')",
    "torch.backends.cuda.matmul.allow_tf32 = True": None,
    "Accelerator(mixed_precision=args.precision)": "Accelerator(mixed_precision=args.precision), decided at run time",
    "Accelerator(**options)": "Accelerator(**options), decided at run time",
    'Accelerator(mixed_precision="fp8", kwargs_handlers=handlers)': (
        "Accelerator(mixed_precision='fp8'), decided at run time"
    ),
    "TA(bf16=use, fp16=not use)": "TA(bf16=use, fp16=not use), decided at run time",
    "MixedPrecisionPolicy(param_dtype=torch.bfloat16 if big else torch.float16)": (
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16 if big else torch.float16), decided at run time"
    ),
    "MixedPrecisionPolicy(param_dtype=torch.float32)": (
        "MixedPrecisionPolicy(param_dtype=torch.float32): weights are used in the dtype they have"
    ),
    "get_mixed_precision_config(cfg.recipe)": "get_mixed_precision_config(cfg.recipe), decided at run time",
    'deepspeed.initialize(model=m, config="ds.json")': "deepspeed.initialize(config='ds.json')",
    "deepspeed.initialize(config=options)": "deepspeed.initialize(config=options), decided at run time",
    'os.environ.setdefault("ACCELERATE_MIXED_PRECISION", "bf16")': (
        "ACCELERATE_MIXED_PRECISION=bf16, where it is not set"
    ),
    'os.environ["ACCELERATE_MIXED_PRECISION"] = chosen': "ACCELERATE_MIXED_PRECISION=chosen, decided at run time",
}
"""Statement -> what is said of it, None: the statement itself."""
SILENT = [
    '# Accelerator(mixed_precision="fp16")',
    '"""Accelerator(mixed_precision=\'fp16\')"""',
    'if False:\n    Accelerator(mixed_precision="fp16")',
    'if 0:\n    os.environ["ACCELERATE_MIXED_PRECISION"] = "fp16"',
    'if not True:\n    Accelerator(mixed_precision="fp16")',
    'x = 1 if True else Accelerator(mixed_precision="fp16")',
    'while False:\n    Accelerator(mixed_precision="fp16")',
    "Accelerator()",
    "Accelerator(mixed_precision=None)",
    "L.Trainer(max_epochs=2)",
    "torch.autocast('cuda', enabled=False)",
    "x.half()",
    "x.to(torch.float16)",
    "model.to('cuda')  # float16",
    "logits.bfloat16()",
    'class Trainer: ...\nTrainer(precision="16-mixed")',
    'from .mine import Trainer\nTrainer(precision="16-mixed")',
    'from transformers import Trainer\nTrainer(precision="16-mixed")',
    'self.accelerate.Accelerator(mixed_precision="fp16")',
    'os.environ["OTHER"] = "fp16"',
]


def said(text: str, unread: dict[str, str] | None = None) -> list[Source]:
    return sources_of_program(Document.of_text(HEAD + text, "train.py"), "train.py", {} if unread is None else unread)


@pytest.mark.parametrize("call", SAYS)
def test_a_call_with_its_values_written_out_says_what_a_run_trains_in(call: str) -> None:
    (source,) = said(call)
    assert (source.system, source.precision) == SAYS[call]
    assert (source.run, source.kind) == ("line 17", "deepspeed" if source.system == "deepspeed" else "program")


@pytest.mark.parametrize("text", MENTIONS)
def test_what_says_nothing_of_a_whole_run_is_listed_as_it_stands(text: str) -> None:
    (source,) = said(text)
    assert (source.says, source.precision) == (MENTIONS[text] or text, None)


@pytest.mark.parametrize("text", SILENT)
def test_what_is_no_call_or_says_nothing_is_not_listed(text: str) -> None:
    assert said(text) == []


def test_every_row_of_the_table_is_met_by_a_call_here() -> None:
    text = HEAD + "\n".join([*SAYS, *(line for line in MENTIONS if "=" not in line.partition("(")[0])])
    calls = program_of(text, "x.py", lambda _: True).calls
    assert [row.names for row in CALLS if not any(row.matches(call) for call in calls)] == []
    assert [row.names for row in CALLS if not any(look in text for look in row.looks)] == []


def test_a_name_that_is_set_once_has_its_value_and_any_other_has_none() -> None:
    call = "Accelerator(mixed_precision=P)\n"
    assert said('P = "bf16"\n' + call)[0].precision == "bf16"
    for text in (
        'P = "bf16"\nP = "fp16"\n',
        'P = "bf16"\nif x:\n    P = "fp16"\n',
        'P = "bf16"\nexec(open("configurator.py").read())\n',
        'P = "bf16"\ndef f(P):\n    ' + call,
    ):
        assert {source.precision for source in said(text + call)} == {None}


def test_a_mapping_that_others_could_fill_has_no_value() -> None:
    text = 'D = {"fp16": {"enabled": True}}\n'
    assert said(text + "deepspeed.initialize(config=D)")[0].precision == "fp16"
    (source,) = said(text + 'D["fp16"]["enabled"] = False\ndeepspeed.initialize(config=D)')
    assert source.precision is None


def test_a_value_that_its_system_refuses_is_named_with_the_reason() -> None:
    unread: dict[str, str] = {}
    (source,) = said('Accelerator(mixed_precision="fp9")', unread)
    assert source.precision is None
    assert list(unread) == ["train.py, line 17"]
    assert "got 'fp9'" in unread["train.py, line 17"]


def test_one_thing_said_on_several_lines_is_one_source() -> None:
    (source,) = said("model.half()\n" * 7)
    assert source.run == "lines 17, 18, 19, 20 and 3 more"


@pytest.mark.parametrize("text", ['os.environ["{}"] = "fp8"', 'os.putenv("{}", "fp8")'])
def test_a_variable_that_a_program_sets_is_a_source(text: str) -> None:
    (source,) = said(text.format("ACCELERATE_MIXED_PRECISION"))
    assert (source.kind, source.precision) == ("program variable", "bf16 + fp8 tensorwise")


def test_the_plugin_of_nemo_is_read_by_its_system() -> None:
    document = Document.load(SAMPLES / "nemo2_plugin.py")
    found = sources_of_program(document, "plugin.py", {})
    assert [(source.system, source.precision) for source in found] == [
        ("nemo2", "bf16 + fp8 delayed"),
        ("nemo2", "fp16"),
        ("nemo2", "bf16 + fp8 mxfp8"),
    ]
    assert sources_of_program(Document.of_text('"MegatronMixedPrecision()"', "a.py"), "a.py", {}) == []


@pytest.mark.parametrize("depth", [300, 900, 20_000])
def test_a_program_as_deep_as_no_person_writes_is_refused_or_read(depth: int) -> None:
    for text in ("-" * depth + "1", "not " * depth + "x", "x" + ".half" * depth + "()"):
        try:
            assert said(f"y = {text}\nAccelerator(mixed_precision={text})")[0].precision is None
        except PayloadError as error:
            assert "Python" in str(error)


def test_nothing_is_run(tmp_path: Path, capfd) -> None:
    said(f'os.system("echo here")\nopen("{tmp_path / "made"}", "w")\nAccelerator(mixed_precision="bf16")')
    assert capfd.readouterr().out == ""
    assert not (tmp_path / "made").exists()


def test_the_manual_names_the_calls_that_decide() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "howto" / "sources.md").read_text()
    for name in ("Accelerator", "TrainingArguments", "SFTConfig", "Trainer", "Fabric", "ConfigContainer"):
        assert re.search(rf"`{name}\b", manual), name
