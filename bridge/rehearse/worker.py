"""The process of a rehearsal that imports Megatron: ``python -m bridge.rehearse.worker PLAN.json``.

It imports once, and each launch is forks of it, one a rank: they train a few steps with a
checkpoint and resume from it for one step. Errors of Megatron Core and of Transformer Engine are
part of the answer, so every exception ends in it.
"""

import dataclasses
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
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
from bridge.rules.topics.system.train_script import unaccepted, unhonoured, without_context_parallel
from bridge.runtime.audit.record import FILE, Record
from bridge.target.fields import DEFAULTS
from bridge.target.versions import installed_text

ANOTHER_MODEL = (
    "model.heterogeneous_block_specs",
    "model.experimental_attention_variant",
    "model.linear_attention_freq",
    "model.dsa_indexer_topk_freq",
    "model.use_kitchen",
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
"""Part of a rank's work (to train and save, to train alone, to resume) -> the phase of its
errors."""


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
        model = sections["model"] | (sections.get("mixed_precision") or {})
        scheme = model.get("fp8_recipe")
        if model.get("fp4"):
            scheme = model.get("fp4_recipe")
        schemes = [scheme, *schemes_of_rows(model.get("modules"))]
        te_cpu.declare(sections.get("target"), schemes=schemes)
    rounds = []
    for layout in plan["rounds"]:
        rounds.append(Round(**{**layout, "kinds": tuple(layout["kinds"])}))
    left_out = _leave_out(sections, rounds)
    for entry in left_out:
        if entry["path"] in ANOTHER_MODEL:
            rule = f"a rehearsal without it would be one of another model ({entry['rule']})"
            remedy = "Use `precision-bridge check` for this run."
            raise RunConfigError.of(entry["path"], rule, entry["value"], remedy)
    for name, value in plan["variables"].items():
        if os.environ[name] != value:
            rule = f"a CPU needs {os.environ[name]}"
            left_out.append({"path": name, "value": value, "rule": rule})
    paths = {entry["path"] for entry in left_out}
    gone = [kind for kind, path in SIZES.items() if path in paths]
    for name in IN_EVERY_RANK:
        import_module(name)
    if is_te and plan["saves_without_state"]:
        from bridge.runtime.megatron.te_cpu.patches import save_without_state

        save_without_state()
    gc.freeze()  # a fork would copy the memory of every module to collect garbage
    launches: list[Plan] = []
    for launch in _without(rounds, gone):
        place = folder / f"launch-{len(launches)}"
        place.mkdir()
        began = time.perf_counter()
        outcomes = _launch(plan, launch, place)
        seconds = time.perf_counter() - began
        layout = dataclasses.asdict(launch)
        launches.append({"round": layout, "seconds": seconds, "outcomes": outcomes})
    versions = {"mcore": installed_text("mcore"), "te": None}
    if is_te:
        from bridge.runtime.megatron.te_cpu.install import installed_te

        te = installed_te()
        if te is not None:
            versions["te"] = te.version
    return {"left_out": left_out, "launches": launches, "versions": versions}


def _leave_out(sections: dict[str, Any], rounds: list[Round]) -> list[dict[str, Any]]:
    """Remove the fields that Megatron's classes here have not, and those not honoured here."""
    from bridge.runtime.megatron.deferred import (
        MegatronDistributedDataParallelConfig,
        MegatronOptimizerConfig,
    )
    from bridge.runtime.megatron.gpt import GPTConfig

    removed: list[dict[str, Any]] = []
    owners = {
        "model": GPTConfig,
        "optimizer": MegatronOptimizerConfig,
        "ddp": MegatronDistributedDataParallelConfig,
    }
    backend = sections["precision_backend"]
    for name, owner in owners.items():
        section = sections[name]
        values = dict(section)
        if name == "model":
            values |= _sizes(rounds)
        defaults = {field.name: default_of(field) for field in dataclasses.fields(owner)}
        for key in list(section):
            # A file of a later release has null where this class takes none.
            if section[key] is None and defaults.get(key) is not None:
                del section[key]
        faults = [
            *unhonoured(name, values, backend=backend),
            *unaccepted(name, values, backend=backend),
        ]
        if name == "model":
            faults += without_context_parallel(values, backend=backend)
        refused = {str(fault.path): fault.words["clause"] for fault in faults}
        for key in section:
            if key not in defaults:
                refused[f"{name}.{key}"] = "the configs of this Megatron Core have no such field"
        for path, reason in refused.items():
            key = path.partition(".")[2]
            section.pop(key, None)
            if values.get(key) not in (None, False, [], DEFAULTS[name].get(key)):
                removed.append({"path": path, "value": values.get(key), "rule": reason})
    return removed


def _sizes(rounds: list[Round]) -> dict[str, Any]:
    """Return the model fields of the launches' layouts that are on."""
    sizes: dict[str, Any] = {}
    for launch in rounds:
        fields = launch.fields().items()
        sizes |= {name: value for name, value in fields if value not in (1, None, False)}
    return sizes


def _without(rounds: list[Round], gone: list[str]) -> list[Round]:
    for kind in gone:
        rounds = [launch.without(kind) for launch in rounds]
    return [launch for launch in rounds if launch.kinds] or [rounds[0]]


def _launch(plan: Plan, launch: Round, folder: Path) -> list[Plan]:
    """Train, save and resume in a launch, and return the outcome of each rank."""
    outcomes = _forked("train", plan, launch, folder)
    if not _failed(outcomes):
        resumed = _forked("resume", plan, launch, folder)
        return [first | second for first, second in zip(outcomes, resumed, strict=True)]
    # The formats are of interest where only the checkpoint is at fault.
    alone = _forked("alone", plan, launch, folder)
    if _failed(alone):
        return outcomes
    saving = {"phase": "it saves its checkpoint"}
    return [done | failed | saving for done, failed in zip(alone, outcomes, strict=True)]


def _failed(outcomes: list[Plan]) -> bool:
    return any("error" in outcome or "ended" in outcome for outcome in outcomes)


def _forked(work: str, plan: Plan, launch: Round, folder: Path) -> list[Plan]:
    """Run a part of the work in a fork for each rank; return what each wrote."""
    from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it untyped

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    size = str(launch.processes)
    job = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        # The ranks are clients of this store, as under torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    fork = multiprocessing.get_context("fork")
    files = [folder / f"{work}-{rank}.json" for rank in range(launch.processes)]
    ranks = []
    for rank, file in enumerate(files):
        of_rank = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(fork.Process(target=_rank, args=(work, plan, launch, file, of_rank)))
    for process in ranks:
        process.start()
    _wait(ranks)
    outcomes = []
    for file, process in zip(files, ranks, strict=True):
        outcome: Plan = {"ended": f"exit code {process.exitcode}"}
        if file.is_file():
            outcome = json.loads(file.read_text(encoding="utf-8"))
        outcomes.append(outcome)
    return outcomes


def _wait(ranks: list[ForkProcess]) -> None:
    """Wait for all ranks; where one fails, the others, which may wait for it forever, are ended."""
    until = time.monotonic() + LAUNCH_SECONDS
    while time.monotonic() < until:
        alive = [rank.sentinel for rank in ranks if rank.is_alive()]
        if not alive:
            break
        connection.wait(alive, timeout=1.0)
        if any(rank.exitcode for rank in ranks):
            until = min(until, time.monotonic() + GRACE_SECONDS)
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
        rank.join()


def _rank(work: str, plan: Plan, launch: Round, file: Path, job: dict[str, str]) -> None:
    os.environ.update(job)
    outcome: Plan = {}
    try:
        _run(work, plan, launch, file.parent, outcome)
    except Exception as error:  # noqa: BLE001 an error of Megatron's is what a rehearsal looks for
        outcome["error"] = {"at": time.time(), **_described(error, plan["sections"])}
    file.write_text(json.dumps(outcome, default=str), encoding="utf-8")
    if "error" in outcome:
        sys.exit(1)


def _described(error: Exception, sections: Plan) -> Plan:
    first = first_of(error)
    if isinstance(first, PrecisionConfigError | SyncError | CheckError):
        return {"findings": [_attributes(finding, OF_A_FINDING) for finding in first.findings]}
    if isinstance(first, BridgeError):
        parts = {"path": "run", "rule": str(first), "remedy": ""}
        if getattr(first, "path", ""):
            parts = _attributes(first, ("path", "rule", "value", "remedy"))
        return {"findings": [parts]}
    configs = {name: sections[name] for name in ("model", "optimizer", "ddp")}
    where, fields = cause_of(first, configs)
    return {
        "type": type(first).__name__,
        "message": " ".join(str(first).split()),
        "where": where,
        "fields": fields,
    }


def _attributes(value: object, names: Iterable[str]) -> Plan:
    return {name: getattr(value, name) for name in names}


def _run(work: str, plan: Plan, launch: Round, folder: Path, outcome: Plan) -> None:
    from bridge.preflight.last_sync import last_sync
    from bridge.training.loop import pretrain

    saved = str(folder / SAVED)
    saving = {"save": saved, "save_interval": plan["steps"], "save_last": False}
    files = {"train": saving, "alone": {}, "resume": {"load": saved}}
    is_resumed = work == "resume"
    outcome["phase"] = "the configs are built"
    if is_resumed:
        outcome["phase"] = PHASES[work]
    run, problems = run_of(GivenRun(sections=_sections(plan, launch, files[work])))
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
        outcome["records"] = []
        for step, (gemms, census) in steps.items():
            content = {
                "step": step,
                "gemms": list(map(dataclasses.asdict, gemms)),
                "census": list(map(dataclasses.asdict, census)),
            }
            outcome["records"].append(content)


def _sections(plan: Plan, launch: Round, checkpoint: Plan) -> Plan:
    """Return the sections of a launch: its layout, its batch and its checkpoints.

    It takes a step more than the checkpoint has.
    """
    sections = plan["sections"]
    sizes = {name: value for name, value in launch.fields().items() if value is not None}
    micro_batches = 2
    if "pipeline" in launch.kinds:
        micro_batches = 4
    samples = sections["train"]["micro_batch_size"] * launch.size("data")
    return {
        **sections,
        "model": {**sections["model"], **sizes},
        "train": {
            **sections["train"],
            "train_iters": plan["steps"] + 1,
            "global_batch_size": samples * micro_batches,
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
