"""Train tiny models in every parallel layout and precision, and compare each run with one process.

    python scripts/scale.py                     tables on standard output; exit code 1 where a run differs too much,
                                                failed or was not made
    python scripts/scale.py --precisions fp32 --processes 2
    python scripts/scale.py --write docs/explain/parallel.md

`make scale` is the last line. Each rank of each run is a fork of this process, with gloo without a GPU. Gradients are
not clipped: a norm is summed in another order in each layout, and its last bits would reach every weight.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import math
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import figure  # noqa: F401  (for the forks, whose first rank draws)

from bridge.errors import BridgeError
from bridge.front.container import build_container
from bridge.front.loader import load_run
from bridge.runtime.audit.run_folder import RunFolder
from bridge.training.config import runtime_config_update
from bridge.training.loop import pretrain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bridge.training.config import ConfigContainer

ROOT = Path(__file__).resolve().parents[1]
STEPS = 4
TOKENS = 8 * 64
"""Tokens of a step."""
WORDS = (
    "model=gpt_tiny",
    "train=smoke",
    f"train.train_iters={STEPS}",
    "train.eval_iters=0",
    "train.lr_warmup_iters=0",
    "train.micro_batch_size=2",
    "optimizer.clip_grad=0",
    "logging.log_interval=1",
    "logging.tensorboard=false",
    "logging.progress=false",
    "logging.quantisation_interval=0",
    "model.make_vocab_size_divisible_by=64",
)
MODELS = {
    "dense": ("model.num_layers=4",),
    "experts": (
        "model.num_layers=2",
        "model.num_moe_experts=4",
        "model.moe_shared_expert_intermediate_size=64",
        "model.moe_token_dispatcher_type=alltoall",
        "model.moe_aux_loss_coeff=0.01",
    ),
    "latent attention": (
        "model.num_layers=2",
        "model.multi_latent_attention=true",
        "model.q_lora_rank=64",
        "model.kv_lora_rank=64",
        "model.qk_head_dim=16",
        "model.qk_pos_emb_head_dim=16",
        "model.v_head_dim=32",
        "model.qk_layernorm=true",
    ),
}
PRECISIONS = {
    "fp32": (),
    "bf16_mixed": (),
    "fp16_mixed": ("mixed_precision.initial_loss_scale=65536",),
    "fp8_delayed": (),
    "fp8_current": ("mixed_precision.first_last_layers_bf16=false",),
    "blockwise": (),
    "mxfp8": (),
    "nvfp4": (),
}
"""Recipe -> further overrides."""
OF_FOUR = ("fp32", "fp8_delayed", "fp8_current")
"""Recipes of runs in four processes; the other ones differ there by no more than in two."""
SHARDED = ("optimizer.use_distributed_optimizer=true", "ddp.use_distributed_optimizer=true")
OVERLAP = (*SHARDED, "ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true", "ddp.bucket_size=20000")
OVERLAP = (*OVERLAP, "optimizer.overlap_param_gather=true")
TENSOR = ("model.tensor_model_parallel_size=2",)
SEQUENCE = (*TENSOR, "model.sequence_parallel=true")
PIPELINE = ("model.pipeline_model_parallel_size=2",)
INTERLEAVED = (
    *PIPELINE,
    "model.virtual_pipeline_model_parallel_size=2",
    "model.overlap_p2p_comm=true",
    "model.batch_p2p_comm=false",
)
CONTEXT = ("model.context_parallel_size=2", "model.cp_comm_type=all_gather")
EXPERT = ("model.expert_model_parallel_size=2",)
DENSE, EXPERTS, LATENT = MODELS


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """A cause of differences between a layout and one process, with the largest differences that pass."""

    sentence: str
    limits: Mapping[str, float]
    """Precision -> largest relative difference of a loss."""
    other_limit: float
    """Largest relative difference under the other precisions."""

    def limit(self, precision: str) -> float:
        """Return the largest relative difference of a loss that passes under a precision."""
        return self.limits.get(precision, self.other_limit)


STAGES = Cause(
    sentence="each operand of each GEMM is that of one process",
    limits={"nvfp4": 5e-3},
    other_limit=1e-6,
)
COPIES = Cause(
    sentence="gradients of micro-batches are added in another order",
    limits={"fp32": 1e-5, "fp8_delayed": 2e-3, "nvfp4": 5e-3},
    other_limit=1e-3,
)
PARTS = Cause(
    sentence="operands are parts of tensors, or hold other tokens, and have other amaxes; or sums are rounded to BF16",
    limits={"fp32": 1e-5, "nvfp4": 5e-3},
    other_limit=2e-3,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A parallel layout."""

    words: tuple[str, ...]
    """Overrides of the training command."""
    models: tuple[str, ...]
    """Models that are trained in it."""
    cause: Cause


LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"one process": Layout(words=(), models=(DENSE, EXPERTS, LATENT), cause=STAGES)},
    2: {
        "DP2": Layout(words=(), models=(DENSE,), cause=COPIES),
        "DP2, distributed optimizer": Layout(words=SHARDED, models=(DENSE, EXPERTS, LATENT), cause=COPIES),
        "DP2, distributed optimizer, overlap": Layout(words=OVERLAP, models=(DENSE,), cause=COPIES),
        "DP2, reduction in BF16": Layout(
            words=("mixed_precision.grad_reduce_in_fp32=false",), models=(DENSE,), cause=PARTS
        ),
        "TP2": Layout(words=TENSOR, models=(DENSE,), cause=PARTS),
        "TP2 SP": Layout(words=SEQUENCE, models=(DENSE, EXPERTS, LATENT), cause=PARTS),
        "PP2": Layout(words=PIPELINE, models=(DENSE, EXPERTS, LATENT), cause=STAGES),
        "PP2 VPP2": Layout(words=INTERLEAVED, models=(DENSE,), cause=STAGES),
        "EP2": Layout(words=EXPERT, models=(EXPERTS,), cause=PARTS),
        "CP2": Layout(words=CONTEXT, models=(DENSE, EXPERTS, LATENT), cause=PARTS),
    },
    4: {
        "DP4, distributed optimizer": Layout(words=SHARDED, models=(DENSE,), cause=COPIES),
        "DP2 TP2 SP, distributed optimizer": Layout(
            words=(*SHARDED, *SEQUENCE), models=(DENSE, EXPERTS, LATENT), cause=PARTS
        ),
        "DP2 PP2, distributed optimizer": Layout(words=(*SHARDED, *PIPELINE), models=(DENSE,), cause=COPIES),
        "TP2 SP PP2": Layout(words=(*SEQUENCE, *PIPELINE), models=(DENSE, LATENT), cause=PARTS),
        "TP2 SP PP2 VPP2": Layout(words=(*SEQUENCE, *INTERLEAVED), models=(DENSE,), cause=PARTS),
        "EP2 DP4, distributed optimizer": Layout(words=(*SHARDED, *EXPERT), models=(EXPERTS,), cause=PARTS),
        "EP2 TP2 SP": Layout(
            words=(*EXPERT, *SEQUENCE, "model.expert_tensor_parallel_size=1"), models=(EXPERTS,), cause=PARTS
        ),
        "EP2 PP2": Layout(words=(*EXPERT, *PIPELINE), models=(EXPERTS,), cause=PARTS),
    },
}
"""Processes -> name -> layout."""
BEGIN, END = "<!-- the tables of scripts/scale.py -->", "<!-- end of the tables -->"

Row = dict[str, Any]


def plan(processes: int, precisions: Sequence[str]) -> list[Row]:
    """Return the runs of a number of processes."""
    runs: list[Row] = []
    for name, layout in LAYOUTS[processes].items():
        for model, precision in product(layout.models, precisions):
            if not is_run(name, processes, precision):
                continue
            words = [*WORDS, *MODELS[model], f"mixed_precision={precision}", *PRECISIONS[precision], *layout.words]
            runs.append(
                {
                    "model": model,
                    "layout": name,
                    "precision": precision,
                    "processes": processes,
                    "limit": layout.cause.limit(precision),
                    "words": words,
                }
            )
    return runs


def is_run(layout: str, processes: int, precision: str) -> bool:
    """Return whether a precision is run in a layout."""
    if processes == 4 and precision not in OF_FOUR:
        return False
    reduces_in_bf16 = layout.endswith("in BF16")
    return not (reduces_in_bf16 and precision in ("fp32", "fp16_mixed"))


def measure(row: Row, folder: Path) -> None:
    """Make a run in processes of its own, and add its losses and times, or its refusal, to the row."""
    began, row["seconds"] = time.monotonic(), 0.0
    try:
        config = build_container(load_run(row["words"], ROOT / "conf"))
        runtime_config_update(config)
    except BridgeError as error:
        row["refused"] = str(error)
        return
    fork = multiprocessing.get_context("fork")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for number in range(row["processes"]):
        rank = fork.Process(target=train, args=(config, row, folder, number, port))
        rank.start()
        ranks.append(rank)
    for rank in ranks:
        rank.join()
    row["seconds"] = time.monotonic() - began
    if (folder / "refused").is_file():
        row["refused"] = (folder / "refused").read_text()
        return
    if any(rank.exitcode for rank in ranks):
        row["failed"] = [rank.exitcode for rank in ranks]
        return
    steps = RunFolder(folder).read_metrics("train")
    row["losses"] = [step["loss"] for step in steps]
    row["ms"] = statistics.median(1000 * TOKENS / step["tokens_per_second"] for step in steps[1:])


