"""Tiny runs for tests, with precision written into the configs by hand; as a script, runs started by torchrun."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from bridge import MixedPrecisionConfig
from bridge.errors import BridgeError
from bridge.runtime.megatron.gpt import GPTConfig
from bridge.runtime.megatron.trainer import Trainer
from bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DataConfig,
    LoggingConfig,
    TrainConfig,
    runtime_config_update,
)
from bridge.training.loop import pretrain
from tests import warm

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a second thread gains a model of this size nothing
ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".pytest_cache" / "precision-bridge"
SIX = {"num_layers": 6, "first_last_layers_bf16": True}
WEIGHTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "autocast": torch.float32}


def tiny(
    mode: str = "bf16",
    *,
    sharded: bool = False,
    model: dict | None = None,
    optimizer: dict | None = None,
    ddp: dict | None = None,
    train: dict | None = None,
    data: dict | None = None,
    low: str | None = None,
    stored: bool = False,
    rows: list[dict] | None = None,
    **checkpoint,
) -> ConfigContainer:
    """Return a container for a model of 0.1 million parameters; `mode` is a key of `WEIGHTS`.

    `low` names a scaling scheme, `stored` keeps the weights in it; `rows` are those of `modules`, which
    `runtime_config_update` writes.
    """
    dtype = WEIGHTS[mode]
    half = {"bf16": mode == "bf16", "fp16": mode == "fp16", "params_dtype": dtype}
    autocast = {"enable_autocast": True, "autocast_dtype": torch.bfloat16} if mode == "autocast" else {}
    shape = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "seq_length": 64}
    low_model, low_optimizer, low_ddp = low_precision(low, stored) if low else ({}, {}, {})
    plain = {"add_bias_linear": False, "normalization": "RMSNorm", "hidden_dropout": 0.0, "attention_dropout": 0.0}
    schedule = {"train_iters": 6, "micro_batch_size": 2, "global_batch_size": 4, "lr_warmup_iters": 0, "eval_iters": 2}
    return ConfigContainer(
        model=GPTConfig(
            **{**shape, **plain, **half, **autocast, "pipeline_dtype": dtype, **low_model, **(model or {})}
        ),
        optimizer=OptimizerConfig(
            **{
                "lr": 2e-3,
                "min_lr": 2e-4,
                "use_distributed_optimizer": sharded,
                **half,
                **low_optimizer,
                **(optimizer or {}),
            }
        ),
        ddp=DistributedDataParallelConfig(
            **{"grad_reduce_in_fp32": True, "use_distributed_optimizer": sharded, **low_ddp, **(ddp or {})}
        ),
        data=DataConfig(**{"cache_dir": str(CACHE), **(data or {})}),
        train=TrainConfig(**{**schedule, **(train or {})}),
        checkpoint=CheckpointConfig(**checkpoint),
        logging=LoggingConfig(log_interval=1, tensorboard=False, plots=False),
        mixed_precision=None if rows is None else precision_of(mode, low, rows),
    )


def precision_of(mode: str, low: str | None, rows: list[dict]) -> MixedPrecisionConfig:
    """Return the precision of a run in a mode and a scheme of FP8, with rows of `modules`."""
    scheme = {"fp8": "hybrid", "fp8_recipe": low} if low else {}
    return MixedPrecisionConfig(**{mode: True}, **scheme, first_last_layers_bf16=False, modules=rows)


def low_precision(scheme: str, stored: bool) -> tuple[dict, dict, dict]:
    """Return what a scaling scheme sets in model, optimizer and ddp."""
    if scheme == "nvfp4":
        gathered = hasattr(DistributedDataParallelConfig, "fp4_param_gather")  # from megatron-core 0.17.1
        ddp = {"fp4_param_gather": stored} if gathered else {}
        return {"fp4": "e2m1", "fp4_recipe": "nvfp4", "fp4_param": stored}, {}, ddp
    fields = {"fp8": "hybrid", "fp8_recipe": scheme, "fp8_param": stored}
    if scheme == "delayed":
        fields |= {"fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"}
    reuse = {"reuse_grad_buf_for_mxfp8_param_ag": True} if stored and scheme == "mxfp8" else {}
    return fields, {"fp8_recipe": scheme, **reuse}, {"fp8_param_gather": stored, **reuse}


def records(run_dir: Path) -> list[dict]:
    """Return the training records of a run."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "train"]


