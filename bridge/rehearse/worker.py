"""The process of a rehearsal that imports Megatron: ``python -m bridge.rehearse.worker PLAN.json``.

It imports once, and each launch is forks of it, one a rank: they train a few steps with a checkpoint and resume from it
for one step. Errors of Megatron Core and of Transformer Engine are part of the answer, so every exception ends in it.
"""

import dataclasses
import gc
import json
import multiprocessing
import os
import sys
import time
from importlib import import_module
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from bridge.errors import (
    BridgeError,
    CheckError,
    Finding,
    PrecisionConfigError,
    RunConfigError,
    SyncError,
)
from bridge.front.decode import container
from bridge.front.loader import run_of
from bridge.plan.fit import SIZES
from bridge.precision.fields import default_of
from bridge.precision.modules import schemes_of_rows
from bridge.preflight import te_cpu
from bridge.read.given_run import GivenRun
from bridge.rehearse.cause import cause_of, first_of
from bridge.rehearse.layout import Round
from bridge.rules.own_run import unaccepted, unhonoured, without_context_parallel
from bridge.runtime.audit.record import FILE, Record
from bridge.target.fields import DEFAULTS
from bridge.target.versions import installed_text

ANOTHER_MODEL = (
    *(
        "model.heterogeneous_block_specs",
        "model.experimental_attention_variant",
        "model.linear_attention_freq",
    ),
    *("model.dsa_indexer_topk_freq", "model.use_kitchen"),
)
"""Fields without which the model would be another one: a run that has one is not rehearsed."""
IN_EVERY_RANK = ("bridge.training.loop", "megatron.core.models.gpt.gpt_model")
"""Modules that each rank needs: the process that is forked imports them once."""
LAUNCH_SECONDS = 240.0
GRACE_SECONDS = 3.0
"""How long the other ranks may go on after the first one has failed."""

SAVED = "checkpoints"
OF_A_FINDING = tuple(field.name for field in dataclasses.fields(Finding))
Plan = dict[str, Any]
PHASES = {"train": "it trains", "alone": "it trains", "resume": "it resumes from its checkpoint"}
"""Part of a rank's work (to train and save, to train alone, to resume) -> the phase of an error in it."""


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
    is_te = sections["precision_backend"] == te_cpu.BACKEND
    if is_te:  # before Megatron is imported
        low = sections["model"] | (sections.get("mixed_precision") or {})
        own = low.get("fp4_recipe") if low.get("fp4") else low.get("fp8_recipe")
        te_cpu.declare(sections.get("target"), schemes=[own, *schemes_of_rows(low.get("modules"))])
    rounds = [Round(**{**one, "kinds": tuple(one["kinds"])}) for one in plan["rounds"]]
    left_out = _leave_out(sections, rounds)
    for entry in left_out:
        if entry["path"] in ANOTHER_MODEL:
            rule = f"a rehearsal without it would be one of another model ({entry['rule']})"
            raise RunConfigError.of(
                entry["path"], rule, entry["value"], "Use `precision-bridge check` for this run."
            )
    left_out += [
        {"path": name, "value": value, "rule": f"a CPU needs {os.environ[name]}"}
        for name, value in plan["variables"].items()
        if os.environ[name] != value
    ]
    gone = [kind for kind, path in SIZES.items() if path in {entry["path"] for entry in left_out}]
    for name in IN_EVERY_RANK:
        import_module(name)
    if is_te and plan["saves_without_state"]:
        from bridge.runtime.megatron.te_cpu.patches import save_without_state

        save_without_state()
    gc.freeze()  # a fork would copy the memory of every module to collect garbage
    launches: list[Plan] = []
    for one in _without(rounds, gone):
        place = folder / f"launch-{len(launches)}"
        place.mkdir()
        began = time.perf_counter()
        outcomes = _launch(plan, one, place)
        seconds = time.perf_counter() - began
        launches.append(
            {"round": dataclasses.asdict(one), "seconds": seconds, "outcomes": outcomes}
        )
    from bridge.runtime.megatron.te_cpu.install import installed_te

    te = installed_te() if is_te else None
    versions = {"mcore": installed_text("mcore"), "te": te.version if te is not None else None}
    return {"left_out": left_out, "launches": launches, "versions": versions}


def _leave_out(sections: dict[str, Any], rounds: list[Round]) -> list[dict[str, Any]]:
    """Remove the fields that Megatron's classes here have not, and those that a run here does not honour."""
    from bridge.runtime.megatron.deferred import (
        MegatronDistributedDataParallelConfig,
        MegatronOptimizerConfig,
    )
    from bridge.runtime.megatron.gpt import GPTConfig

    found = []
    owners = {
        "model": GPTConfig,
        "optimizer": MegatronOptimizerConfig,
        "ddp": MegatronDistributedDataParallelConfig,
    }
    for name, owner in owners.items():
        held = sections[name]
        sizes = {
            key: value
            for one in rounds
            for key, value in one.fields().items()
            if value not in (1, None, False)
        }
        values = {**held, **(sizes if name == "model" else {})}
        defaults = {field.name: default_of(field) for field in dataclasses.fields(owner)}
        backend = sections["precision_backend"]
        for key in [key for key in held if held[key] is None and defaults.get(key) is not None]:
            del held[key]  # a file of a later release has null where this class takes none
        faults = [
            *unhonoured(name, values, backend=backend),
            *unaccepted(name, values, backend=backend),
        ]
        if name == "model":
            faults += without_context_parallel(values, backend=backend)
        refused = {str(fault.path): fault.words["clause"] for fault in faults}
        absent = "the configs of this Megatron Core have no such field"
        refused |= {f"{name}.{key}": absent for key in held if key not in defaults}
        for path, reason in refused.items():
            key = path.partition(".")[2]
            held.pop(key, None)
            if values.get(key) not in (None, False, [], DEFAULTS[name].get(key)):
                found.append({"path": path, "value": values.get(key), "rule": reason})
    return found


