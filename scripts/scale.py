"""Train tiny models in every parallel layout and precision, and compare each run with one process.

    python scripts/scale.py                     a table on standard output; exit code 1 where a run differs too much
    python scripts/scale.py --precisions fp32 --processes 2
    python scripts/scale.py --write docs/explain/parallel.md

`make scale` is the last line. Each rank of each run is a fork of this process, with gloo without a GPU.
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

from bridge.errors import BridgeError
from bridge.front import compose
from bridge.training.config import runtime_config_update
from bridge.training.loop import pretrain

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
STEPS = 5
TOKENS = 8 * 64
"""Of one step."""
WORDS = (
    "model=gpt_tiny",
    "train=smoke",
    f"train.train_iters={STEPS}",
    "train.eval_iters=0",
    "train.lr_warmup_iters=0",
    "train.micro_batch_size=2",
    "logging.log_interval=1",
    "logging.tensorboard=false",
    "logging.progress=false",
    "model.num_layers=4",
    "model.make_vocab_size_divisible_by=64",
)
MODELS = {
    "dense": (),
    "experts": (
        "model.num_moe_experts=4",
        "model.moe_shared_expert_intermediate_size=64",
        "model.moe_token_dispatcher_type=alltoall",
        "model.moe_aux_loss_coeff=0.01",
    ),
    "latent attention": (
        "model.multi_latent_attention=true",
        "model.q_lora_rank=32",
        "model.kv_lora_rank=32",
        "model.qk_head_dim=16",
        "model.qk_pos_emb_head_dim=16",
        "model.v_head_dim=32",
        "model.qk_layernorm=true",
    ),
}
PRECISIONS = {
    "fp32": 1e-5,
    "bf16_mixed": 2e-3,
    "fp8_current": 1e-2,
    "fp8_delayed": 1e-2,
    "mxfp8": 1e-2,
    "nvfp4": 2e-2,
}
"""Recipe -> the largest relative difference of a loss that passes."""
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
LAYOUTS: dict[int, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    2: {
        "DP2": ((), (DENSE,)),
        "DP2, distributed optimizer": (SHARDED, (DENSE, EXPERTS, LATENT)),
        "DP2, distributed optimizer, overlap": (OVERLAP, (DENSE,)),
        "DP2, reduction in BF16": (("mixed_precision.grad_reduce_in_fp32=false",), (DENSE,)),
        "TP2": (TENSOR, (DENSE,)),
        "TP2 SP": (SEQUENCE, (DENSE, EXPERTS, LATENT)),
        "PP2": (PIPELINE, (DENSE, EXPERTS, LATENT)),
        "PP2 VPP2": (INTERLEAVED, (DENSE,)),
        "EP2": (EXPERT, (EXPERTS,)),
        "CP2": (CONTEXT, (DENSE, EXPERTS, LATENT)),
    },
    4: {
        "DP4, distributed optimizer": (SHARDED, (DENSE,)),
        "DP2 TP2 SP, distributed optimizer": ((*SHARDED, *SEQUENCE), (DENSE, EXPERTS, LATENT)),
        "DP2 PP2, distributed optimizer": ((*SHARDED, *PIPELINE), (DENSE,)),
        "TP2 SP PP2": ((*SEQUENCE, *PIPELINE), (DENSE, LATENT)),
        "TP2 SP PP2 VPP2": ((*SEQUENCE, *INTERLEAVED), (DENSE,)),
        "EP2 DP4, distributed optimizer": ((*SHARDED, *EXPERT), (EXPERTS,)),
        "EP2 TP2 SP": ((*EXPERT, *SEQUENCE), (EXPERTS,)),
        "EP2 PP2": ((*EXPERT, *PIPELINE), (EXPERTS,)),
    },
}
"""Processes -> layout -> (overrides, models)."""
BEGIN, END = "<!-- the tables of scripts/scale.py -->", "<!-- end of the tables -->"

Row = dict[str, Any]


def plan(processes: int, precisions: Sequence[str]) -> list[Row]:
    """Return the runs of a number of processes."""
    layouts = LAYOUTS.get(processes, {"one process": ((), tuple(MODELS))})
    return [
        {
            "model": model,
            "layout": layout,
            "precision": precision,
            "processes": processes,
            "words": [*WORDS, *MODELS[model], f"mixed_precision={precision}", *words],
        }
        for layout, (words, models) in layouts.items()
        for model in models
        for precision in precisions
        if not (precision == "fp32" and layout.endswith("in BF16"))
    ]


def measure(row: Row, folder: Path) -> None:
    """Make a run in processes of its own, and add its losses and times, or its refusal, to the row."""
    began = time.monotonic()
    fork = multiprocessing.get_context("fork")
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    ranks = [fork.Process(target=train, args=(row, folder, rank, port)) for rank in range(row["processes"])]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    row["seconds"] = time.monotonic() - began
    if (folder / "refused").is_file():
        row["refused"] = (folder / "refused").read_text()
        return
    if any(rank.exitcode for rank in ranks):
        sys.exit(f"{row['model']}, {row['layout']}, {row['precision']} failed.")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "train"]
    row["losses"] = [step["loss"] for step in steps]
    row["ms"] = statistics.median(1000 * TOKENS / step["tokens_per_second"] for step in steps[1:])


def train(row: Row, folder: Path, rank: int, port: int) -> None:
    """Be one rank of a run."""
    size = str(row["processes"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            config = compose(row["words"], config_path=ROOT / "conf")
            runtime_config_update(config)
            pretrain(config, run_dir=folder)
    except BridgeError as error:
        (folder / "refused").write_text(str(error))


def _key(row: Row) -> tuple[str, ...]:
    return row["model"], row["layout"], row["precision"]


def compared(rows: list[Row]) -> bool:
    """Add to each row its largest relative difference to one process; return whether all are within their limits."""
    alone = {(row["model"], row["precision"]): row["losses"] for row in rows if row["processes"] == 1}
    for row in rows:
        if "losses" in row:
            pairs = zip(row["losses"], alone[row["model"], row["precision"]], strict=True)
            row["difference"] = max(abs(own - one) / one for own, one in pairs)
    return all(row.get("difference", 0) <= PRECISIONS[row["precision"]] for row in rows)


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
    refusals = dict.fromkeys(f"- {row['layout']}: {row['refused']}" for row in rows if "refused" in row)
    return "\n".join([*lines, *(["Refused:", "", *refusals, ""] if refusals else [])])


def cell(row: Row) -> str:
    """Return a run as the text of a table's cell: last loss, difference, milliseconds per step."""
    if "refused" in row:
        return "refused"
    text = f"{row['losses'][-1]:.4f}, {row['ms']:.0f} ms"
    if row["processes"] == 1:
        return text
    mark = " **too much**" if row["difference"] > PRECISIONS[row["precision"]] else ""
    return f"{text}, {row['difference']:.0e}{mark}"


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="Markdown file that gets the tables")
    parser.add_argument("--rows", type=Path, help="file of runs that need not be made again, and that gets those made")
    parser.add_argument("--minutes", type=float, default=math.inf, help="make no further run after so many minutes")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--processes", nargs="+", type=int, choices=LAYOUTS, default=list(LAYOUTS))
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
    rows = [made[_key(row)] for row in planned if _key(row) in made]
    print(f"{len(rows)} of {len(planned)} runs", file=sys.stderr)
    agree = compared(rows)
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
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
