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
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import figure  # noqa: F401  (for the forks, whose first rank draws)

from bridge.errors import BridgeError
from bridge.front.decode import container
from bridge.front.loader import load_run
from bridge.runtime.audit.run_folder import RunFolder
from bridge.training.config import runtime_config_update
from bridge.training.loop import pretrain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bridge.training.config import ConfigContainer

ROOT = Path(__file__).resolve().parents[1]
STEPS = 4
TOKENS = 8 * 64
"""Of one step."""
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
STAGES, COPIES, PARTS = "stages", "copies", "parts"
LAYOUTS: dict[int, dict[str, tuple[tuple[str, ...], tuple[str, ...], str]]] = {
    1: {"one process": ((), (DENSE, EXPERTS, LATENT), STAGES)},
    2: {
        "DP2": ((), (DENSE,), COPIES),
        "DP2, distributed optimizer": (SHARDED, (DENSE, EXPERTS, LATENT), COPIES),
        "DP2, distributed optimizer, overlap": (OVERLAP, (DENSE,), COPIES),
        "DP2, reduction in BF16": (("mixed_precision.grad_reduce_in_fp32=false",), (DENSE,), PARTS),
        "TP2": (TENSOR, (DENSE,), PARTS),
        "TP2 SP": (SEQUENCE, (DENSE, EXPERTS, LATENT), PARTS),
        "PP2": (PIPELINE, (DENSE, EXPERTS, LATENT), STAGES),
        "PP2 VPP2": (INTERLEAVED, (DENSE,), STAGES),
        "EP2": (EXPERT, (EXPERTS,), PARTS),
        "CP2": (CONTEXT, (DENSE, EXPERTS, LATENT), PARTS),
    },
    4: {
        "DP4, distributed optimizer": (SHARDED, (DENSE,), COPIES),
        "DP2 TP2 SP, distributed optimizer": ((*SHARDED, *SEQUENCE), (DENSE, EXPERTS, LATENT), PARTS),
        "DP2 PP2, distributed optimizer": ((*SHARDED, *PIPELINE), (DENSE,), COPIES),
        "TP2 SP PP2": ((*SEQUENCE, *PIPELINE), (DENSE, LATENT), PARTS),
        "TP2 SP PP2 VPP2": ((*SEQUENCE, *INTERLEAVED), (DENSE,), PARTS),
        "EP2 DP4, distributed optimizer": ((*SHARDED, *EXPERT), (EXPERTS,), PARTS),
        "EP2 TP2 SP": ((*EXPERT, *SEQUENCE, "model.expert_tensor_parallel_size=1"), (EXPERTS,), PARTS),
        "EP2 PP2": ((*EXPERT, *PIPELINE), (EXPERTS,), PARTS),
    },
}
"""Processes -> layout -> (overrides, models, the reason for a difference)."""
LIMITS = {
    STAGES: (
        "each operand of each GEMM is that of one process",
        {"nvfp4": 5e-3},
        1e-6,
    ),
    COPIES: (
        "gradients of micro-batches are added in another order",
        {"fp32": 1e-5, "fp8_delayed": 2e-3, "nvfp4": 5e-3},
        1e-3,
    ),
    PARTS: (
        "operands are parts of tensors, or hold other tokens, and have other amaxes; or sums are rounded to BF16",
        {"fp32": 1e-5, "nvfp4": 5e-3},
        2e-3,
    ),
}
"""Reason -> (its sentence, precision -> largest relative difference of a loss that passes, that of the other ones)."""
BEGIN, END = "<!-- the tables of scripts/scale.py -->", "<!-- end of the tables -->"

Row = dict[str, Any]


def plan(processes: int, precisions: Sequence[str]) -> list[Row]:
    """Return the runs of a number of processes."""
    return [
        {
            "model": model,
            "layout": layout,
            "precision": precision,
            "processes": processes,
            "limit": LIMITS[reason][1].get(precision, LIMITS[reason][2]),
            "words": [*WORDS, *MODELS[model], f"mixed_precision={precision}", *PRECISIONS[precision], *words],
        }
        for layout, (words, models, reason) in LAYOUTS[processes].items()
        for model in models
        for precision in precisions
        if (processes < 4 or precision in OF_FOUR)
        and not (layout.endswith("in BF16") and precision in ("fp32", "fp16_mixed"))
    ]


