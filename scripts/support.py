"""Train each kind of model on each backend and release of Megatron Core at hand, and write the support table.

    python scripts/support.py                        the table
    python scripts/support.py --write README.md      into the page as well
    python scripts/support.py --kind dense           the rows of one kind

A cell is a run of ``scripts/train.py`` per recipe: `STEPS` steps in one process on this machine's CPU, with the audit,
which ends a run that is not as planned. Each is a fork of a process that has imported its release of Megatron Core. The
releases are the installed one and the newer one that ``make setup`` unpacks. The column of the GPU is read from the
page of its proof, since no GPU is asked here.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import multiprocessing
import os
import platform
import re
import runpy
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.precision.mode import get_scheme
from bridge.preflight import gpu_for_te_cpu
from bridge.registry.registry import get_mixed_precision_config
from bridge.rehearse.release import Release, list_local_releases

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ROOT / "scripts" / "train.py"
PROOF = ROOT / "docs" / "explain" / "gpu-proof.md"
MARKS = "<!-- support: begin -->", "<!-- support: end -->"
STEPS = 3
BACKENDS = ("emulated", "te_cpu")
RECIPES = ("fp8_current", "mxfp8")
TINY = "model=gpt_tiny"
KINDS: dict[str, tuple[str, ...]] = {
    "dense": (TINY,),
    "mixture of experts": (
        TINY,
        "model.num_moe_experts=4",
        "model.moe_grouped_gemm=true",
        "model.moe_shared_expert_intermediate_size=64",
        "model.moe_token_dispatcher_type=alltoall",
        "model.moe_aux_loss_coeff=0.01",
    ),
    "latent attention": (
        TINY,
        "model.multi_latent_attention=true",
        "model.q_lora_rank=64",
        "model.kv_lora_rank=64",
        "model.qk_head_dim=32",
        "model.qk_pos_emb_head_dim=32",
        "model.v_head_dim=32",
    ),
    "hybrid with Mamba layers": ("model=hybrid_tiny",),
    "gated delta net": ("model=delta_tiny",),
    "sparse attention": ("model=sparse_tiny",),
    "prediction layers": (TINY, "model.mtp_num_layers=1"),
}
"""Kind of model -> overrides of the training command."""
SCHEDULE = (
    "train=smoke",
    f"train.train_iters={STEPS}",
    "train.eval_iters=0",
    "train.lr_warmup_iters=0",
    "logging.tensorboard=false",
    "logging.plots=false",
    "logging.progress=false",
    "logging.quantisation_interval=0",
)
KIND_OF_PROOF = {
    "experts": "mixture of experts",
    "latent attention": "latent attention",
    "prediction layer": "prediction layers",
}
"""Word after the scheme in a row of the proof -> kind; a row without one is of a dense model."""
NOT_RUN = "not run"
OUTPUT = "output"
"""File of a run with its output."""
IMPORTED = ("bridge.training.loop", "megatron.core.models.gpt.gpt_model", "hydra.core.plugins", "rich.table")
"""Modules that each run needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """The runs of the training command on a GPU, as their page has them."""

    title: str
    """The release of Megatron Core, the backend and the GPU."""
    sentence: str
    kinds: frozenset[str]
    """Kinds of models that trained as claimed."""


