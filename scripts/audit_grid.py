"""Train tiny models of every recipe, kind and layout on both backends, and compare each record with its plan.

    python scripts/audit_grid.py                a line per cell and a summary
    python scripts/audit_grid.py --recipes fp8_current --kinds dense MoE --layouts PP2 --backends emulated
    python scripts/audit_grid.py --write docs/howto/is-it-really-fp8.md --results grid.json

`make grid` is the last line. A cell is a recipe, a kind of model, a layout and a backend. It is trained for two steps
by the code of the training command, which audits both. Every row of its plan has to be a row of its record. A run that
is refused with a sentence of `REFUSED` is made again with the override that this names, where it names one. Exit code
1: a cell is not as planned.

With ``--results`` the cells of the file are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore

from bridge.errors import AuditError, BridgeError, TrainingError
from bridge.precision.mode import scheme_of
from bridge.preflight.te_cpu import declare
from bridge.registry.registry import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
WORDS = (
    "train=smoke",
    "train.train_iters=2",
    "train.eval_iters=0",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.distributed_timeout_minutes=5",
    "logging.tensorboard=false",
    "logging.progress=false",
    "logging.quantisation_interval=0",
)
KINDS = {
    "dense": (),
    "gated": ("model.gated_linear_unit=true", "model.activation_func=silu"),
    "GQA": ("model.num_query_groups=2",),
    "MLA": (
        "model.multi_latent_attention=true",
        "model.q_lora_rank=32",
        "model.kv_lora_rank=32",
        "model.qk_head_dim=16",
        "model.qk_pos_emb_head_dim=16",
        "model.v_head_dim=32",
    ),
    "MoE": (
        "model.num_moe_experts=4",
        "model.moe_grouped_gemm=true",
        "model.moe_ffn_hidden_size=64",
        "model.moe_token_dispatcher_type=alltoall",
        "model.moe_aux_loss_coeff=0.01",
    ),
    "MTP": ("model.mtp_num_layers=1",),
    "hybrid": (),
    "delta net": (),
    "sparse": (),
}
"""Kind of model -> its overrides."""
MODELS = {"hybrid": "hybrid_tiny", "delta net": "delta_tiny", "sparse": "sparse_tiny"}
"""Kind of model -> the option that it is, where that is not `gpt_tiny`."""
PP2 = ("model.pipeline_model_parallel_size=2",)
LAYOUTS: dict[str, tuple[str, ...]] = {
    "1 process": (),
    "TP2 SP": ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true"),
    "PP2": PP2,
    "PP2 VPP2": (
        *PP2,
        "model.virtual_pipeline_model_parallel_size=2",
        "model.overlap_p2p_comm=true",
        "model.batch_p2p_comm=false",
    ),
    "DP2, distributed optimizer": (
        "optimizer.use_distributed_optimizer=true",
        "ddp.use_distributed_optimizer=true",
    ),
}
"""Layout -> its overrides; all but the first have two processes."""
ALONE = next(iter(LAYOUTS))
BACKENDS = ("emulated", "te_cpu")
REFUSED: dict[str, tuple[str, ...]] = {
    "model.fp4_param: this Megatron Core cannot keep ": ("mixed_precision.fp4_param_gather=false",),
    "PB703 model.sequence_parallel: must be off under autocast ": ("model.sequence_parallel=false",),
    "PB703 model.sequence_parallel: must be on for ": (),
    "PB703 model.tensor_model_parallel_size: must be 1 for sparse attention ": (
        "model.tensor_model_parallel_size=1",
        "model.sequence_parallel=false",
    ),
    "model.bf16: must be on for sparse attention, ": (),
    "PB109 model.pipeline_dtype: ": ("mixed_precision.pipeline_dtype=bf16",),
    "PB701 model.virtual_pipeline_model_parallel_size: ": (
        "model.virtual_pipeline_model_parallel_size=null",
        "model.overlap_p2p_comm=false",
    ),
}
"""Beginning of a sentence that refuses a run -> the override that it asks for, where there is one."""
BEGIN, END = "<!-- the table of scripts/audit_grid.py -->", "<!-- end of the table -->"

PARTS = ("recipe", "kind", "layout", "backend")

CELLS_OF_A_LAUNCH = 18
"""More would gather threads: each run of a process starts some that end with the process."""

Cell = dict[str, Any]
"""`recipe`, `kind`, `layout`, `backend` and a test's `model` and overrides, `words`; once it was run `rows` and
`equal`, `refused` or `failed`."""


def name_of(cell: Cell) -> str:
    """Return a cell in a few words."""
    return ", ".join(cell[part] for part in PARTS)


def words_of(cell: Cell) -> list[str]:
    """Return the overrides of a cell."""
    precision = REGISTRY.get(cell["recipe"])
    kept = sum(getattr(precision, f"num_layers_at_{end}_in_bf16") or 0 for end in ("start", "end"))
    layers = 4 * -(-(kept + 2) // 4)  # at least two in low precision, and as many in each chunk of each stage
    chosen = [f"mixed_precision={cell['recipe']}", f"precision_backend={cell['backend']}"]
    if cell["kind"] != "hybrid":  # its pattern has eight
        chosen.append(f"model.num_layers={layers}")
    model = f"model={cell.get('model', MODELS.get(cell['kind'], 'gpt_tiny'))}"
    return [model, *WORDS, *chosen, *KINDS[cell["kind"]], *LAYOUTS[cell["layout"]], *cell.get("words", ())]


def target_of(cell: Cell) -> str | None:
    """Return the GPU that Transformer Engine's Python runs as; None under the emulation."""
    if cell["backend"] != "te_cpu":
        return None
    return "b200" if scheme_of(REGISTRY.get(cell["recipe"])) in ("mxfp8", "nvfp4") else "h100"


