"""One run in a file of each kind: every command reads the same of it."""

from __future__ import annotations

import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from bridge.cli.main import main
from bridge.rehearse import rehearse as rehearsal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bridge.preflight.run import Run

MODEL = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "tensor_model_parallel_size": 2,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "vocab_size": 1024,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": True,
    "add_qkv_bias": True,
    "bias_activation_fusion": True,
    "bf16": True,
    "params_dtype": "bf16",
    "pipeline_dtype": "bf16",
    "fp8": "hybrid",
    "fp8_recipe": "tensorwise",
}
OPTIMIZER = {"bf16": True, "params_dtype": "bf16", "fp8_recipe": "tensorwise", "use_distributed_optimizer": True}
DDP = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True, "check_for_nan_in_grad": True}
TRAIN = {"micro_batch_size": 2, "global_batch_size": 16}
SECTIONS: dict[str, dict[str, Any]] = {"model": MODEL, "optimizer": OPTIMIZER, "ddp": DDP, "train": TRAIN}
ARGUMENTS: dict[str, Any] = {
    **{name: value for name, value in MODEL.items() if name not in {"params_dtype", "pipeline_dtype", "add_qkv_bias"}},
    "fp8_format": "hybrid",
    "transformer_impl": "transformer_engine",
    "use_distributed_optimizer": True,
    **TRAIN,
}
for derived in ("share_embeddings_and_output_weights", "bias_activation_fusion", "fp8"):
    del ARGUMENTS[derived]
FRAMEWORK = "megatron.bridge.models.gpt_provider.GPTModelProvider"


def ours(folder: Path) -> Path:
    """Write the sections in a file of our own."""
    return written(folder / "run.yaml", json.dumps(SECTIONS))


def run_folder(folder: Path) -> Path:
    """Write them as the config.yaml of a run folder."""
    (folder / "run").mkdir()
    written(folder / "run" / "config.yaml", json.dumps({**SECTIONS, "mixed_precision": None}))
    return folder / "run"


def megatron_bridge(folder: Path) -> Path:
    """Write them as Megatron Bridge saves a container, dtypes by their import path."""

    def plain(value: Any) -> Any:
        return {"_target_": "torch.bfloat16", "_call_": False} if value == "bf16" else value

    whole: dict[str, Any] = {"_target_": "megatron.bridge.training.config.ConfigContainer"}
    classes = (FRAMEWORK, "megatron.core.optimizer.OptimizerConfig", "megatron.core.distributed.X", "a.TrainingConfig")
    for (name, section), target in zip(SECTIONS.items(), classes, strict=True):
        whole[name] = {"_target_": target, **{key: plain(value) for key, value in section.items()}}
    return written(folder / "bridge.yaml", json.dumps(whole))


def argument_file(folder: Path) -> Path:
    """Write Megatron-LM's arguments as its tests keep them."""
    options = {f"--{name.replace('_', '-')}": value for name, value in ARGUMENTS.items()}
    return written(folder / "model_config.yaml", json.dumps({"MODEL_ARGS": options}))


def script(folder: Path) -> Path:
    """Write a launch script of Megatron-LM."""
    words = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in ARGUMENTS.items()
    ]
    return written(folder / "train.sh", f"torchrun pretrain_gpt.py {' '.join(words)}\n")


def namespace() -> dict[str, Any]:
    """Return the arguments as Megatron-LM has them after its checks."""
    given = {name: value for name, value in ARGUMENTS.items() if name != "fp8_format"}
    return {**given, "fp8": "hybrid", "accumulate_allreduce_grads_in_fp32": True, "params_dtype": torch.bfloat16}


def log(folder: Path) -> Path:
    """Write the log of a run that printed its arguments."""
    lines = [f"  {name} ...... {value}" for name, value in namespace().items()]
    block = ["-------- arguments --------", *lines, "-------- end of arguments --------"]
    return written(folder / "train.log", "\n".join(["[rank0]: starts", *block, ""]))


def checkpoint(folder: Path) -> Path:
    """Save the arguments as a checkpoint does."""
    torch.save({"args": Namespace(**namespace()), "iteration": 3}, folder / "common.pt")
    return folder / "common.pt"


def written(path: Path, text: str) -> Path:
    """Write a text, and return its path."""
    path.write_text(text)
    return path


KINDS = (ours, run_folder, megatron_bridge, argument_file, script, log, checkpoint)
TARGET = ("--target", "h100x8,mcore0.19.2,te2.9,cuda12.9")


@pytest.fixture
def answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, dict[str, Any]]]:
    """Return what a command answers for the file of each kind, without what it says of the file itself."""

    def asked(command: str, *words: str) -> dict[str, dict[str, Any]]:
        found = {}
        for kind in KINDS:
            folder = tmp_path / kind.__name__
            folder.mkdir(exist_ok=True)
            main([*command.split(), *words, "--config", str(kind(folder)), "--json"])
            shown = capsys.readouterr()
            assert shown.out, (kind.__name__, shown.err)
            found[kind.__name__] = json.loads(shown.out)
        return found

    return asked


@pytest.mark.parametrize("command", ["plan", "memory", "plan --align", "plan --modules"])
def test_every_kind_of_file_gives_the_same_answer(answers, command):
    found = answers(command, *TARGET)
    read = {kind: answer.pop("read") for kind, answer in found.items()}
    assert {one["framework"] for one in read.values()} == {"Precision Bridge", "Megatron Bridge", "Megatron-LM"}
    assert {one["megatron_core"] for one in read.values()} == {"0.19.2"}
    for kind, answer in found.items():
        assert answer == found["ours"], kind


def test_a_check_finds_the_same_in_every_kind_of_file(answers):
    found = answers("check", *TARGET)
    rules = {kind: sorted({(one["id"], one["path"]) for one in answer["findings"]}) for kind, answer in found.items()}
    assert all(one == rules["ours"] for one in rules.values()), rules
    assert not [one for answer in found.values() for one in answer["findings"] if one["severity"] == "error"]


def test_a_field_is_explained_in_every_kind_of_file(answers):
    for kind, answer in answers("explain", "fp8_recipe").items():
        assert [(one["key"], one["value"]) for one in answer["settings"]] == [
            ("model.fp8_recipe", "tensorwise"),
            ("optimizer.fp8_recipe", "tensorwise"),
        ], kind


def test_a_twin_is_written_of_every_kind_of_file(answers, tmp_path):
    for kind, answer in answers("compare --twin", *TARGET, "--output", str(tmp_path / "twin.yaml")).items():
        counts = (answer["run_low_precision_linears"], answer["twin_low_precision_linears"])
        assert counts == ("16 of 17", "0 of 17"), kind


def test_a_rehearsal_is_of_the_same_run_whatever_the_file(tmp_path, monkeypatch):
    seen: dict[str, Any] = {}

    class StoppedError(Exception):
        """Raised in the place of a launch."""

    def stop(run: Run, **_: object) -> None:
        seen[kind.__name__] = {role: values for role, values in run.prediction.values.items() if role in SECTIONS}
        raise StoppedError

    monkeypatch.setattr(rehearsal, "rehearse", stop)
    for kind in KINDS:
        folder = tmp_path / kind.__name__
        folder.mkdir()
        with pytest.raises(StoppedError):
            main(["rehearse", *TARGET, "--config", str(kind(folder))])
    expected = {role: {} for role in SECTIONS}
    for name, values in seen.items():
        assert {role: changed(values[role], seen["ours"][role]) for role in SECTIONS} == expected, name


def changed(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with other values."""
    return {field: value for field, value in values.items() if value != others[field]}
