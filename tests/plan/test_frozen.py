"""Parts of a multimodal model that are frozen, and parts of a run that are not counted."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.cli.main import main
from bridge.plan.memory_report import build_memory_report
from bridge.plan.precision_plan import precision_plan
from bridge.plan.workload import Workload
from bridge.read.tokenizers import find_vocab_size
from bridge.registry.mixed_precision_config import MixedPrecisionConfig

QWEN = "megatron.bridge.models.qwen_vl.qwen3_vl_provider"
SIZES = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "ffn_hidden_size": 512,
    "vocab_size": 1024,
    "seq_length": 128,
    "add_bias_linear": False,
}
LOAD = Workload(seq_length=128)


def saved(folder: Path, model: dict[str, Any], provider: str, **sections: Any) -> str:
    """Write a file of Megatron Bridge with a model of one class, and return its path."""
    path = folder / "run.yaml"
    content = {
        "mixed_precision": {
            "_target_": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig",
            "bf16": True,
            "grad_reduce_in_fp32": False,
        },
        "model": {"_target_": provider, **SIZES, **model},
        "optimizer": {"_target_": "megatron.bridge.training.config.OptimizerConfig", "use_distributed_optimizer": True},
        "train": {"_target_": "megatron.bridge.training.config.TrainingConfig", "micro_batch_size": 1},
        **sections,
    }
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def memory(path: str, capsys: pytest.CaptureFixture[str], target: str = "b200x8") -> tuple[dict[str, Any], str]:
    """Return the answer of `memory` as plain data, and the one that people read."""
    main(["memory", "--config", path, "--target", target, "--json"])
    content = json.loads(capsys.readouterr().out)
    main(["memory", "--config", path, "--target", target])
    return content, " ".join(capsys.readouterr().out.split())


def test_frozen_weights_have_no_gradient_master_and_state_and_run_no_weight_gradient() -> None:
    precision = MixedPrecisionConfig(bf16=True)
    trained, frozen = (precision_plan(precision, {**SIZES, "freeze_language_model": value}) for value in (False, True))
    assert {row["item"] for row in trained.rows()} - {row["item"] for row in frozen.rows()} == {"wgrad"}
    assert frozen.row(1, "linear_qkv", "weight").master == ""
    counted, uncounted = (build_memory_report(plan, workload=LOAD).ranks[0].bytes_of for plan in (trained, frozen))
    assert uncounted["weights"] == counted["weights"]
    assert [uncounted[kind] for kind in ("gradients", "master weights", "optimizer state")] == [0, 0, 0]
    assert 0 < uncounted["activations"] < counted["activations"]
    assert frozen.settings.notes == (
        "The language model is frozen (model.freeze_language_model): none of its weights is trained.",
    )


def test_a_file_of_a_frozen_multimodal_model_is_counted_so_and_has_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frozen = {"freeze_language_model": True, "freeze_vision_model": True, "freeze_vision_projection": False}
    content, shown = memory(saved(tmp_path, frozen, f"{QWEN}.Qwen3VLModelProvider"), capsys)
    kinds = ("gradients", "master weights", "optimizer state")
    assert [content["ranks"][0]["bytes_of"][kind] for kind in kinds] == [0, 0, 0]
    assert content["not_counted"] == ["vision tower"]
    assert "at least" in shown
    assert "; not counted: vision tower." in shown
    assert "are left" not in shown
    assert "note: The language model is frozen" in shown
    main(["memory", "--config", str(tmp_path / "run.yaml"), "--target", "b200x8", "--fit"])
    assert "Not counted, so that it may not fit: vision tower." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("provider", "is_frozen"), [("Qwen3VLModelProvider", False), ("Qwen3VLMoEModelProvider", True)]
)
def test_a_class_has_its_own_defaults_of_what_it_freezes(
    provider: str, is_frozen: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, _ = memory(saved(tmp_path, {}, f"{QWEN}.{provider}"), capsys)
    assert (content["ranks"][0]["bytes_of"]["gradients"] == 0) is is_frozen
    assert content["not_counted"] == ["vision tower"]


def test_a_class_that_is_not_known_has_the_parts_whose_configs_stand_in_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs = {"vision_config": {"depth": 27}, "audio_config": {"depth": 12}, "sound_config": None}
    content, shown = memory(saved(tmp_path, configs, "somebody.models.OmniProvider"), capsys)
    assert content["not_counted"] == ["vision tower", "audio encoder"]
    assert "; not counted: vision tower, audio encoder." in shown


def test_a_model_of_text_alone_has_a_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, shown = memory(saved(tmp_path, {}, "megatron.bridge.models.gpt_provider.GPTModelProvider"), capsys)
    assert content["not_counted"] == []
    assert "are left for what is not counted" in shown


def test_a_vocabulary_that_nothing_states_is_not_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    provider = "megatron.bridge.models.gpt_provider.GPTModelProvider"
    unknown = {"tokenizer": {"tokenizer_model": "somebody/something", "tokenizer_type": "HuggingFaceTokenizer"}}
    path = saved(tmp_path, {"vocab_size": None}, provider, **unknown)
    content, shown = memory(path, capsys)
    assert content["not_counted"] == ["embedding and output layer (model.vocab_size is not stated)"]
    assert "at least" in shown
    assert "are left" not in shown
    assert main(["memory", "--config", path, "--target", "b200x8", "--fit"]) == 2
    assert capsys.readouterr().err == (
        "model.vocab_size: --fit needs the sizes of embedding and output layer, got None. Add model.vocab_size=VALUE.\n"
    )
    assert main(["memory", "--config", path, "--target", "b200x8", "--fit", "model.vocab_size=1024"]) == 0
    capsys.readouterr()
    _, shown = memory(saved(tmp_path, {"vocab_size": None}, provider, **unknown), capsys, "b200x8,memory=1GiB")
    assert "are left" not in shown


def test_the_vocabulary_of_a_known_tokenizer_is_that_of_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    provider = "megatron.bridge.models.gpt_provider.GPTModelProvider"
    named = {"tokenizer": {"tokenizer_model": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"}}
    content, shown = memory(saved(tmp_path, {"vocab_size": None}, provider, **named), capsys)
    stated, _ = memory(saved(tmp_path, {"vocab_size": 131072}, provider, **named), capsys)
    assert content["ranks"] == stated["ranks"]
    assert content["not_counted"] == []
    because = "the published vocabulary of the tokenizer's name, of which the tokenizer may lack 0.5 %"
    assert f"Megatron Bridge sets at start: model.vocab_size=131072 ({because})." in shown


def test_the_vocabulary_of_a_known_checkpoint_is_that_of_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    provider = "megatron.bridge.models.gpt_provider.GPTModelProvider"
    sizes = {"vocab_size": None, "hf_model_id": "meta-llama/Meta-Llama-3.1-8B"}
    _, shown = memory(saved(tmp_path, sizes, provider, tokenizer={"tokenizer_model": None}), capsys)
    assert "Megatron Bridge sets at start: model.vocab_size=128256 (the vocabulary of the checkpoint's name)." in shown


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16", 131072),
        ("/checkpoints/Meta-Llama-3.1-8B-Instruct/", 128256),
        ("Qwen/Qwen3.5-35B-A3B", 248320),
        ("Qwen/Qwen3-30B-A3B", 151936),
        ("GPT2BPETokenizer", 50257),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", None),
        ("HuggingFaceTokenizer", None),
        ("", None),
        (None, None),
        (7, None),
    ],
)
def test_a_name_stands_for_a_vocabulary_by_its_longest_beginning(name: object, size: int | None) -> None:
    assert find_vocab_size(name) == size