def failures_of(kinds: Sequence[str], backend: str, recipe: str, release: Release) -> dict[str, str | None]:
    """Train kinds of models on a backend in a recipe; return kind -> the error, None where the run is as planned."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, "--train", backend, recipe, *kinds],
        env={**os.environ, **release.environment(), "TORCHDYNAMO_DISABLE": "1"},  # half of the imports
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    failures: dict[str, str | None] = json.loads(done.stdout)
    for kind, failure in failures.items():
        place = f"{release.version} {backend}, {kind}, {recipe}"
        print(f"{place}: {failure or 'as planned'}", file=sys.stderr, flush=True)
    return failures


def train(kinds: Sequence[str], backend: str, recipe: str) -> dict[str, str | None]:
    """Import Megatron Core once, and train each kind in a fork; return as `failures_of`."""
    if backend == gpu_for_te_cpu.TE_CPU_BACKEND:  # before Megatron is imported
        gpu_for_te_cpu.declare(schemes=[get_scheme(get_mixed_precision_config(recipe))])
    for name in IMPORTED:
        importlib.import_module(name)
    failures: dict[str, str | None] = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory(prefix="precision-bridge-support-") as folder:
            words = [*KINDS[kind], *SCHEDULE, f"mixed_precision={recipe}", f"precision_backend={backend}"]
            run = multiprocessing.get_context("fork").Process(target=_train, args=(words, Path(folder)))
            run.start()
            run.join()
            failures[kind] = None
            if run.exitcode:
                output = (Path(folder) / OUTPUT).read_text(encoding="utf-8")
                lines = [line.strip() for line in output.splitlines() if line.strip()]
                failures[kind] = lines[-1] if lines else f"exit code {run.exitcode}"
    return failures


def _train(words: list[str], folder: Path) -> None:
    """Run the training command in this process, with its output in a file."""
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(folder)
    sys.argv = [str(TRAIN), *words, f"hydra.run.dir={folder}/run"]
    runpy.run_path(str(TRAIN), run_name="__main__")


def cell(failures: Mapping[str, str | None]) -> str:
    """Return the text of a cell of recipe -> error: yes, or the recipes that fail, each with its error."""
    texts = []
    for recipe, failure in failures.items():
        if failure is not None:
            texts.append(f"{recipe}: {failure}")
    if not texts:
        return "yes"
    return "no: " + "; ".join(texts).replace("|", "\\|")


def proof_of(page: Path) -> Proof:
    """Return what the page of the proof on a GPU has of the training command."""
    text = page.read_text(encoding="utf-8")
    facts = dict(re.findall(r"^- ([^:\n]+): (.+)$", text, re.MULTILINE))
    _, _, section = text.partition("## The training command")
    section = section.partition("\n## ")[0]
    kinds = set()
    for row in re.findall(r"^\| (.+) \|$", section, re.MULTILINE):
        name, *_, as_claimed = row.split(" | ")
        _, _, word = name.partition(", ")
        if as_claimed != "yes":
            continue
        if not word:
            kinds.add("dense")
        elif word in KIND_OF_PROOF:
            kinds.add(KIND_OF_PROOF[word])
    gpu = " ".join(facts["GPU"].split()[:2])
    sentence = (
        f"The last column is of [the proof on an {facts['GPU']}](docs/explain/gpu-proof.md) of {facts['date'][:10]}, "
        f"with Transformer Engine {facts['transformer-engine']}, in the schemes that this GPU runs."
    )
    return Proof(title=f"{facts['megatron-core']} te, {gpu}", sentence=sentence, kinds=frozenset(kinds))


def heads(releases: list[Release], proof: Proof) -> list[str]:
    """Return the heads of the columns."""
    columns = []
    for release in releases:
        for backend in BACKENDS:
            columns.append(f"{release.version} {backend}")
    return ["Kind of model", *columns, proof.title]


def table(kinds: list[str]) -> str:
    """Train every cell of some kinds of models; return the table with the versions and the date."""
    releases = list_local_releases()
    proof = proof_of(PROOF)
    columns = heads(releases, proof)
    columns_of_runs = []
    for release in releases:
        for backend in BACKENDS:
            columns_of_runs.append({one: failures_of(kinds, backend, one, release) for one in RECIPES})
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for kind in kinds:
        cells = []
        for runs in columns_of_runs:
            cells.append(cell({recipe: failures[kind] for recipe, failures in runs.items()}))
        cells.append("yes" if kind in proof.kinds else NOT_RUN)
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join([lead(proof), "", *lines])


def lead(proof: Proof) -> str:
    """Return the sentences above the table."""
    from bridge.runtime.megatron.te_cpu.install import (
        find_te,  # a process that trains declares first
    )

    _, te = find_te()
    ours = f"torch {version('torch')}, Python {platform.python_version()}, Transformer Engine {te} in te_cpu"
    date = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    recipes = f"{', '.join(RECIPES[:-1])} and {RECIPES[-1]}"
    text = (
        f"Each cell is {STEPS} steps of `scripts/train.py` in {recipes}, in one process on a CPU, and the audit found "
        f"what ran as planned ({date}, {ours}). The columns are releases of megatron-core with a `precision_backend`. "
        f"{proof.sentence}"
    )
    return textwrap.fill(text, width=120, break_on_hyphens=False)


def written(page: str, text: str) -> str:
    """Return a page with the table between its marks."""
    begin, end = MARKS
    before, _, rest = page.partition(begin)
    after = rest.partition(end)[2]
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=[*KINDS], help="kind of model; all of them without it")
    parser.add_argument("--write", type=Path, help="Markdown file that gets the table between its marks")
    help_of_train = "backend, recipe and kinds of a process that trains, and prints the errors as JSON"
    parser.add_argument("--train", nargs="+", metavar="WORD", help=help_of_train)
    chosen = parser.parse_args()
    if chosen.train:
        backend, recipe, *kinds = chosen.train
        print(json.dumps(train(kinds, backend, recipe)))
        return
    if chosen.write is not None and chosen.kind:
        parser.error("--write: a page gets the rows of all kinds. Leave --kind out")
    text = table(chosen.kind or [*KINDS])
    print(text)
    if chosen.write is not None:
        page = chosen.write.read_text(encoding="utf-8")
        chosen.write.write_text(written(page, text), encoding="utf-8")


if __name__ == "__main__":
    main()