def measure(row: Row, folder: Path) -> None:
    """Make a run in processes of its own, and add its losses and times, or its refusal, to the row."""
    began, row["seconds"] = time.monotonic(), 0.0
    try:
        config = container(load_run(row["words"], ROOT / "conf"))
        runtime_config_update(config)
    except BridgeError as error:
        row["refused"] = str(error)
        return
    fork = multiprocessing.get_context("fork")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    ranks = [fork.Process(target=train, args=(config, row, folder, rank, port)) for rank in range(row["processes"])]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    row["seconds"] = time.monotonic() - began
    if (folder / "refused").is_file():
        row["refused"] = (folder / "refused").read_text()
        return
    if any(rank.exitcode for rank in ranks):
        row["failed"] = [rank.exitcode for rank in ranks]
        return
    steps = RunFolder(folder).metrics("train")
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
    done = [row for row in rows if "losses" in row]
    alone = {(row["model"], row["precision"]): row["losses"] for row in done if row["processes"] == 1}
    for row in done:
        one_process = alone.get((row["model"], row["precision"]), [math.nan] * STEPS)
        pairs = zip(row["losses"], one_process, strict=True)
        row["difference"] = max(abs(own - one) / one for own, one in pairs)
    return [row for row in rows if "failed" in row or ("losses" in row and not row["difference"] <= row["limit"])]


def tables(rows: list[Row]) -> str:
    """Return a table per model in Markdown: layout x precision."""
    lines = []
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    for model in MODELS:
        lines += [f"### {model.capitalize()}", "", f"| layout | {' | '.join(precisions)} |"]
        lines += [f"|---|{'---|' * len(precisions)}"]
        own = [row for row in rows if row["model"] == model]
        for layout in dict.fromkeys(row["layout"] for row in own):
            cells = {row["precision"]: cell(row) for row in own if row["layout"] == layout}
            lines.append(f"| {layout} | {' | '.join(cells.get(name, '') for name in precisions)} |")
        lines.append("")
    lines += ["### Limits", "", f"| a difference has the reason | {' | '.join(precisions)} |"]
    lines += [f"|---|{'---|' * len(precisions)}"]
    for sentence, limits, other in LIMITS.values():
        lines.append(f"| {sentence} | {' | '.join(f'{limits.get(name, other):.0e}' for name in precisions)} |")
    lines.append("")
    refusals = dict.fromkeys(f"- {row['layout']}: {row['refused']}" for row in rows if "refused" in row)
    return "\n".join([*lines, *(["Refused:", "", *refusals, ""] if refusals else [])])


def cell(row: Row) -> str:
    """Return a run as the text of a table's cell: last loss, difference, milliseconds per step."""
    if "refused" in row or "failed" in row:
        return "refused" if "refused" in row else "**failed**"
    text = f"{row['losses'][-1]:.4f}, {row['ms']:.0f} ms"
    if row["processes"] == 1:
        return text
    mark = "" if row["difference"] <= row["limit"] else " **too much**"
    return f"{text}, {row['difference']:.0e}{mark}"


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="Markdown file that gets the tables")
    parser.add_argument("--rows", type=Path, help="file of runs that need not be made again, and that gets those made")
    parser.add_argument("--minutes", type=float, default=math.inf, help="make no further run after so many minutes")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--processes", nargs="+", type=int, choices=tuple(LAYOUTS)[1:], default=tuple(LAYOUTS)[1:])
    given = parser.parse_args()
    began = time.monotonic()
    planned = [row for processes in (1, *given.processes) for row in plan(processes, given.precisions)]
    known = given.rows.read_text().splitlines() if given.rows is not None and given.rows.is_file() else []
    made = {_key(row): row for row in map(json.loads, known)}
    with tempfile.TemporaryDirectory() as scratch:
        for number, row in enumerate(row for row in planned if _key(row) not in made):
            if time.monotonic() - began > 60 * given.minutes:
                break
            folder = Path(scratch) / str(number)
            folder.mkdir()
            measure(row, folder)
            made[_key(row)] = row
            if given.rows is not None:
                with given.rows.open("a") as stream:
                    stream.write(f"{json.dumps(row)}\n")
    rows = [made[_key(row)] | row for row in planned if _key(row) in made]
    print(f"{len(rows)} of {len(planned)} runs", file=sys.stderr)
    beyond = compared(rows)
    for row in beyond:
        print(f"{row['model']}, {row['layout']}, {row['precision']}: {cell(row)}", file=sys.stderr)
    facts = (
        f"{sum('losses' in row for row in rows)} runs of {STEPS} steps, "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, "
        f"megatron-core {version('megatron-core')}, torch {version('torch')}, Python {platform.python_version()}, "
        f"{os.cpu_count()} CPU cores, {sum(row['seconds'] for row in rows) / 60:.0f} minutes."
    )
    text = f"{facts}\n\n{tables(rows)}"
    if given.write is None:
        print(text)
    else:
        before, _, rest = given.write.read_text().partition(BEGIN)
        given.write.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}")
    return 1 if beyond or len(rows) < len(planned) else 0


if __name__ == "__main__":
    sys.exit(main())
