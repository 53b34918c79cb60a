"""Rehearsals: the cause of an error, plan against record, and whole runs in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bridge.front.loader import load_run
from bridge.rehearse.error_cause import find_cause
from bridge.rehearse.rehearse import _check_resumed_loss
from bridge.rehearse.release import list_local_releases
from bridge.rehearse.shrink import shrink
from bridge.rehearse.worker import remove_unsupported_settings
from bridge.runtime.megatron.model.gpt import GPTConfig
from tests import warm
from tests.front.test_megatron_bridge import container

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "howto" / "rehearse.md"
needs_te = pytest.mark.skipif(
    not (Path(sys.prefix) / "te" / "transformer_engine").is_dir(),
    reason=f"needs Transformer Engine's Python in {Path(sys.prefix) / 'te'} (make setup)",
)


def test_the_condition_behind_an_error_of_megatron_names_the_fields():
    model = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 6, "tensor_model_parallel_size": 4}
    with pytest.raises(ValueError, match="multiple of") as raised:
        GPTConfig(**model)
    where, fields = find_cause(raised.value, {"model": model, "optimizer": {}})
    assert fields == ["model.num_attention_heads", "model.tensor_model_parallel_size"]
    assert where.startswith("megatron/core/transformer/transformer_config.py:")


SCRIPT = """
HIDDEN=2048
export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size $HIDDEN --num-attention-heads=16 \\
    --group-query-attention --num-query-groups 4 --seq-length 4096 --max-position-embeddings 4096 --swiglu \\
    --disable-bias-linear --num-experts 8 --moe-router-topk 2 --pipeline-model-parallel-size 4 \\
    --num-layers-per-virtual-pipeline-stage 2 --tensor-model-parallel-size 2 --sequence-parallel \\
    --micro-batch-size 1 --global-batch-size 64 --use-distributed-optimizer --overlap-grad-reduce \\
    --lr 1e-4 --bf16 --fp8-format hybrid --fp8-recipe tensorwise --recompute-granularity selective \\
    --recompute-modules moe_act mlp --rotary-base $BASE
"""


def test_a_launch_script_of_megatron_lm_is_shrunk(tmp_path):
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT)
    run = load_run(["model.num_layers=48"], config_file=file)
    small = shrink(run.sections, run.precision)
    assert [str(one) for one in small.launches] == ["TP 2 with SP x PP 2 x VPP 2", "DP 2"]


def rehearsed(*words: str | Path, folder: Path) -> tuple[int, dict]:
    """Return exit code and answer of the command in a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "bridge.cli.main", "rehearse", "--json", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=warm.LIMIT_SECONDS,
    )
    assert done.stdout, done.stderr[-4000:]
    return done.returncode, json.loads(done.stdout)


def shown(text: str) -> list[str]:
    """Return the lines of an answer, with one space between words and without losses, seconds and rules."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    launch = re.compile(r"(?<= of )(\d+)(?: (?:\d\.\d{4}|-)){2} \d+$")
    return [launch.sub(r"\1", line) for line in lines if line and set(line) != {"─"}]


@needs_te
@pytest.mark.slow
def test_the_commands_of_the_page_answer_as_it_shows(tmp_path):
    blocks = re.findall(r"```console\n\$ (.+)\n((?:.*\n)*?)```", PAGE.read_text())
    codes = []
    for command, answer in blocks:
        words = [sys.executable, "-m", "bridge.cli.main", *command.split()[1:]]
        wide = {**os.environ, "COLUMNS": "300"}
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env=wide)
        codes.append(done.returncode)
        printed = shown(done.stdout + done.stderr)
        assert [line for line in shown(answer) if line not in printed] == [], printed
    assert codes == [0, 2]


@needs_te
@pytest.mark.slow
def test_a_run_folder_is_rehearsed_and_resumes_without_the_distributed_optimizer(tmp_path):
    words = ["mixed_precision=fp8_delayed", "mixed_precision.fp8_param_gather=false", "model=gpt_tiny", "train=smoke"]
    run = ["train.train_iters=1", "train.lr_warmup_iters=0", f"hydra.run.dir={tmp_path / 'run'}"]
    subprocess.run([sys.executable, ROOT / "scripts" / "train.py", *words, *run], check=True, capture_output=True)
    code, answer = rehearsed("--processes", "1", "--config", tmp_path / "run", folder=tmp_path)
    (launch,) = answer["launches"]
    assert (code, launch["planned"]) == (0, launch["equal"])
    assert launch["resumed_loss"] == launch["loss"]


@needs_te
@pytest.mark.slow
def test_a_setting_that_is_left_out_is_not_in_the_plan_of_the_rehearsal(tmp_path):
    """An offloaded optimizer keeps FP32 masters; the optimizer that is rehearsed in its place keeps remainders."""
    offloaded = ["optimizer_cpu_offload", "use_precision_aware_optimizer", "use_distributed_optimizer"]
    words = [f"optimizer.{name}=true" for name in offloaded]
    words += ["optimizer.optimizer_offload_fraction=1.0", "ddp.use_distributed_optimizer=true"]
    code, answer = rehearsed(
        "--processes", "1", "mixed_precision=bf16_mixed", "model=gpt_tiny", *words, folder=tmp_path
    )
    assert "optimizer.optimizer_cpu_offload" in [setting["path"] for setting in answer["left_out"]]
    assert (code, answer["findings"]) == (0, [])


@pytest.mark.slow
def test_a_file_that_leaves_its_release_open_is_rehearsed_on_the_newest_at_hand(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(container()))
    code, answer = rehearsed("--backend", "emulated", "--processes", "1", "--config", file, folder=tmp_path)
    newest = str(list_local_releases()[-1].version)
    assert (code, answer["target"]) == (0, "no declared target")
    assert answer["versions"]["mcore"] == answer["read"]["megatron_core"] == newest
    assert not any("the target declares" in sentence for sentence in answer["unknown"])


@pytest.mark.slow
def test_an_error_of_megatron_is_a_finding_with_its_field(tmp_path):
    words = ("--backend", "emulated", "--processes", "1", "model=gpt_tiny", "+model.num_moe_experts=4")
    code, answer = rehearsed(*words, "+model.moe_router_topk=1", folder=tmp_path)
    assert code == 2
    (finding,) = answer["findings"]
    assert "model.moe_router_topk" in finding["path"]


SAME_LOSS = "the step after a resume has the loss of the same step without a break"


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ({"loss": 4.5}, []),
        ({"loss": 4.5, "resumed_loss": 4.5}, []),
        ({"loss": 4.5, "resumed_loss": 4.25}, [(f"{SAME_LOSS}, 4.500000", "4.250000")]),
        ({"loss": 4.5, "resumed_loss": None}, [(f"{SAME_LOSS}, 4.500000", "no step")]),
    ],
)
def test_a_resume_with_another_loss_or_without_a_step_is_a_finding(outcome, expected):
    assert [(finding.rule, finding.value) for finding in _check_resumed_loss(outcome)] == expected


def test_a_null_that_megatron_takes_as_a_value_reaches_its_config():
    """Source: megatron-core 0.16.1 multi_latent_attention.py, `if self.config.q_lora_rank is None`."""
    sections = {
        "model": {"num_layers": 1, "q_lora_rank": None, "fp8_margin": None},
        "optimizer": {},
        "ddp": {},
        "precision_backend": "te_cpu",
    }
    assert remove_unsupported_settings(sections, []) == []
    assert sections["model"] == {"num_layers": 1, "q_lora_rank": None}
