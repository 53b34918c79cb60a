"""Operands of every GEMM of a tiny run, in a file: ``python -m tests.runtime.megatron.te_cpu_operands PLAN.json``.

A plan has the backend (te_cpu or emulated), the scaling scheme, the file to write, and arguments of `tiny`. The
learning rate is 0, so the weights stay as they are, and a step of one backend can be compared with that of another.
"""

import json
import os
import sys
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

from bridge.preflight.gpu_for_te_cpu import declare

STEPS = 3


def main(plan: dict) -> None:
    """Train a few steps and save the operands, and the quantisation errors of another step."""
    if plan["backend"] == "te_cpu":
        if plan.get("to_nearest"):
            os.environ["NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"] = "1"
        declare(plan.get("target"), schemes=[plan["scheme"]])
    import torch

    import bridge.runtime.megatron.emulation.parallel_linear as emulated
    from bridge.runtime.megatron.backend import choose_backend, use_backend
    from bridge.runtime.megatron.process.training_process import training_process
    from bridge.training.config import runtime_config_update
    from bridge.training.run import build_run
    from tests.training.loop_tiny import tiny

    if plan.get("unfused"):
        from bridge.runtime.megatron.te_cpu import norms

        norms.FUSED_QUANTIZERS.clear()
    arguments = plan.get("arguments", {})
    shape = {"hidden_size": 128, "ffn_hidden_size": 256, **arguments.pop("model", {})}
    still = {"lr": 0.0, "min_lr": 0.0, **arguments.pop("optimizer", {})}
    train = {"train_iters": STEPS, "micro_batch_size": 2, "global_batch_size": 4, **arguments.pop("train", {})}
    config = tiny(low=plan["scheme"], model=shape, optimizer=still, train=train, **arguments)
    config.precision_backend = plan["backend"]
    if config.mixed_precision is not None:
        runtime_config_update(config)
    backend = choose_backend(plan["backend"], config.model)
    operands: list[dict] = []
    losses: list[float] = []
    nearest = emulated.GemmPrecision(scheme="nvfp4", format="e2m1", disable_stochastic_rounding=True)
    own = emulated.make_gemm_precision
    chosen = (lambda config: nearest if config.fp4 else own(config)) if plan.get("to_nearest") else own
    with (
        patch.object(emulated, "make_gemm_precision", chosen),
        training_process(config.model, seed=config.train.seed) as process,
        use_backend(backend),
    ):
        run = build_run(config, process, backend=backend)
        source = run.batches_of(run.splits.train, start=0)
        for step in range(STEPS):
            with watched(plan["backend"], run.trainer.model, step, operands):
                losses.append(run.trainer.step(source).loss)
        with run.telemetry.measure_step(STEPS):
            run.trainer.step(source)
        measured = [asdict(row) for row in run.telemetry.gather_stages()]
    rank = os.environ.get("RANK", "0")
    torch.save({"operands": operands, "losses": losses, "measured": measured}, f"{plan['out']}-{rank}.pt")


@contextmanager
def watched(backend: str, model: list, step: int, operands: list[dict]):
    """Keep the operands of each GEMM in low precision of a block."""
    from bridge.precision.schemes import GEMMS
    from bridge.runtime.megatron.emulation.parallel_linear import EmulatedParallelLinear
    from bridge.runtime.megatron.record.telemetry import name_modules_by_layer
    from bridge.runtime.numerics import Observer
    from bridge.runtime.pytorch.record import te_gemms
    from bridge.runtime.pytorch.record.modules import ModuleTracker
    from bridge.runtime.pytorch.record.operand_format import is_quantised, is_te_module

    def keep(where: tuple[int, str], gemm: str, left, right) -> None:
        sides = {"left": left, "right": right}
        kept = {
            name: {"values": side.values.clone(), "factor": side.factor, "spec": str(side.spec)}
            for name, side in sides.items()
        }
        operands.append({"step": step, "layer": where[0], "module": where[1], "gemm": gemm, **kept})

    class Keeper(Observer):
        def __init__(self, where: tuple[int, str]) -> None:
            self.where = where

        def before_gemm(self, gemm: str, left, right) -> None:
            keep(self.where, gemm, left, right)

    def keep_te(call: te_gemms.TeGemm) -> None:
        from bridge.runtime.megatron.te_cpu.storage import make_storage_operand

        if not is_quantised(call.left) or running.module not in names:  # in BF16, or no layer
            return
        row = GEMMS[call.gemm]
        left = make_storage_operand(call.left, row.left, columnwise=row.left_columnwise)
        right = make_storage_operand(call.right, row.right, columnwise=row.right_columnwise)
        keep(names[running.module], call.gemm, left, right)

    names, running = name_modules_by_layer(model), ModuleTracker()
    with ExitStack() as stack:
        if backend == "te_cpu":
            stack.enter_context(running.follow(filter(is_te_module, names)))
            stack.enter_context(te_gemms.report_gemms(keep_te, nullcontext))
        else:
            for module, where in names.items():
                if isinstance(module, EmulatedParallelLinear):
                    module.observer = Keeper(where)
                    stack.callback(setattr, module, "observer", None)
        yield


if __name__ == "__main__":
    for one in json.loads(Path(sys.argv[1]).read_text()):
        main(one)
