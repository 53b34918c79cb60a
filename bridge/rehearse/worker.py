"""The process of a rehearsal that imports Megatron: ``python -m bridge.rehearse.worker JOB.json``.

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
from typing import Any, cast

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
from bridge.model.section import NULLABLE
from bridge.plan.fit import SIZES
from bridge.precision.fields import default_of
from bridge.precision.module_row import schemes_of_rows
from bridge.preflight import declared_gpu
from bridge.read.given_run import GivenRun
from bridge.registry.config import MixedPrecisionConfig
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
FINDING_FIELDS = tuple(field.name for field in dataclasses.fields(Finding))
Job = dict[str, Any]
"""The sections of the small run, its launches, steps and variables, as `rehearse` writes them."""
Answer = dict[str, Any]
"""The answer of this process, or a part of it, as plain data."""
PHASES = {"train": "it trains", "alone": "it trains", "resume": "it resumes from its checkpoint"}
"""Part of a rank's work (to train and save, to train alone, to resume) -> the phase of its
errors."""


def main(file: Path) -> None:
    """Rehearse the job of a file, and write ``answer.json`` next to the file."""
    job: Job = json.loads(file.read_text(encoding="utf-8"))
    try:
        answer = _answer(job, file.parent)
    except BridgeError as error:  # before anything was launched: what is needed is not here
        answer = {"refused": str(error)}
    (file.parent / "answer.json").write_text(json.dumps(answer, default=str), encoding="utf-8")


def _answer(job: Job, folder: Path) -> Answer:
    """Return the settings that were left out, the outcome of each launch, and the releases."""
    sections = job["sections"]
    is_te = sections["precision_backend"] == declared_gpu.BACKEND
    if is_te:
        _declare_gpu(sections)  # before Megatron is imported
    rounds = []
    for layout in job["rounds"]:
        rounds.append(Round(**{**layout, "kinds": tuple(layout["kinds"])}))
    left_out = leave_out(sections, rounds)
    _refuse_another_model(left_out)
    left_out += _replaced_variables(job["variables"])
    for name in IN_EVERY_RANK:
        import_module(name)
    if is_te and job["saves_without_state"]:
        from bridge.runtime.megatron.te_cpu.patches import save_without_state

        save_without_state()
    gc.freeze()  # a fork would copy the memory of every module to collect garbage
    launches: list[Answer] = []
    for launch in _without_left_out(rounds, left_out):
        place = folder / f"launch-{len(launches)}"
        place.mkdir()
        began = time.perf_counter()
        outcomes = _launch(job, launch, place)
        seconds = time.perf_counter() - began
        layout = dataclasses.asdict(launch)
        launches.append({"round": layout, "seconds": seconds, "outcomes": outcomes})
    return {"left_out": left_out, "launches": launches, "versions": _versions(is_te=is_te)}


def _declare_gpu(sections: Job) -> None:
    """Declare a GPU that runs the schemes of the precision to Transformer Engine."""
    model = sections["model"] | (sections.get("mixed_precision") or {})
    scheme = model.get("fp8_recipe")
    if model.get("fp4"):
        scheme = model.get("fp4_recipe")
    schemes = [scheme, *schemes_of_rows(model.get("modules"))]
    declared_gpu.declare(sections.get("target"), schemes=schemes)


def _versions(*, is_te: bool) -> dict[str, str | None]:
    """Return product -> the release that runs here; None where it does not run."""
    versions: dict[str, str | None] = {"mcore": installed_text("mcore"), "te": None}
    if is_te:
        from bridge.runtime.megatron.te_cpu.install import installed_te

        te = installed_te()
        if te is not None:
            versions["te"] = te.version
    return versions


def leave_out(sections: Job, rounds: list[Round]) -> list[Answer]:
    """Remove the fields that no run here can have, and return those that were set, with reasons.

    They are the fields that Megatron's classes here do not have, and those that the build of
    scripts/train.py does not honour.
    """
    from bridge.runtime.megatron.deferred import (
        MegatronDistributedDataParallelConfig,
        MegatronOptimizerConfig,
    )
    from bridge.runtime.megatron.gpt import GPTConfig

    removed: list[Answer] = []
    owners = {
        "model": GPTConfig,
        "optimizer": MegatronOptimizerConfig,
        "ddp": MegatronDistributedDataParallelConfig,
    }
    for name, owner in owners.items():
        section = sections[name]
        values = dict(section)
        if name == "model":
            values |= _sizes(rounds)
        defaults = {field.name: default_of(field) for field in dataclasses.fields(owner)}
        _drop_foreign_nulls(section, defaults)
        refused = _refused_fields(name, values, backend=sections["precision_backend"])
        for key in section:
            if key not in defaults:
                refused[f"{name}.{key}"] = "the configs of this Megatron Core have no such field"
        for path, reason in refused.items():
            key = path.partition(".")[2]
            section.pop(key, None)
            if values.get(key) not in (None, False, [], DEFAULTS[name].get(key)):
                removed.append({"path": path, "value": values.get(key), "rule": reason})
    return removed


def _drop_foreign_nulls(section: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Remove the nulls that a class here does not take, as in a file of a later release."""
    for key in list(section):
        is_null = section[key] is None and key not in NULLABLE
        if is_null and defaults.get(key) is not None:
            del section[key]