def _without(rounds: list[Round], gone: list[str]) -> list[Round]:
    for kind in gone:
        rounds = [one.without(kind) for one in rounds]
    return [one for one in rounds if one.kinds] or [rounds[0]]


def _launch(plan: Plan, one: Round, folder: Path) -> list[Plan]:
    outcomes = _forked("train", plan, one, folder)
    if _failed(outcomes):  # the formats are of interest where only the checkpoint is at fault
        alone = _forked("alone", plan, one, folder)
        if _failed(alone):
            return outcomes
        saving = {"phase": "it saves its checkpoint"}
        return [done | failed | saving for done, failed in zip(alone, outcomes, strict=True)]
    resumed = _forked("resume", plan, one, folder)
    return [first | second for first, second in zip(outcomes, resumed, strict=True)]


def _failed(outcomes: list[Plan]) -> bool:
    return any("error" in outcome or "ended" in outcome for outcome in outcomes)


def _forked(work: str, plan: Plan, one: Round, folder: Path) -> list[Plan]:
    """Run a part of the work in a fork for each rank; return what each wrote."""
    from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it untyped

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    size = str(one.processes)
    job = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
    }
    job["TORCHELASTIC_USE_AGENT_STORE"] = (
        "True"  # the ranks are clients of this store, as under torchrun
    )
    fork = multiprocessing.get_context("fork")
    files = [folder / f"{work}-{rank}.json" for rank in range(one.processes)]
    ranks = [
        fork.Process(
            target=_rank,
            args=(work, plan, one, file, {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
        )
        for rank, file in enumerate(files)
    ]
    for process in ranks:
        process.start()
    _wait(ranks)
    return [
        json.loads(file.read_text(encoding="utf-8"))
        if file.is_file()
        else {"ended": f"exit code {process.exitcode}"}
        for file, process in zip(files, ranks, strict=True)
    ]


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


def _rank(work: str, plan: Plan, one: Round, file: Path, job: dict[str, str]) -> None:
    os.environ.update(job)
    outcome: Plan = {}
    try:
        _run(work, plan, one, file.parent, outcome)
    except Exception as error:  # noqa: BLE001 an error of Megatron's is what a rehearsal looks for
        outcome["error"] = {"at": time.time(), **_described(error, plan["sections"])}
    file.write_text(json.dumps(outcome, default=str), encoding="utf-8")
    if "error" in outcome:
        sys.exit(1)


def _described(error: Exception, sections: Plan) -> Plan:
    first = first_of(error)
    if isinstance(first, PrecisionConfigError | SyncError | CheckError):
        return {
            "findings": [
                {name: getattr(finding, name) for name in OF_A_FINDING}
                for finding in first.findings
            ]
        }
    if isinstance(first, BridgeError):
        path = getattr(first, "path", "")
        parts = (
            {name: getattr(first, name) for name in ("path", "rule", "value", "remedy")}
            if path
            else {}
        )
        return {"findings": [parts or {"path": "run", "rule": str(first), "remedy": ""}]}
    where, fields = cause_of(
        first, {name: sections[name] for name in ("model", "optimizer", "ddp")}
    )
    return {
        "type": type(first).__name__,
        "message": " ".join(str(first).split()),
        "where": where,
        "fields": fields,
    }


def _run(work: str, plan: Plan, one: Round, folder: Path, outcome: Plan) -> None:
    from bridge.preflight.last_sync import last_sync
    from bridge.training.loop import pretrain

    saved = str(folder / SAVED)
    saving = {"save": saved, "save_interval": plan["steps"], "save_last": False}
    files = {"train": saving, "alone": {}, "resume": {"load": saved}}
    is_resumed = work == "resume"
    outcome["phase"] = PHASES[work] if is_resumed else "the configs are built"
    run, problems = run_of(GivenRun(sections=_sections(plan, one, files[work])))
    config = container(run, problems)
    last_sync(config, config.mixed_precision)
    outcome["phase"] = PHASES[work]
    summary = pretrain(config, run_dir=folder / work)
    if is_resumed:
        outcome["resumed_loss"] = summary.train_loss
        return
    outcome["loss"], outcome["parameters"] = summary.train_loss, summary.parameters
    if os.environ["RANK"] == "0":
        last = Record.read(folder / work / FILE)
        steps = {1: (summary.gemms, summary.census), last.step: (last.gemms, last.census)}
        outcome["records"] = [
            {
                "step": step,
                "gemms": [*map(dataclasses.asdict, gemms)],
                "census": [*map(dataclasses.asdict, census)],
            }
            for step, (gemms, census) in steps.items()
        ]


def _sections(plan: Plan, one: Round, checkpoint: Plan) -> Plan:
    """Return the sections of a launch: its layout, its batch and its checkpoints; a step more than is resumed from."""
    held = plan["sections"]
    sizes = {name: value for name, value in one.fields().items() if value is not None}
    batch = (
        held["train"]["micro_batch_size"] * one.size("data") * (4 if "pipeline" in one.kinds else 2)
    )
    return {
        **held,
        "model": {**held["model"], **sizes},
        "train": {
            **held["train"],
            "train_iters": plan["steps"] + 1,
            "global_batch_size": batch,
            "audit": "warn",
        },
        "checkpoint": checkpoint,
        "logging": {
            "log_interval": 1,
            "tensorboard": False,
            "plots": False,
            "quantisation_interval": 0,
        },
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
