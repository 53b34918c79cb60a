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
from bridge.front.decode import build_container
from bridge.front.loader import make_run
from bridge.model.section import NULLABLE_FIELDS
from bridge.plan.fit import PARALLEL_SIZE_FIELDS
from bridge.precision.fields import get_field_default
from bridge.precision.module_row import list_row_schemes
from bridge.preflight import declared_gpu
from bridge.read.run_input import RunInput
from bridge.registry.config import MixedPrecisionConfig
from bridge.rehearse.error_cause import find_cause, find_root_error
from bridge.rehearse.layout import LaunchLayout
from bridge.rules.topics.system.train_script import (
    find_context_parallel_faults,
    find_unsupported_fields,
    find_unsupported_values,
)
from bridge.runtime.audit.record import RECORD_FILE, Record
from bridge.target.fields import OWNER_DEFAULTS
from bridge.target.versions import get_installed_text

MODEL_DEFINING_FIELDS = (
    "model.heterogeneous_block_specs",
    "model.experimental_attention_variant",
    "model.linear_attention_freq",
    "model.dsa_indexer_topk_freq",
    "model.use_kitchen",
)
"""Fields without which the model would be another one: a run that has one is not rehearsed."""
PRELOADED_MODULES = ("bridge.training.loop", "megatron.core.models.gpt.gpt_model")
"""Modules that each rank needs: the process that is forked imports them once."""
LAUNCH_SECONDS = 240.0
GRACE_SECONDS = 3.0
"""How long the other ranks may go on after the first one has failed."""

CHECKPOINT_FOLDER = "checkpoints"
FINDING_FIELDS = tuple(field.name for field in dataclasses.fields(Finding))
Job = dict[str, Any]
"""The sections of the small run, its launches, steps and variables, as `rehearse` writes them."""
Answer = dict[str, Any]
"""The answer of this process, or a part of it, as plain data."""
WORK_PHASES = {
    "train": "it trains",
    "alone": "it trains",
    "resume": "it resumes from its checkpoint",
}
"""Part of a rank's work (to train and save, to train alone, to resume) -> the phase of its
errors."""


def main(file: Path) -> None:
    """Rehearse the job of a file, and write ``answer.json`` next to the file."""
    job: Job = json.loads(file.read_text(encoding="utf-8"))
    try:
        answer = _rehearse_job(job, file.parent)
    except BridgeError as error:  # before anything was launched: what is needed is not here
        answer = {"refused": str(error)}
    (file.parent / "answer.json").write_text(json.dumps(answer, default=str), encoding="utf-8")


def _rehearse_job(job: Job, folder: Path) -> Answer:
    """Return the settings that were left out, the outcome of each launch, and the releases."""
    sections = job["sections"]
    is_te = sections["precision_backend"] == declared_gpu.TE_CPU_BACKEND
    if is_te:
        _declare_gpu(sections)  # before Megatron is imported
    rounds = []
    for layout in job["rounds"]:
        rounds.append(LaunchLayout(**{**layout, "kinds": tuple(layout["kinds"])}))
    left_out = leave_out(sections, rounds)
    _refuse_changed_model(left_out)
    left_out += _find_replaced_variables(job["variables"])
    for name in PRELOADED_MODULES:
        import_module(name)
    if is_te and job["saves_without_state"]:
        from bridge.runtime.megatron.te_cpu.patches import patch_empty_extra_state

        patch_empty_extra_state()
    gc.freeze()  # a fork would copy the memory of every module to collect garbage
    launches: list[Answer] = []
    for launch in _drop_left_out_kinds(rounds, left_out):
        place = folder / f"launch-{len(launches)}"
        place.mkdir()
        began = time.perf_counter()
        outcomes = _run_launch(job, launch, place)
        seconds = time.perf_counter() - began
        layout = dataclasses.asdict(launch)
        launches.append({"round": layout, "seconds": seconds, "outcomes": outcomes})
    return {"left_out": left_out, "launches": launches, "versions": _detect_versions(is_te=is_te)}


def _declare_gpu(sections: Job) -> None:
    """Declare a GPU that runs the schemes of the precision to Transformer Engine."""
    model = sections["model"] | (sections.get("mixed_precision") or {})
    scheme = model.get("fp8_recipe")
    if model.get("fp4"):
        scheme = model.get("fp4_recipe")
    schemes = [scheme, *list_row_schemes(model.get("modules"))]
    declared_gpu.declare(sections.get("target"), schemes=schemes)


