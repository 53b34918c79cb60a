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
from bridge.precision.mode import get_scheme
from bridge.preflight.gpu_for_te_cpu import declare
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
    kept = (precision.num_layers_at_start_in_bf16 or 0) + (precision.num_layers_at_end_in_bf16 or 0)
    layers = 4 * -(-(kept + 2) // 4)  # at least two in low precision, and as many in each chunk of each stage
    model = cell.get("model", MODELS.get(cell["kind"], "gpt_tiny"))
    words = [
        f"model={model}",
        *WORDS,
        f"mixed_precision={cell['recipe']}",
        f"precision_backend={cell['backend']}",
    ]
    if cell["kind"] != "hybrid":  # its pattern has eight
        words.append(f"model.num_layers={layers}")
    return [*words, *KINDS[cell["kind"]], *LAYOUTS[cell["layout"]], *cell.get("words", ())]


def target_of(cell: Cell) -> str | None:
    """Return the GPU that Transformer Engine's Python runs as; None under the emulation."""
    if cell["backend"] != "te_cpu":
        return None
    if get_scheme(REGISTRY.get(cell["recipe"])) in ("mxfp8", "nvfp4"):
        return "b200"
    return "h100"


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
                last = "the process ended"
                if errors:
                    last = errors[-1]
                yield left.pop(0) | {"failed": last}
    if later:
        yield from run(later)


def launched(cells: Sequence[Cell], folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """Start the ranks of a job, and yield them; rank 0 prints a line per cell."""
    processes = 2
    if cells[0]["layout"] == ALONE:
        processes = 1
    plan = folder / "plan.json"
    plan.write_text(json.dumps(cells))
    job = {
        **os.environ,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for rank in range(processes):
        output = subprocess.DEVNULL
        if rank == 0:
            output = subprocess.PIPE
        with Path(folder, f"{rank}.err").open("w") as errors:
            yield subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, "--rank", str(plan)],
                env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=output,
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
            result = trained(words_of(cell), plan.parent / str(number))
        if os.environ["RANK"] == "0":
            print(json.dumps(result), flush=True)


def trained(words: Sequence[str], folder: Path) -> Cell:
    """Train with overrides, and return the result: `rows` and `equal`, and `refused` or `failed`."""
    from bridge.front.container import build_container
    from bridge.front.loader import load_run
    from bridge.runtime.audit.record import Record
    from bridge.training.config import runtime_config_update
    from bridge.training.loop import pretrain  # imports Megatron, after `declare`

    different: set[tuple[str, str, str]] = set()
    result: Cell = {}
    try:
        config = build_container(load_run(words, ROOT / "conf"))
        runtime_config_update(config)
        pretrain(config, run_dir=folder)
    except AuditError as error:
        result["failed"] = str(error)
        mismatches: Any = error.mismatches
        for mismatch in mismatches:
            different.update(product(mismatch.layers, mismatch.modules, mismatch.gemms))
    except TrainingError:
        raise  # the run itself failed
    except BridgeError as error:
        override = override_after(str(error))
        if override is None:
            return {"failed": str(error)}
        if override:
            result = trained([*words, *override], folder)
        return result | {"refused": str(error)}
    if os.environ.get("RANK", "0") != "0":
        return result
    rows = {(row.layer, row.module, row.gemm) for row in Record.read(folder / "record.json").gemms} | different
    return result | {"rows": len(rows), "equal": len(rows - different)}


def override_after(refusal: str) -> tuple[str, ...] | None:
    """Return the override that the sentence of a refusal asks for, None for a sentence that is not expected."""
    for beginning, override in REFUSED.items():
        if refusal.startswith(beginning):
            return override
    return None


def outcome(cell: Cell) -> str:
    """Return the result of a cell as a line."""
    parts = [name_of(cell), "no record"]
    if "rows" in cell:
        parts[1] = f"{cell['equal']} of {cell['rows']} rows"
    for key in ("refused", "failed"):
        if key in cell:
            parts.append(f"{key}: {cell[key]}")
    return ": ".join(parts)


def is_planned(cell: Cell) -> bool:
    """Return whether every row of a cell is equal, or it is refused as it has to be."""
    return "failed" not in cell and cell.get("equal") == cell.get("rows")


def table(cells: Sequence[Cell]) -> str:
    """Return the counts of layouts and backends in Markdown, and the refused cells with their reasons."""
    backends = list(dict.fromkeys(cell["backend"] for cell in cells))
    lines = [f"| layout | {' | '.join(backends)} |", f"|---|{'---|' * len(backends)}"]
    groups: dict[str, dict[str, list[Cell]]] = {}
    for cell in cells:
        of_layout = groups.setdefault(cell["layout"], {backend: [] for backend in backends})
        of_layout[cell["backend"]].append(cell)
    for layout, of_layout in groups.items():
        lines.append(f"| {layout} | {' | '.join(map(counts, of_layout.values()))} |")
    refused: defaultdict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        if "refused" in cell:
            refused[cell["refused"]].append(cell)
    if refused:
        lines += ["", "Refused, and run with the override that the sentence asks for, where it asks for one:", ""]
    for sentence, refused_cells in refused.items():
        parts = [listed(refused_cells, part) for part in PARTS]
        lines.append(f"- {len(refused_cells)} cells ({'; '.join(parts)}): {sentence}")
    return "\n".join(lines)


def counts(cells: Sequence[Cell]) -> str:
    """Return the number of cells whose plan is their record, and of equal rows."""
    equal = sum(cell.get("equal", 0) for cell in cells)
    rows = sum(cell.get("rows", 0) for cell in cells)
    return f"{sum(map(is_planned, cells))} of {len(cells)} cells, {equal:,} of {rows:,} rows"


def listed(cells: Sequence[Cell], part: str) -> str:
    """Return the values of a part in some cells, or "all" where the cells have every value."""
    known = {"recipe": REGISTRY.names(), "kind": KINDS, "layout": LAYOUTS, "backend": BACKENDS}[part]
    values = list(dict.fromkeys(cell[part] for cell in cells))
    if len(values) == len(list(known)):
        return f"all {part}s"
    return ", ".join(values)


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"recipe": REGISTRY.names(), "kind": KINDS, "layout": LAYOUTS, "backend": BACKENDS}
    for part, known in parts.items():
        choices = known
        if part == "recipe":  # aliases are taken too
            choices = None
        parser.add_argument(f"--{part}s", nargs="+", default=list(known), choices=choices, metavar=part.upper())
    parser.add_argument("--results", type=Path, help="JSON file of the cells that were run")
    parser.add_argument("--write", type=Path, help="Markdown file that gets the table")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        be_rank(options.rank)
        return 0
    cells = []
    for backend, layout, recipe, kind in product(options.backends, options.layouts, options.recipes, options.kinds):
        cells.append({"backend": backend, "layout": layout, "recipe": recipe, "kind": kind})
    cells = with_results(cells, options.results)
    text = f"{facts(cells)}\n\n{table(cells)}\n"
    print(text)
    if options.write is not None:
        before, _, rest = options.write.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        options.write.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")
    if all(map(is_planned, cells)):
        return 0
    return 1


def with_results(cells: Sequence[Cell], file: Path | None) -> list[Cell]:
    """Return cells with their results, and run those whose result is not in the file.

    The file is rewritten after each run.
    """
    done: dict[str, Cell] = {}
    if file is not None and file.is_file():
        done = {name_of(cell): cell for cell in json.loads(file.read_text(encoding="utf-8"))}
    launches: defaultdict[tuple[str | None, ...], list[Cell]] = defaultdict(list)
    for cell in cells:
        if name_of(cell) not in done:
            launches[cell["backend"], cell["layout"], target_of(cell)].append(cell)
    for group in launches.values():
        for cell in run(group):
            print(outcome(cell), flush=True)
            done[name_of(cell)] = cell
            if file is not None:
                file.write_text(json.dumps([*done.values()], indent=1), encoding="utf-8")
    return [done[name_of(cell)] for cell in cells]


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