def losses(run_dir: Path) -> list[float]:
    """Return the loss of every step of a run."""
    return [record["loss"] for record in records(run_dir)]


def trace(run_dir: Path) -> list[tuple]:
    """Return step, loss and gradient norm of every step of a run."""
    return [(step["step"], step["loss"], step["grad_norm"]) for step in records(run_dir)]


def in_two_processes(plans: dict[str, dict], folder: Path, *, codes: tuple[int, int] = (0, 0)) -> Path:
    """Make runs, named arguments of `tiny`, one after the other by one launch of two processes; return their folder."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps(plans))
    ranks = warm.launch(["python", "-m", "tests.training.loop_tiny", plan], processes=2, cwd=ROOT)
    ended = tuple(done.returncode for done in ranks)
    assert ended == codes, "\n".join(f"{done.returncode}: {done.stderr[-4000:]}" for done in ranks)
    return folder


def disturb(fault: str, step: int) -> None:
    """Let this rank have a fault in a step, counted from 1, before the gradients are reduced.

    Args:
        fault: poison: a NaN in a gradient; die: the process is killed; stall: the step takes 25 s longer; crash: an
            exception.
        step: The step.
    """
    run_micro_batches = Trainer.forward_backward
    taken = itertools.count(1)

    def forward_backward(self, batches):
        if next(taken) != step:
            return run_micro_batches(self, batches)
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "crash":
            raise ZeroDivisionError
        if fault == "stall":
            time.sleep(25)
            return run_micro_batches(self, batches)
        parameter = next(iter(self.model[0].parameters()))
        handle = parameter.register_hook(lambda gradient: gradient.fill_(float("nan")))
        try:
            return run_micro_batches(self, batches)
        finally:
            handle.remove()

    Trainer.forward_backward = forward_backward


def main(plan: Path) -> None:
    """Make the runs that a JSON file lists: name -> arguments of `tiny`. Each rank writes its census, or its error.

    `by_rank` holds further arguments of single ranks: `environment` and `path` are added to those of the process, and
    `fault` names one of `disturb` and its step.
    """
    rank = os.environ.get("RANK", "0")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launch stops the others when a rank ends; they write their error
    for name, given in json.loads(plan.read_text()).items():
        run_dir = plan.parent / name
        arguments = {key: value for key, value in given.items() if key != "by_rank"}
        arguments |= given.get("by_rank", {}).get(rank, {})
        environment, path = arguments.pop("environment", {}), arguments.pop("path", [])
        arguments |= {key: str(plan.parent / arguments[key]) for key in ("save", "load") if key in arguments}
        if "fault" in arguments:
            disturb(*arguments.pop("fault"))
        if "by_rank" in given:
            run_dir.mkdir(exist_ok=True)
            os.environ.update(environment)
            sys.path[:0] = path
            try:
                pretrain(tiny(**arguments), run_dir=run_dir)
            except BridgeError as error:
                told = {"text": str(error), "code": error.exit_code}
                (run_dir / f"error-{rank}.json").write_text(json.dumps(told))
            finally:
                for variable in environment:
                    del os.environ[variable]
                del sys.path[: len(path)]
            continue
        config = tiny(**arguments)
        if config.mixed_precision is not None:
            runtime_config_update(config)
        summary = pretrain(config, run_dir=run_dir)
        census = [dataclasses.asdict(row) for row in summary.census]
        (run_dir / f"census-{rank}.json").write_text(json.dumps(census))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
