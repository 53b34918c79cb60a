"""The process of a rehearsal that imports Megatron: ``python -m bridge.rehearse.worker PLAN.json``.

It imports once, and each launch is forks of it, one a rank: they train a few steps with a checkpoint and resume from it
for one step. Errors of Megatron Core and of Transformer Engine are part of the answer, so every exception ends in it.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import socket
import sys
import time
from importlib import metadata
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError
from bridge.front.loader import container, run_of
from bridge.preflight import te_cpu
from bridge.rehearse.cause import cause_of, first_of
from bridge.rehearse.layout import Round
from bridge.rules.fields import DEFAULTS

if TYPE_CHECKING:
    from multiprocessing.context import ForkProcess

LAYOUT_FIELDS = {
    "model.tensor_model_parallel_size": "tensor",
    "model.pipeline_model_parallel_size": "pipeline",
    "model.context_parallel_size": "context",
    "model.expert_model_parallel_size": "expert",
}
"""Field that a run here may not honour -> the kind of parallelism that is left out then."""
LAUNCH_SECONDS = 240.0
GRACE_SECONDS = 3.0
"""How long the other ranks may go on after the first one has failed."""

Plan = dict[str, Any]


def main(file: Path) -> None:
    """Rehearse as the plan says, and write ``answer.json`` next to it."""
    plan: Plan = json.loads(file.read_text(encoding="utf-8"))
    try:
        answer = _answer(plan, file.parent)
    except BridgeError as error:  # before anything was launched: what is needed is not here
        answer = {"refused": str(error)}
    (file.parent / "answer.json").write_text(json.dumps(answer, default=str), encoding="utf-8")


def _answer(plan: Plan, folder: Path) -> dict[str, Any]:
    sections = plan["sections"]
    _declare(sections)
    rounds = [Round(**{**one, "kinds": tuple(one["kinds"])}) for one in plan["rounds"]]
    left_out = _leave_out(sections, rounds)
    gone = [kind for path, kind in LAYOUT_FIELDS.items() if path in {entry["field"] for entry in left_out}]
    launches: list[Plan] = []
    for one in _without(rounds, gone):
        place = folder / f"launch-{len(launches)}"
        place.mkdir()
        began = time.perf_counter()
        outcomes = _launch(plan, one, place)
        seconds = time.perf_counter() - began
        launches.append({"round": dataclasses.asdict(one), "seconds": seconds, "outcomes": outcomes})
    from bridge.megatron.te_cpu.install import installed_te

    te = installed_te()
    versions = {"mcore": metadata.version("megatron-core"), "te": te.version if te is not None else None}
    return {"left_out": left_out, "launches": launches, "versions": versions}


def _declare(sections: dict[str, Any]) -> None:
    """Declare Transformer Engine on a CPU before Megatron is imported."""
    if sections["precision_backend"] == te_cpu.BACKEND:
        low = sections["model"] | (sections.get("mixed_precision") or {})
        te_cpu.declare(
            sections.get("target"), scheme=low.get("fp4_recipe") if low.get("fp4") else low.get("fp8_recipe")
        )


def _leave_out(sections: dict[str, Any], rounds: list[Round]) -> list[dict[str, Any]]:
    """Remove the fields that Megatron's classes here have not, and those that a run here does not honour."""
    from bridge.megatron.deferred import MegatronDistributedDataParallelConfig, MegatronOptimizerConfig
    from bridge.megatron.gpt import GPTConfig
    from bridge.megatron.run_fields import unhonoured

    found = []
    owners = {"model": GPTConfig, "optimizer": MegatronOptimizerConfig, "ddp": MegatronDistributedDataParallelConfig}
    with_te = sections["precision_backend"] == te_cpu.BACKEND
    for name, owner in owners.items():
        held = sections[name]
        sizes = {key: value for one in rounds for key, value in one.fields().items() if value not in (1, None, False)}
        values = {**held, **(sizes if name == "model" else {})}
        known = {field.name for field in dataclasses.fields(owner)}
        refused = {fault.path: fault.rule for fault in unhonoured(name, owner, with_te=with_te, values=values)}
        absent = "the configs of this Megatron Core have no such field"
        refused |= {f"{name}.{key}": absent for key in held if key not in known}
        for path, reason in refused.items():
            key = path.partition(".")[2]
            held.pop(key, None)
            if values[key] not in (None, False, DEFAULTS[name].get(key)):
                found.append({"field": path, "value": values[key], "reason": reason})
    return found