def run(cells: Sequence[Cell]) -> Iterator[Cell]:
    """Run cells of one layout, backend and GPU in new processes and yield each, with its result.

    A cell that ends the processes has failed, and the others are run without it.
    """
    left = list(cells[:CELLS_OF_A_LAUNCH])
    later = cells[CELLS_OF_A_LAUNCH:]
    while left:
        with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as ending:
            store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            ranks = list(launched(left, Path(scratch), store.port))
            for rank in ranks:
                ending.callback(rank.wait)
            for line in ranks[0].stdout or ():
                yield left.pop(0) | json.loads(line)
            if left:
                for rank in ranks:
                    rank.terminate()
                errors = Path(scratch, "0.err").read_text(encoding="utf-8").strip().splitlines()
                yield left.pop(0) | {"failed": errors[-1] if errors else "the process ended"}
    if later:
        yield from run(later)


def launched(cells: Sequence[Cell], folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """Start the ranks of one job, and yield them; the first one prints a line per cell."""
    processes = 1 if cells[0]["layout"] == ALONE else 2
    plan = folder / "plan.json"
    plan.write_text(json.dumps(cells))
    size = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    job = {**os.environ, **size, **address}
    for rank in range(processes):
        with Path(folder, f"{rank}.err").open("w") as errors:
            yield subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, "--rank", str(plan)],
                env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=errors,
                text=True,
            )


def be_rank(plan: Path) -> None:
    """Train the cells of a plan as one rank of a job."""
    cells = json.loads(plan.read_text())
    target = target_of(cells[0])
    if target is not None:
        declare(target)
    for number, cell in enumerate(cells):
        with contextlib.redirect_stdout(io.StringIO()):
            found = trained(words_of(cell), plan.parent / str(number))
        if os.environ["RANK"] == "0":
            print(json.dumps(found), flush=True)


def trained(words: Sequence[str], folder: Path) -> Cell:
    """Train as overrides say, and return the number of rows and of equal ones, and the sentence of a refusal."""
    from bridge.front.decode import container
    from bridge.front.loader import load_run
    from bridge.runtime.audit.record import Record
    from bridge.training.config import runtime_config_update
    from bridge.training.loop import pretrain  # imports Megatron, after `declare`

    different: set[tuple[str, str, str]] = set()
    found: Cell = {}
    try:
        config = container(load_run(words, ROOT / "conf"))
        runtime_config_update(config)
        pretrain(config, run_dir=folder)
    except AuditError as error:
        found["failed"] = str(error)
        mismatches: Any = error.mismatches
        for one in mismatches:
            different.update(product(one.layers, one.modules, one.gemms))
    except TrainingError:
        raise  # the run itself failed
    except BridgeError as error:
        known = [further for sentence, further in REFUSED.items() if str(error).startswith(sentence)]
        if not known:
            return {"failed": str(error)}
        found["refused"] = str(error)
        further = known[0]
        return (trained([*words, *further], folder) if further else {}) | found
    if os.environ.get("RANK", "0") != "0":
        return found
    rows = {(row.layer, row.module, row.gemm) for row in Record.read(folder / "record.json").gemms} | different
    return found | {"rows": len(rows), "equal": len(rows - different)}


def outcome(cell: Cell) -> str:
    """Return the result of a cell as a line."""
    rows = f"{cell['equal']} of {cell['rows']} rows" if "rows" in cell else "no record"
    parts = [name_of(cell), rows, *(f"{key}: {cell[key]}" for key in ("refused", "failed") if key in cell)]
    return ": ".join(parts)


