"""Rehearsals: the cause of an error, plan against record, and whole runs in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.megatron.gpt import GPTConfig
from bridge.plan.precision_plan import precision_plan
from bridge.registry.registry import get_mixed_precision_config
from bridge.rehearse.cause import cause_of
from bridge.rehearse.compare import compared

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "docs" / "showcase" / "llama3_70b.yaml"
needs_te = pytest.mark.skipif(
    not (Path(sys.prefix) / "te" / "transformer_engine").is_dir(),
    reason=f"needs Transformer Engine's Python in {Path(sys.prefix) / 'te'} (make setup)",
)


def test_the_condition_behind_an_error_of_megatron_names_the_fields():
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 6, "tensor_model_parallel_size": 4}
    with pytest.raises(ValueError, match="multiple of") as raised:
        GPTConfig(**model)
    cause = cause_of(raised.value, {"model": model, "optimizer": {}})
    assert cause.fields == ("model.num_attention_heads", "model.tensor_model_parallel_size")
    assert cause.where.startswith("megatron/core/transformer/transformer_config.py:")


def record(layer: int, module: str, gemm: str, left: str, right: str) -> dict:
    return {"layer": layer, "module": module, "gemm": gemm, "left": left, "right": right}


def test_a_layer_that_ran_in_another_format_is_named():
    model = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "add_bias_linear": False}
    plan = precision_plan(get_mixed_precision_config("bf16_with_fp8_current_scaling_mixed"), model)
    modules = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    low = {"fprop": ("e4m3", "e4m3"), "dgrad": ("e5m2", "e4m3"), "wgrad": ("e5m2", "e4m3")}
    ran = [record(layer, name, "all", "bf16", "bf16") for layer in (1, 3) for name in modules]
    ran += [record(2, name, gemm, *formats) for name in modules for gemm, formats in low.items()]
    whole = compared(plan, ran)
    assert (whole.planned, whole.equal, whole.findings) == (36, 36, ())
    ran[-1] = {**ran[-1], "left": "bf16", "right": "bf16"}
    del ran[0]
    found = [(one.path, one.rule, one.value) for one in compared(plan, ran).findings]
    assert ("layers 2, linear_fc2, wgrad", "planned e5m2 x e4m3", "bf16") in found
    assert ("layers 1, linear_qkv, fprop", "planned bf16", "nothing recorded") in found


def rehearsed(*words: str | Path, folder: Path) -> tuple[int, dict]:
    """Return exit code and answer of the command in a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "bridge.cli.main", "rehearse", "--json", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.stdout, done.stderr[-4000:]
    return done.returncode, json.loads(done.stdout)


@needs_te
@pytest.mark.slow
def test_a_run_of_64_gpus_is_rehearsed_with_every_kind_of_its_layout(tmp_path):
    code, answer = rehearsed("--config", LLAMA, folder=tmp_path)
    assert (code, answer["findings"]) == (0, [])
    assert answer["launches"][0]["layout"] == "TP 2 with SP x PP 2 x VPP 2"
    for launch in answer["launches"]:
        assert launch["planned"] == launch["equal"] == 48
        assert launch["resumed_loss"] < 5.5
    assert "Transformer Engine 2.9 of the target: 2.20.2 ran here." in answer["unknown"]


@pytest.mark.slow
def test_an_error_of_megatron_is_a_finding_with_its_field(tmp_path):
    words = ("--backend", "emulated", "--processes", "1", "model=gpt_tiny", "+model.num_moe_experts=4")
    code, answer = rehearsed(*words, "+model.moe_router_topk=1", folder=tmp_path)
    assert code == 2
    (finding,) = answer["findings"]
    assert "model.moe_router_topk" in finding["path"]