def _refused_fields(name: str, values: dict[str, Any], *, backend: str) -> dict[str, str]:
    """Return the path of each field of a section that the build does not honour -> the reason."""
    faults = [
        *unhonoured(name, values, backend=backend),
        *unaccepted(name, values, backend=backend),
    ]
    if name == "model":
        faults += without_context_parallel(values, backend=backend)
    refused = {}
    for fault in faults:
        refused[str(fault.path)] = str(fault.words["clause"])
    return refused


def _refuse_another_model(left_out: list[Answer]) -> None:
    """Refuse a run where one of the fields of `ANOTHER_MODEL` was left out."""
    for entry in left_out:
        if entry["path"] in ANOTHER_MODEL:
            rule = f"a rehearsal without it would be one of another model ({entry['rule']})"
            remedy = "Use `precision-bridge check` for this run."
            raise RunConfigError.of(entry["path"], rule, entry["value"], remedy)


def _replaced_variables(variables: dict[str, str]) -> list[Answer]:
    """Return the environment variables of the run that have another value here."""
    replaced = []
    for name, value in variables.items():
        if os.environ[name] != value:
            rule = f"a CPU needs {os.environ[name]}"
            replaced.append({"path": name, "value": value, "rule": rule})
    return replaced


def _sizes(rounds: list[Round]) -> dict[str, Any]:
    """Return the model fields of the launches' layouts that are on."""
    sizes: dict[str, Any] = {}
    for launch in rounds:
        fields = launch.fields().items()
        sizes |= {name: value for name, value in fields if value not in (1, None, False)}
    return sizes


def _without_left_out(rounds: list[Round], left_out: list[Answer]) -> list[Round]:
    """Return the launches without the kinds of parallelism whose sizes were left out."""
    paths = {entry["path"] for entry in left_out}
    for kind, path in SIZES.items():
        if path in paths:
            rounds = [launch.without(kind) for launch in rounds]
    parallel = [launch for launch in rounds if launch.kinds]
    return parallel or [rounds[0]]


def _launch(job: Job, launch: Round, folder: Path) -> list[Answer]:
    """Train, save and resume in a launch, and return the outcome of each rank."""
    outcomes = _forked("train", job, launch, folder)
    if not _failed(outcomes):
        resumed = _forked("resume", job, launch, folder)
        return [first | second for first, second in zip(outcomes, resumed, strict=True)]
    # The formats are of interest where only the checkpoint is at fault.
    alone = _forked("alone", job, launch, folder)
    if _failed(alone):
        return outcomes
    saving = {"phase": "it saves its checkpoint"}
    return [done | failed | saving for done, failed in zip(alone, outcomes, strict=True)]


def _failed(outcomes: list[Answer]) -> bool:
    """Return whether a rank ended with an error, or without an outcome."""
    return any("error" in outcome or "ended" in outcome for outcome in outcomes)


def _forked(work: str, job: Job, launch: Round, folder: Path) -> list[Answer]:
    """Run a part of the work in a fork for each rank; return what each wrote."""
    from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it untyped

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    size = str(launch.processes)
    environment = {
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
        of_rank = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(fork.Process(target=_rank, args=(work, job, launch, file, of_rank)))
    for process in ranks:
        process.start()
    _wait(ranks)
    outcomes = []
    for file, process in zip(files, ranks, strict=True):
        outcome: Answer = {"ended": f"exit code {process.exitcode}"}
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


def _rank(work: str, job: Job, launch: Round, file: Path, variables: dict[str, str]) -> None:
    """Run a rank of a launch, and write its outcome into a file."""
    os.environ.update(variables)
    outcome: Answer = {}
    try:
        _run(work, job, launch, file.parent, outcome)
    except Exception as error:  # noqa: BLE001 an error of Megatron's is what a rehearsal looks for
        outcome["error"] = {"at": time.time(), **_described(error, job["sections"])}
    file.write_text(json.dumps(outcome, default=str), encoding="utf-8")
    if "error" in outcome:
        sys.exit(1)


def _described(error: Exception, sections: Job) -> Answer:
    """Return an error as findings, or as its text with the settings in its condition."""
    first = first_of(error)
    if isinstance(first, PrecisionConfigError | SyncError | CheckError):
        return {"findings": [_attributes(finding, FINDING_FIELDS) for finding in first.findings]}
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


def _attributes(value: object, names: Iterable[str]) -> Answer:
    """Return the named attributes of a value as plain data."""
    return {name: getattr(value, name) for name in names}


def _run(work: str, job: Job, launch: Round, folder: Path, outcome: Answer) -> None:
    """Build and train the run of a rank; note in `outcome` what came of it so far."""
    from bridge.preflight.last_sync import last_sync
    from bridge.training.loop import pretrain

    saved = str(folder / SAVED)
    saving = {"save": saved, "save_interval": job["steps"], "save_last": False}
    files = {"train": saving, "alone": {}, "resume": {"load": saved}}
    is_resumed = work == "resume"
    outcome["phase"] = "the configs are built"
    if is_resumed:
        outcome["phase"] = PHASES[work]
    run, problems = run_of(GivenRun(sections=_sections(job, launch, files[work])))
    config = container(run, problems)
    # `container` resolved the name.
    precision = cast("MixedPrecisionConfig | None", config.mixed_precision)
    last_sync(config, precision)
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


def _sections(job: Job, launch: Round, checkpoint: Job) -> Job:
    """Return the sections of a launch, with its layout, its batch and its checkpoints.

    The run takes one step more than the checkpoint has.
    """
    sections = job["sections"]
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
            "train_iters": job["steps"] + 1,
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