def _detect_versions(*, is_te: bool) -> dict[str, str | None]:
    """Return product -> the release that runs here; None where it does not run."""
    versions: dict[str, str | None] = {"mcore": get_installed_text("mcore"), "te": None}
    if is_te:
        from bridge.runtime.megatron.te_cpu.install import get_installed_te

        te = get_installed_te()
        if te is not None:
            versions["te"] = te.version
    return versions


def leave_out(sections: Job, rounds: list[LaunchLayout]) -> list[Answer]:
    """Remove the fields that no run here can have, and return those that were set, with reasons.

    They are the fields that Megatron's classes here do not have, and those that the build of
    scripts/train.py does not honour.
    """
    from bridge.runtime.megatron.deferred_configs import (
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
            values |= _collect_sizes(rounds)
        defaults = {field.name: get_field_default(field) for field in dataclasses.fields(owner)}
        _drop_foreign_nulls(section, defaults)
        refused = _find_refused_fields(name, values, backend=sections["precision_backend"])
        for key in section:
            if key not in defaults:
                refused[f"{name}.{key}"] = "the configs of this Megatron Core have no such field"
        for path, reason in refused.items():
            key = path.partition(".")[2]
            section.pop(key, None)
            if values.get(key) not in (None, False, [], OWNER_DEFAULTS[name].get(key)):
                removed.append({"path": path, "value": values.get(key), "rule": reason})
    return removed


def _drop_foreign_nulls(section: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Remove the nulls that a class here does not take, as in a file of a later release."""
    for key in list(section):
        is_null = section[key] is None and key not in NULLABLE_FIELDS
        if is_null and defaults.get(key) is not None:
            del section[key]


def _find_refused_fields(name: str, values: dict[str, Any], *, backend: str) -> dict[str, str]:
    """Return the path of each field of a section that the build does not honour -> the reason."""
    faults = [
        *find_unsupported_fields(name, values, backend=backend),
        *find_unsupported_values(name, values, backend=backend),
    ]
    if name == "model":
        faults += find_context_parallel_faults(values, backend=backend)
    refused = {}
    for fault in faults:
        refused[str(fault.path)] = str(fault.words["clause"])
    return refused


def _refuse_changed_model(left_out: list[Answer]) -> None:
    """Refuse a run where one of the fields of `MODEL_DEFINING_FIELDS` was left out."""
    for entry in left_out:
        if entry["path"] in MODEL_DEFINING_FIELDS:
            rule = f"a rehearsal without it would be one of another model ({entry['rule']})"
            remedy = "Use `precision-bridge check` for this run."
            raise RunConfigError.of(entry["path"], rule, entry["value"], remedy)


def _find_replaced_variables(variables: dict[str, str]) -> list[Answer]:
    """Return the environment variables of the run that have another value here."""
    replaced = []
    for name, value in variables.items():
        if os.environ[name] != value:
            rule = f"a CPU needs {os.environ[name]}"
            replaced.append({"path": name, "value": value, "rule": rule})
    return replaced


def _collect_sizes(rounds: list[LaunchLayout]) -> dict[str, Any]:
    """Return the model fields of the launches' layouts that are on."""
    sizes: dict[str, Any] = {}
    for launch in rounds:
        fields = launch.fields().items()
        sizes |= {name: value for name, value in fields if value not in (1, None, False)}
    return sizes


def _drop_left_out_kinds(rounds: list[LaunchLayout], left_out: list[Answer]) -> list[LaunchLayout]:
    """Return the launches without the kinds of parallelism whose sizes were left out."""
    paths = {entry["path"] for entry in left_out}
    for kind, path in PARALLEL_SIZE_FIELDS.items():
        if path in paths:
            rounds = [launch.without(kind) for launch in rounds]
    parallel = [launch for launch in rounds if launch.kinds]
    return parallel or [rounds[0]]


def _run_launch(job: Job, launch: LaunchLayout, folder: Path) -> list[Answer]:
    """Train, save and resume in a launch, and return the outcome of each rank."""
    outcomes = _fork_ranks("train", job, launch, folder)
    if not _has_failed(outcomes):
        resumed = _fork_ranks("resume", job, launch, folder)
        return [first | second for first, second in zip(outcomes, resumed, strict=True)]
    # The formats are of interest where only the checkpoint is at fault.
    alone = _fork_ranks("alone", job, launch, folder)
    if _has_failed(alone):
        return outcomes
    saving = {"phase": "it saves its checkpoint"}
    return [done | failed | saving for done, failed in zip(alone, outcomes, strict=True)]


def _has_failed(outcomes: list[Answer]) -> bool:
    """Return whether a rank ended with an error, or without an outcome."""
    return any("error" in outcome or "ended" in outcome for outcome in outcomes)


def _fork_ranks(work: str, job: Job, launch: LaunchLayout, folder: Path) -> list[Answer]:
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
        ranks.append(fork.Process(target=_run_rank, args=(work, job, launch, file, of_rank)))
    for process in ranks:
        process.start()
    _wait_for_ranks(ranks)
    outcomes = []
    for file, process in zip(files, ranks, strict=True):
        outcome: Answer = {"ended": f"exit code {process.exitcode}"}
        if file.is_file():
            outcome = json.loads(file.read_text(encoding="utf-8"))
        outcomes.append(outcome)
    return outcomes


def _wait_for_ranks(ranks: list[ForkProcess]) -> None:
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


def _run_rank(
    work: str, job: Job, launch: LaunchLayout, file: Path, variables: dict[str, str]
) -> None:
    """Run a rank of a launch, and write its outcome into a file."""
    os.environ.update(variables)
    outcome: Answer = {}
    try:
        _train_rank(work, job, launch, file.parent, outcome)
    except Exception as error:  # noqa: BLE001 an error of Megatron's is what a rehearsal looks for
        outcome["error"] = {"at": time.time(), **_error_to_dict(error, job["sections"])}
    file.write_text(json.dumps(outcome, default=str), encoding="utf-8")
    if "error" in outcome:
        sys.exit(1)


def _error_to_dict(error: Exception, sections: Job) -> Answer:
    """Return an error as findings, or as its text with the settings in its condition."""
    first = find_root_error(error)
    if isinstance(first, PrecisionConfigError | SyncError | CheckError):
        return {
            "findings": [_attributes_to_dict(finding, FINDING_FIELDS) for finding in first.findings]
        }
    if isinstance(first, BridgeError):
        parts = {"path": "run", "rule": str(first), "remedy": ""}
        if getattr(first, "path", ""):
            parts = _attributes_to_dict(first, ("path", "rule", "value", "remedy"))
        return {"findings": [parts]}
    configs = {name: sections[name] for name in ("model", "optimizer", "ddp")}
    where, fields = find_cause(first, configs)
    return {
        "type": type(first).__name__,
        "message": " ".join(str(first).split()),
        "where": where,
        "fields": fields,
    }


def _attributes_to_dict(value: object, names: Iterable[str]) -> Answer:
    """Return the named attributes of a value as plain data."""
    return {name: getattr(value, name) for name in names}


def _train_rank(work: str, job: Job, launch: LaunchLayout, folder: Path, outcome: Answer) -> None:
    """Build and train the run of a rank; note in `outcome` what came of it so far."""
    from bridge.preflight.last_sync import apply_last_sync
    from bridge.training.loop import pretrain

    saved = str(folder / CHECKPOINT_FOLDER)
    saving = {"save": saved, "save_interval": job["steps"], "save_last": False}
    files = {"train": saving, "alone": {}, "resume": {"load": saved}}
    is_resumed = work == "resume"
    outcome["phase"] = "the configs are built"
    if is_resumed:
        outcome["phase"] = WORK_PHASES[work]
    run, problems = make_run(RunInput(sections=_build_sections(job, launch, files[work])))
    config = build_container(run, problems)
    # `container` resolved the name.
    precision = cast("MixedPrecisionConfig | None", config.mixed_precision)
    apply_last_sync(config, precision)
    outcome["phase"] = WORK_PHASES[work]
    summary = pretrain(config, run_dir=folder / work)
    if is_resumed:
        outcome["resumed_loss"] = summary.train_loss
        return
    outcome["loss"], outcome["parameters"] = summary.train_loss, summary.parameters
    if os.environ["RANK"] == "0":
        last = Record.read(folder / work / RECORD_FILE)
        steps = {1: (summary.gemms, summary.census), last.step: (last.gemms, last.census)}
        outcome["records"] = []
        for step, (gemms, census) in steps.items():
            content = {
                "step": step,
                "gemms": list(map(dataclasses.asdict, gemms)),
                "census": list(map(dataclasses.asdict, census)),
            }
            outcome["records"].append(content)


def _build_sections(job: Job, launch: LaunchLayout, checkpoint: Job) -> Job:
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
