"""`optimizer_cpu_offload`: HybridDeviceOptimizer's FP32 masters and moments, on the host and on the GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bridge.cli.main import main
from bridge.model.layout import ParallelLayout
from bridge.plan.memory_report import RankMemory, build_memory_report
from bridge.plan.precision_plan import precision_plan
from bridge.registry.mixed_precision_config import MixedPrecisionConfig

MODEL = {
    "num_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "ffn_hidden_size": 512,
    "vocab_size": 1024,
    "seq_length": 128,
    "add_bias_linear": False,
}
SHARDED = {"use_distributed_optimizer": True}
NARROW = {"main_params_dtype": "fp16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
OFFLOADED = {**SHARDED, "use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}


def rank(*, reduces_in_fp32: bool = True, ranks: int = 2, **optimizer: Any) -> RankMemory:
    precision = MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=reduces_in_fp32)
    parallel = ParallelLayout.from_model(MODEL).fit_to_world_size(ranks)
    plan = precision_plan(precision, MODEL, parallel, optimizer={**OFFLOADED, **optimizer}, ddp=SHARDED)
    return build_memory_report(plan, ddp=SHARDED).ranks[0]


def shares(found: RankMemory, ranks: int = 2) -> dict[str, float]:
    """Return the bytes of each kind for one parameter of a data-parallel rank's share, on the GPU and on the host."""
    own = found.parameters / ranks
    kinds = ("master weights", "optimizer state")
    on_gpu = {kind: round(found.bytes_of[kind] / own, 2) for kind in kinds}
    return on_gpu | {f"host {kind}": round(size / own, 2) for kind, size in found.host_bytes_of.items()}


def test_all_masters_moments_and_gradient_copies_are_on_the_host_in_fp32() -> None:
    found = shares(rank(optimizer_offload_fraction=1.0, **NARROW))
    assert found == {
        "master weights": 0,
        "optimizer state": 0,
        "host master weights": 4,
        "host optimizer state": 8,
        "host gradients": 4,
    }


def test_a_part_stays_on_the_gpu_in_fp32_too() -> None:
    found = shares(rank(optimizer_offload_fraction=0.75, **NARROW))
    assert (found["master weights"], found["optimizer state"]) == (1, 2)
    assert (found["host master weights"], found["host optimizer state"]) == (3, 6)


def test_the_gpus_part_keeps_fp32_gradients_of_narrower_ones() -> None:
    wide, narrow = (rank(reduces_in_fp32=is_wide, optimizer_offload_fraction=0.5) for is_wide in (True, False))
    share = narrow.parameters / 2
    assert narrow.bytes_of["gradients"] == pytest.approx(2 * narrow.parameters + 4 * share / 2, rel=1e-3)
    assert wide.bytes_of["gradients"] == pytest.approx(4 * wide.parameters, rel=1e-3)
    assert narrow.step_bytes == wide.step_bytes == 0


def test_a_fraction_of_nothing_moves_nothing_and_keeps_fp32_masters_without_remainders() -> None:
    found = rank()
    assert found.host == 0
    assert shares(found)["master weights"] == 4
    assert shares(found)["optimizer state"] == 8


def test_without_the_precision_aware_optimizer_megatrons_masters_stay_on_the_gpu() -> None:
    found = shares(rank(optimizer_offload_fraction=1.0, use_precision_aware_optimizer=False))
    assert (found["master weights"], found["host master weights"]) == (4, 4)


LAUNCH = (
    "torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 2 --hidden-size 256 --num-attention-heads 4 "
    "--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 4 --vocab-size 1024 "
    "--lr 1e-4 --train-iters 10 --bf16 --use-distributed-optimizer --optimizer-cpu-offload "
    "--use-precision-aware-optimizer --main-params-dtype fp16 --exp-avg-dtype fp16\n"
)


def test_a_script_of_megatron_lm_offloads_all_and_its_dtypes_have_no_effect(tmp_path, capsys) -> None:
    script = tmp_path / "run.sh"
    script.write_text(LAUNCH, encoding="utf-8")
    words = ["--config", str(script), "--target", "h100x2,te2.9,cuda12.9,mcore0.19"]
    assert main(["plan", *words]) == 0
    assert "master fp32 (sharded), on the host" in capsys.readouterr().out
    assert main(["memory", *words]) == 0
    shown = capsys.readouterr().out
    assert "on the host" in shown
    assert "On the host for a rank of stage 0: master weights" in shown
    assert main(["check", *words]) == 0
    shown = capsys.readouterr().out
    assert "-> fp32 master weights" in shown
    assert shown.count("warning PB358") == 2
    assert "PB360" not in shown


class Shard:
    """A parameter's shard as HybridDeviceOptimizer asks it, without memory on a GPU."""

    def __init__(self, size: int, dtype: torch.dtype = torch.bfloat16, *, is_cuda: bool = True) -> None:
        self.size, self.dtype, self.is_cuda = size, dtype, is_cuda

    def numel(self) -> int:
        return self.size

    def detach(self) -> "Shard":
        return Shard(self.size, self.dtype, is_cuda=self.is_cuda)

    clone = pin_memory = detach

    def cpu(self) -> "Shard":
        return Shard(self.size, self.dtype, is_cuda=False)

    def float(self) -> "Shard":
        return Shard(self.size, torch.float32, is_cuda=self.is_cuda)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_megatrons_own_optimizer_moves_that_share_and_steps_in_fp32_alone(fraction: float) -> None:
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    groups = [{"params": [Shard(size) for size in (100, 200, 50)]}, {"params": [Shard(10) for _ in range(5)]}]
    run = SimpleNamespace(param_groups=groups, param_update_in_fp32=True, pin_cpu_params=True)
    on_host, on_gpu, *_ = HybridDeviceOptimizer._get_sub_optimizer_param_groups(run, fraction)
    host, gpu = ([one for group in part for one in group["params"]] for part in (on_host, on_gpu))
    assert {one.dtype for one in (*host, *gpu)} == {torch.float32}
    moved, stayed = (sum(one.size for one in part) for part in (host, gpu))
    assert moved + stayed == 400
    assert {0.0: moved == 0, 0.3: 120 <= moved < 320, 1.0: stayed == 0}[fraction]