def train(config: ConfigContainer, row: Row, folder: Path, rank: int, port: int) -> None:
    """Be one rank of a run."""
    size = str(row["processes"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            pretrain(config, run_dir=folder)
    except BridgeError as error:
        (folder / "refused").write_text(str(error))


def _key(row: Row) -> tuple[object, ...]:
    return row["processes"], *row["words"]


def compared(rows: list[Row]) -> list[Row]:
    """Add to each row its largest relative difference to one process; return rows beyond their limits or failed."""
    references = {}
    for row in rows:
        if "losses" in row and row["processes"] == 1:
            references[row["model"], row["precision"]] = row["losses"]
    beyond = []
    for row in rows:
        if "failed" in row:
            beyond.append(row)
        if "losses" not in row:
            continue
        reference = references.get((row["model"], row["precision"]), [math.nan] * STEPS)
        row["difference"] = largest_difference(row["losses"], reference)
        if not row["difference"] <= row["limit"]:  # NaN is not within a limit
            beyond.append(row)
    return beyond


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of losses to those of a reference, step by step."""
    return max(abs(loss - of_reference) / of_reference for loss, of_reference in zip(losses, reference, strict=True))


def tables(rows: list[Row]) -> str:
    """Return a table per model in Markdown: layout x precision."""
    lines = []
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    for model in MODELS:
        lines += [f"### {model.capitalize()}", "", f"| layout | {' | '.join(precisions)} |"]
        lines += [f"|---|{'---|' * len(precisions)}"]
        cells: dict[str, dict[str, str]] = {}
        for row in rows:
            if row["model"] == model:
                cells.setdefault(row["layout"], {})[row["precision"]] = cell(row)
        for layout, of_layout in cells.items():
            lines.append(f"| {layout} | {' | '.join(of_layout.get(name, '') for name in precisions)} |")
        lines.append("")
    lines += ["### Limits", "", f"| a difference has the reason | {' | '.join(precisions)} |"]
    lines += [f"|---|{'---|' * len(precisions)}"]
    for cause in (STAGES, COPIES, PARTS):
        limits = [f"{cause.limit(name):.0e}" for name in precisions]
        lines.append(f"| {cause.sentence} | {' | '.join(limits)} |")
    lines.append("")
    refusals = dict.fromkeys(f"- {row['layout']}: {row['refused']}" for row in rows if "refused" in row)
    if refusals:
        lines += ["Refused:", "", *refusals, ""]
    return "\n".join(lines)


def cell(row: Row) -> str:
    """Return a run as the text of a table's cell: last loss, difference, milliseconds per step."""
    if "refused" in row:
        return "refused"
    if "failed" in row:
        return "**failed**"
    text = f"{row['losses'][-1]:.4f}, {row['ms']:.0f} ms"
    if row["processes"] == 1:
        return text
    text = f"{text}, {row['difference']:.0e}"
    if row["difference"] <= row["limit"]:
        return text
    return f"{text} **too much**"


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="Markdown file that gets the tables")
    parser.add_argument("--rows", type=Path, help="file of runs that need not be made again, and that gets those made")
    parser.add_argument("--minutes", type=float, default=math.inf, help="make no further run after so many minutes")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--processes", nargs="+", type=int, choices=tuple(LAYOUTS)[1:], default=tuple(LAYOUTS)[1:])
    options = parser.parse_args()
    planned: list[Row] = []
    for processes in (1, *options.processes):
        planned += plan(processes, options.precisions)
    made = made_runs(planned, options.rows, seconds=60 * options.minutes)
    rows = [made[_key(row)] | row for row in planned if _key(row) in made]
    print(f"{len(rows)} of {len(planned)} runs", file=sys.stderr)
    beyond = compared(rows)
    for row in beyond:
        print(f"{row['model']}, {row['layout']}, {row['precision']}: {cell(row)}", file=sys.stderr)
    text = f"{facts(rows)}\n\n{tables(rows)}"
    if options.write is None:
        print(text)
    else:
        before, _, rest = options.write.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        options.write.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")
    if beyond or len(rows) < len(planned):
        return 1
    return 0


def made_runs(planned: Sequence[Row], file: Path | None, *, seconds: float) -> dict[tuple[object, ...], Row]:
    """Return the runs of a file, and the planned runs that are made until so many seconds have passed.

    Each new run is appended to the file.
    """
    began = time.monotonic()
    made: dict[tuple[object, ...], Row] = {}
    if file is not None and file.is_file():
        for line in file.read_text().splitlines():
            row = json.loads(line)
            made[_key(row)] = row
    missing = [row for row in planned if _key(row) not in made]
    with tempfile.TemporaryDirectory() as scratch:
        for number, row in enumerate(missing):
            if time.monotonic() - began > seconds:
                break
            folder = Path(scratch) / str(number)
            folder.mkdir()
            measure(row, folder)
            made[_key(row)] = row
            if file is not None:
                with file.open("a") as stream:
                    stream.write(f"{json.dumps(row)}\n")
    return made


def facts(rows: Sequence[Row]) -> str:
    """Return the number of runs, the date, the versions and the time that the runs took."""
    runs = sum("losses" in row for row in rows)
    minutes = sum(row["seconds"] for row in rows) / 60
    versions = f"megatron-core {version('megatron-core')}, torch {version('torch')}, Python {platform.python_version()}"
    date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    return f"{runs} runs of {STEPS} steps, {date}, {versions}, {os.cpu_count()} CPU cores, {minutes:.0f} minutes."


if __name__ == "__main__":
    sys.exit(main())