def is_planned(cell: Cell) -> bool:
    """Return whether every row of a cell is equal, or it is refused as it has to be."""
    return "failed" not in cell and cell.get("equal") == cell.get("rows")


def table(cells: Sequence[Cell]) -> str:
    """Return the counts of layouts and backends in Markdown, and the refused cells with their reasons."""
    backends = list(dict.fromkeys(cell["backend"] for cell in cells))
    lines = [f"| layout | {' | '.join(backends)} |", f"|---|{'---|' * len(backends)}"]
    for layout in dict.fromkeys(cell["layout"] for cell in cells):
        columns = [
            counts([cell for cell in cells if (cell["layout"], cell["backend"]) == (layout, backend)])
            for backend in backends
        ]
        lines.append(f"| {layout} | {' | '.join(columns)} |")
    refused: defaultdict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if "refused" in cell:
            refused[cell["refused"]].append(cell)
    if refused:
        lines += ["", "Refused, and run with the override that the sentence asks for, where it asks for one:", ""]
    for sentence, own in refused.items():
        parts = (listed(own, part) for part in PARTS)
        lines.append(f"- {len(own)} cells ({'; '.join(parts)}): {sentence}")
    return "\n".join(lines)


def counts(cells: Sequence[Cell]) -> str:
    """Return the number of cells whose plan is their record, and of equal rows."""
    equal, rows = (sum(cell.get(column, 0) for cell in cells) for column in ("equal", "rows"))
    return f"{sum(map(is_planned, cells))} of {len(cells)} cells, {equal:,} of {rows:,} rows"


def listed(cells: Sequence[Cell], part: str) -> str:
    """Return the values of one part of cells, "all" where they are all there are."""
    known = {"recipe": REGISTRY.names(), "kind": KINDS, "layout": LAYOUTS, "backend": BACKENDS}[part]
    own = list(dict.fromkeys(cell[part] for cell in cells))
    return f"all {part}s" if len(own) == len(list(known)) else ", ".join(own)


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"recipe": REGISTRY.names(), "kind": KINDS, "layout": LAYOUTS, "backend": BACKENDS}
    for part, known in parts.items():
        choices = None if part == "recipe" else known  # aliases are taken too
        parser.add_argument(f"--{part}s", nargs="+", default=list(known), choices=choices, metavar=part.upper())
    parser.add_argument("--results", type=Path, help="JSON file of the cells that were run")
    parser.add_argument("--write", type=Path, help="Markdown file that gets the table")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        be_rank(given.rank)
        return 0
    chosen = product(given.backends, given.layouts, given.recipes, given.kinds)
    cells = [dict(zip(("backend", "layout", "recipe", "kind"), cell, strict=True)) for cell in chosen]
    done: dict[str, Cell] = {}
    if given.results is not None and given.results.is_file():
        done = {name_of(cell): cell for cell in json.loads(given.results.read_text(encoding="utf-8"))}
    launches: defaultdict[tuple[str | None, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        if name_of(cell) not in done:
            launches[cell["backend"], cell["layout"], target_of(cell)].append(cell)
    for group in launches.values():
        for cell in run(group):
            print(outcome(cell), flush=True)
            done[name_of(cell)] = cell
            if given.results is not None:
                given.results.write_text(json.dumps([*done.values()], indent=1), encoding="utf-8")
    found = [done[name_of(cell)] for cell in cells]
    text = f"{facts(found)}\n\n{table(found)}\n"
    print(text)
    if given.write is not None:
        before, _, rest = given.write.read_text(encoding="utf-8").partition(BEGIN)
        page = f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}"
        given.write.write_text(page, encoding="utf-8")
    return 0 if all(map(is_planned, found)) else 1


def facts(cells: Sequence[Cell]) -> str:
    """Return the size of the grid, the date and the versions."""
    from bridge.runtime.megatron.te_cpu.install import find_te  # imports Megatron

    sizes = [len({cell[part] for cell in cells}) for part in PARTS]
    parts = [f"{size} {part}{'s' * (size != 1)}" for size, part in zip(sizes, PARTS, strict=True)]
    kinds = Counter("refused" in cell for cell in cells)
    return (
        f"{' x '.join(parts)}: {len(cells):,} cells, {kinds[True]:,} of them refused; "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, megatron-core {version('megatron-core')}, "
        f"Transformer Engine {find_te()[1]}, torch {version('torch')}, Python {platform.python_version()}."
    )


if __name__ == "__main__":
    sys.exit(main())
