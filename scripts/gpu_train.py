"""Training runs through the training command: Transformer Engine's layers against the emulated ones on the same GPU.

Each run is `scripts/train.py` in a process of its own. The two backends draw the same weights and read the same data;
what differs is the order in which kernels add and round. Two such runs part after some steps, as two runs in BF16 do.
So each of the first losses has to agree, and then the mean over the last steps. A model kind that the emulation covers
by other tests runs with Transformer Engine alone. In one run a layer is left out of FP8 behind the config's back: the
audit has to end it at the first step.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_report import Record, skipped_record

from bridge.runtime.audit.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterable

STEPS = 60
LAST = 20
"""Steps at the end whose mean loss is compared."""
FIRST = 8
"""Steps at the beginning of which each is compared."""
FIRST_TOLERANCE = 2e-3
"""Largest relative distance between two of the first losses: equal weights, equal data."""
TOLERANCE = 0.02
"""Largest relative distance between the mean losses at the end."""
AT_ONCE = 6
"""Runs that share the GPU: each is small and waits for its own start most of the time."""
ROOT = Path(__file__).resolve().parents[1]

RECIPES = {
    "bf16": "bf16_mixed",
    "delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}
KINDS = {
    "experts": ("model.num_moe_experts=4", "model.moe_grouped_gemm=true", "model.add_bias_linear=false"),
    "latent attention": ("model.multi_latent_attention=true",),
    "prediction layer": ("model.mtp_num_layers=1",),
}
"""Kinds of model that Transformer Engine runs under current scaling."""
SABOTAGE = """
import sys
from contextlib import nullcontext
from megatron.core.transformer import transformer_block
from bridge.front.train import main_train

entered = transformer_block.get_fp8_context
transformer_block.get_fp8_context = lambda config, layer_no=-1, is_init=False: (
    nullcontext() if layer_no == 2 and not is_init else entered(config, layer_no, is_init)
)
main_train(sys.argv[1:])
"""
"""The training command with the third layer outside of the autocast."""


def training(folder: Path, words: Iterable[str], code: str | None = None) -> dict[str, Any]:
    """Run the training command in a process, and return exit code, losses, GEMMs, audit and the end of the output.

    Args:
        folder: Run folder.
        words: Overrides.
        code: Python code that is run in place of the command's script.
    """
    program = [str(ROOT / "scripts" / "train.py")]
    if code is not None:
        program = ["-c", code]
    command = [sys.executable, *program, *words]
    command += [
        f"train.train_iters={STEPS}",
        "train.eval_iters=0",
        f"logging.run_dir={folder}",
        "logging.log_interval=1",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=300)
    losses = {record["step"]: record["loss"] for record in RunFolder(folder).read_metrics("train")}
    gemms = ""
    sentence = re.search("Matmuls of the first step: (.*)", done.stdout)
    if sentence is not None:
        gemms = sentence[1]
    record = RunFolder(folder).read_json("record.json")
    return {
        "code": done.returncode,
        "losses": losses,
        "gemms": gemms,
        "audit": record.get("audit"),
        "end": (done.stdout + done.stderr)[-1500:],
    }


def records_of(schemes: Iterable[str] = RECIPES) -> list[Record]:
    """Train under each scheme that this machine runs, with both backends, and each kind of model."""
    from bridge.runtime.megatron.te.machine import list_missing_for_te

    records: list[Record] = []
    jobs: dict[tuple[str, str], tuple[str, ...]] = {}
    has_current_scaling = False
    for scheme in schemes:
        missing = list_missing_for_te(None if scheme == "bf16" else scheme)
        if missing:
            records.append(skipped_record("train", scheme, missing))
            continue
        has_current_scaling |= scheme == "tensorwise"
        for backend in ("te", "emulated"):
            jobs[scheme, backend] = (f"mixed_precision={RECIPES[scheme]}", f"precision_backend={backend}")
    if has_current_scaling:
        for kind, words in KINDS.items():
            jobs[f"tensorwise, {kind}", "te"] = (*jobs["tensorwise", "te"], *words)
    runs, sabotaged = _trained(jobs, with_sabotage=has_current_scaling)
    if sabotaged is not None:
        records.append(_caught(sabotaged))
    for (scheme, backend), run in runs.items():
        if backend == "te":
            records.append(_record(scheme, run, runs.get((scheme, "emulated"))))
    return records


def _trained(
    jobs: dict[tuple[str, str], tuple[str, ...]], *, with_sabotage: bool
) -> tuple[dict[tuple[str, str], dict[str, Any]], dict[str, Any] | None]:
    """Train all jobs, some at once; return the run of each, and the sabotaged run of current scaling or None."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        started = {}
        for number, (job, words) in enumerate(jobs.items()):
            started[job] = pool.submit(training, Path(folder, str(number)), words)
        sabotaged = None
        if with_sabotage:
            sabotaged = pool.submit(training, Path(folder, "sabotaged"), jobs["tensorwise", "te"], SABOTAGE)
        runs = {job: future.result() for job, future in started.items()}
        if sabotaged is None:
            return runs, None
        return runs, sabotaged.result()


def _record(scheme: str, mine: dict[str, Any], other: dict[str, Any] | None) -> Record:
    """Return the record of a run with Transformer Engine, with its distance from the emulated run if there is one."""
    about = {"part": "train", "scheme": scheme, "steps": len(mine["losses"]), "gemms": mine["gemms"]}
    for backend, run in (("te", mine), ("emulated", other)):
        if run is not None and (run["code"] or len(run["losses"]) != STEPS or run["audit"] != []):
            return {**about, "ok": False, "error": f"{backend}: exit code {run['code']}: {run['end']}"}
    first, last = _ends(mine["losses"])
    record = {**about, "first_loss": first, "last_loss": last, "losses": [*mine["losses"].values()]}
    if other is None:
        return {**record, "ok": last < first}
    first_distance = 0.0
    for step in range(1, FIRST + 1):
        first_distance = max(first_distance, abs(mine["losses"][step] / other["losses"][step] - 1))
    _, other_last = _ends(other["losses"])
    last_distance = abs(last / other_last - 1)
    is_close = first_distance <= FIRST_TOLERANCE and last_distance <= TOLERANCE
    return {
        **record,
        "first_distance": first_distance,
        "last_distance": last_distance,
        "emulated_losses": [*other["losses"].values()],
        "ok": is_close and last < first,
    }


def _caught(run: dict[str, Any]) -> Record:
    """Return the record of the run in which a layer was left out of FP8."""
    mismatch = re.search("planned e4m3.*", run["end"])
    sentence = f"not caught: exit code {run['code']}: {run['end']}"
    if mismatch is not None:
        sentence = mismatch[0]
    ok = run["code"] == 1 and len(run["losses"]) <= 1 and mismatch is not None
    return {"part": "train", "scheme": "tensorwise, layer 3 outside", "steps": 0, "gemms": sentence, "ok": ok}


def _ends(losses: dict[int, float]) -> tuple[float, float]:
    """Return the first loss, and the mean of the last `LAST` losses."""
    last = [losses[step] for step in range(STEPS - LAST + 1, STEPS + 1)]
    return losses[1], sum(last) / LAST