def _without(rounds: list[Round], gone: list[str]) -> list[Round]:
    """Return the launches without some kinds of parallelism, one process where nothing is left."""
    for kind in gone:
        rounds = [one.without(kind) for one in rounds]
    return [one for one in rounds if one.kinds] or [rounds[0]]


def _launch(plan: Plan, one: Round, folder: Path) -> list[dict[str, Any]]:
    """Fork the ranks of a launch; return what each wrote."""
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    job = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(one.processes)}
    job["LOCAL_WORLD_SIZE"] = job["WORLD_SIZE"]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(plan, one, folder, job, rank)) for rank in range(one.processes)]
    for process in ranks:
        process.start()
    _wait(ranks)
    outcomes = []
    for rank, process in enumerate(ranks):
        file = folder / f"rank-{rank}.json"
        ended = {"ended": f"exit code {process.exitcode}"}
        outcomes.append(json.loads(file.read_text(encoding="utf-8")) if file.is_file() else ended)
    return outcomes


def _wait(ranks: list[ForkProcess]) -> None:
    """Wait for all ranks; where one fails, the others, which may wait for it forever, are ended."""
    until = time.monotonic() + LAUNCH_SECONDS
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < until:
        connection.wait([rank.sentinel for rank in ranks if rank.is_alive()], timeout=1.0)
        if any(rank.exitcode for rank in ranks):
            until = min(until, time.monotonic() + GRACE_SECONDS)
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
        rank.join()


def _rank(plan: Plan, one: Round, folder: Path, job: dict[str, str], rank: int) -> None:
    """Rehearse as one rank, and write what came of it."""
    os.environ.update({**job, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    outcome: dict[str, Any] = {"phase": "the configs are built"}
    try:
        _rehearse(plan, one, folder, outcome)
    except Exception as error:  # noqa: BLE001 an error of Megatron's is what a rehearsal looks for
        first = first_of(error)
        cause = cause_of(first, {name: plan["sections"][name] for name in ("model", "optimizer", "ddp")})
        outcome["error"] = {
            "type": type(first).__name__,
            "message": " ".join(str(first).split()),
            **dataclasses.asdict(cause),
        }
    (folder / f"rank-{rank}.json").write_text(json.dumps(outcome, default=str), encoding="utf-8")
    if "error" in outcome:
        sys.exit(1)


def _rehearse(plan: Plan, one: Round, folder: Path, outcome: dict[str, Any]) -> None:
    from bridge.training.config import write_precision
    from bridge.training.loop import pretrain

    steps = plan["steps"]
    first = container(run_of(_sections(plan, one, folder, steps, save=True), missing=False))
    write_precision(first)
    outcome["phase"] = "it trains"
    summary = pretrain(first, run_dir=folder / "first")
    outcome["gemms"] = [dataclasses.asdict(record) for record in summary.gemms]
    outcome["census"] = [dataclasses.asdict(row) for row in summary.census]
    outcome["loss"], outcome["parameters"] = summary.train_loss, summary.parameters
    outcome["phase"] = "it resumes from its checkpoint"
    again = container(run_of(_sections(plan, one, folder, steps + 1, save=False), missing=False))
    write_precision(again)
    outcome["resumed_loss"] = pretrain(again, run_dir=folder / "resumed").train_loss
    outcome["phase"] = "done"


def _sections(plan: Plan, one: Round, folder: Path, steps: int, *, save: bool) -> dict[str, Any]:
    """Return the sections of a launch: its layout, its batch and its folders."""
    held = plan["sections"]
    sizes = {name: value for name, value in one.fields().items() if value is not None}
    batch = held["train"]["micro_batch_size"] * one.data * (4 if "pipeline" in one.kinds else 2)
    return {
        **held,
        "model": {**held["model"], **sizes},
        "train": {**held["train"], "train_iters": steps, "global_batch_size": batch},
        "checkpoint": {"save" if save else "load": str(folder / "checkpoint")},
        "logging": {"log_interval": 1, "tensorboard": False, "quantisation_interval": 0},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
