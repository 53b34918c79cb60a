"""The process of a rehearsal that imports Megatron: ``python -m bridge.rehearse.worker JOB.json``.

The process imports Megatron once. It forks itself for each launch, and the fork forks itself for
each rank. The ranks train a few steps, save a checkpoint, and resume from it for one step. Launches
run at the same time, since ranks that wait for each other leave processors idle. Every exception of
a rank is part of the answer, since a rehearsal looks for the errors of Megatron Core and Transformer
Engine.
"""

import dataclasses
import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from multiprocessing import connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Literal, cast

from bridge.errors import (
    BridgeError,
    CheckError,
    Finding,
    PrecisionConfigError,
    RunConfigError,
    SyncError,
)
from bridge.front.container import build_container
from bridge.front.loader import make_run
from bridge.model.section import NULLABLE_FIELDS
from bridge.plan.fit import PARALLEL_SIZE_FIELDS
from bridge.precision.stated_field import get_field_default
from bridge.preflight import gpu_for_te_cpu
from bridge.read.run_input import RunInput
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.rehearse.error_cause import find_cause, find_root_error
from bridge.rehearse.job import (
    Job,
    JobAnswer,
    LaunchOutcome,
    LeftOutSetting,
    RankError,
    RankOutcome,
    Refusal,
    Sections,
    StepRecord,
)
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
"""Fields that define the model. A run with such a field that is not supported here is refused."""
PRELOADED_MODULES = ("bridge.training.loop", "megatron.core.models.gpt.gpt_model")
"""Modules that each rank needs. The process imports them once, before it forks."""
MAX_RANKS = 8
"""The most ranks that run at the same time, unless a single launch has more."""
LAUNCH_SECONDS = 480.0
"""The longest time that the ranks of a launch may run."""
GRACE_SECONDS = 3.0
"""The longest time that other ranks may continue after a rank has failed."""
CHECKPOINT_FOLDER = "checkpoints"
FINDING_FIELDS = tuple(field.name for field in dataclasses.fields(Finding))

Work = Literal["train_and_save", "train", "resume"]
"""The work of a rank in a process."""
PHASE_OF_WORK: dict[Work, str] = {
    "train_and_save": "it trains",
    "train": "it trains",
    "resume": "it resumes from its checkpoint",
}
"""Work -> the phase that the message about an error names."""


def main(file: Path) -> None:
    """Rehearse the job of a file, and write ``answer.json`` next to the file."""
    # The imports make many objects that live to the end, and collections would visit them again and
    # again. `_prepare_forks` ends this.
    gc.disable()
    job: Job = json.loads(file.read_text(encoding="utf-8"))
    answer: JobAnswer | Refusal
    try:
        answer = _rehearse_job(job, file.parent)
    except BridgeError as error:  # nothing could be launched on this machine
        answer = {"refused": str(error)}
    (file.parent / "answer.json").write_text(json.dumps(answer, default=str), encoding="utf-8")


def _rehearse_job(job: Job, folder: Path) -> JobAnswer:
    """Prepare the process, run each launch, and return the answer.

    Args:
        job: The job. Settings that no run on this machine can have are removed from its sections.
        folder: The folder for the files of the launches.

    Raises:
        BridgeError: Nothing can be launched on this machine.
    """
    sections = job["sections"]
    is_te = sections["precision_backend"] == gpu_for_te_cpu.TE_CPU_BACKEND
    if is_te:
        # Megatron looks for Transformer Engine when it is imported.
        fields = sections["model"] | (sections.get("mixed_precision") or {})
        gpu_for_te_cpu.declare_for_run(sections.get("target"), fields)
    launches = list(map(LaunchLayout.from_dict, job["launches"]))
    left_out = remove_unsupported_settings(sections, launches)
    _require_same_model(left_out)
    left_out += _find_replaced_variables(job["variables"])
    _prepare_forks(patches_te=is_te and job["saves_without_state"])
    outcomes = _run_launches(job, _drop_left_out_kinds(launches, left_out), folder)
    return {"left_out": left_out, "launches": outcomes, "versions": _detect_versions(is_te=is_te)}


def _prepare_forks(*, patches_te: bool) -> None:
    """Import and patch what every rank needs, so that the forks share it.

    Args:
        patches_te: Whether grouped experts are saved as in the target (rule PB436).
    """
    for name in PRELOADED_MODULES:
        import_module(name)
    _load_kernel()
    if patches_te:
        from bridge.runtime.megatron.te_cpu.patches import patch_empty_extra_state

        patch_empty_extra_state()
    # Otherwise the garbage collection in a fork would copy the memory of every module.
    gc.freeze()
    gc.enable()


def _load_kernel() -> None:
    """Load the C kernel of the numerics, which each rank would have to look for otherwise."""
    from bridge.runtime.numerics import native

    # The ranks report a wrong choice of the kernel.
    with suppress(BridgeError):
        if native.get_kernel_choice() != "torch":
            native.load_kernel(wait=True)


def _detect_versions(*, is_te: bool) -> dict[str, str | None]:
    """Return product -> the release that runs here. None: the product does not run."""
    versions: dict[str, str | None] = {"mcore": get_installed_text("mcore"), "te": None}
    if is_te:
        from bridge.runtime.megatron.te_cpu.install import get_installed_te

        te = get_installed_te()
        if te is not None:
            versions["te"] = te.version
    return versions


def remove_unsupported_settings(
    sections: Sections, launches: list[LaunchLayout]
) -> list[LeftOutSetting]:
    """Remove the fields that no run on this machine can have.

    Such a field is missing in the Megatron classes of this machine, or is not supported by
    scripts/train.py.

    Args:
        sections: The sections of the small run. They are changed.

    Returns:
        The removed fields that were set to something else than their default, with the reason.
    """
    from bridge.runtime.megatron.deferred_configs import (
        MegatronDistributedDataParallelConfig,
        MegatronOptimizerConfig,
    )
    from bridge.runtime.megatron.model.gpt import GPTConfig

    left_out: list[LeftOutSetting] = []
    config_classes = {
        "model": GPTConfig,
        "optimizer": MegatronOptimizerConfig,
        "ddp": MegatronDistributedDataParallelConfig,
    }
    for name, config_class in config_classes.items():
        section = sections[name]
        values = dict(section)
        if name == "model":
            values |= _collect_sizes(launches)
        defaults = {}
        for field in dataclasses.fields(config_class):
            defaults[field.name] = get_field_default(field)
        _remove_foreign_nulls(section, defaults)
        reasons = _find_unsupported_fields(name, values, backend=sections["precision_backend"])
        for key in section:
            if key not in defaults:
                reasons[key] = "the configs of this Megatron Core have no such field"
        for key, reason in reasons.items():
            section.pop(key, None)
            if values.get(key) not in (None, False, [], OWNER_DEFAULTS[name].get(key)):
                path = f"{name}.{key}"
                left_out.append({"path": path, "value": values.get(key), "rule": reason})
    return left_out


def _remove_foreign_nulls(section: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Remove the nulls, from a file of a later release, of fields that cannot be None here."""
    for key in list(section):
        is_null = section[key] is None and key not in NULLABLE_FIELDS
        if is_null and defaults.get(key) is not None:
            del section[key]


def _find_unsupported_fields(
    section: str, values: dict[str, Any], *, backend: str
) -> dict[str, str]:
    """Return each field that a run of scripts/train.py does not support -> the reason."""
    faults = [
        *find_unsupported_fields(section, values, backend=backend),
        *find_unsupported_values(section, values, backend=backend),
    ]
    if section == "model":
        faults += find_context_parallel_faults(values, backend=backend)
    reasons = {}
    for fault in faults:
        key = str(fault.path).partition(".")[2]
        reasons[key] = str(fault.words["clause"])
    return reasons


def _require_same_model(left_out: list[LeftOutSetting]) -> None:
    """Refuse a run if a field that defines its model was left out.

    Raises:
        RunConfigError: A field of `MODEL_DEFINING_FIELDS` was left out.
    """
    for setting in left_out:
        if setting["path"] in MODEL_DEFINING_FIELDS:
            rule = f"a rehearsal without it would be one of another model ({setting['rule']})"
            remedy = "Use `precision-bridge check` for this run."
            raise RunConfigError.of(setting["path"], rule, setting["value"], remedy)


def _find_replaced_variables(variables: dict[str, str]) -> list[LeftOutSetting]:
    """Return the environment variables of the run that have another value in this process."""
    replaced: list[LeftOutSetting] = []
    for name, value in variables.items():
        if os.environ[name] != value:
            rule = f"a CPU needs {os.environ[name]}"
            replaced.append({"path": name, "value": value, "rule": rule})
    return replaced


def _collect_sizes(launches: list[LaunchLayout]) -> dict[str, Any]:
    """Return the model fields of the launches' layouts that are on, as one layout."""
    sizes: dict[str, Any] = {}
    for launch in launches:
        fields = launch.fields().items()
        sizes |= {name: value for name, value in fields if value not in (1, None, False)}
    return sizes


def _drop_left_out_kinds(
    launches: list[LaunchLayout], left_out: list[LeftOutSetting]
) -> list[LaunchLayout]:
    """Return the launches without the kinds of parallelism whose sizes were left out.

    A launch without any kind is dropped, but at least one launch is returned.
    """
    paths = {setting["path"] for setting in left_out}
    for kind, path in PARALLEL_SIZE_FIELDS.items():
        if path in paths:
            launches = [launch.without(kind) for launch in launches]
    parallel = [launch for launch in launches if launch.kinds]
    return parallel or [launches[0]]


def _run_launches(job: Job, launches: list[LaunchLayout], folder: Path) -> list[LaunchOutcome]:
    """Run each launch in a fork, and return the outcomes. At most `MAX_RANKS` ranks run at once."""
    context = multiprocessing.get_context("fork")
    files: list[Path] = []
    forks: list[ForkProcess] = []
    running: list[tuple[ForkProcess, LaunchLayout]] = []
    for launch in launches:
        while running and _count_ranks(running) + launch.processes > MAX_RANKS:
            connection.wait([fork.sentinel for fork, _ in running])
            running = [(fork, other) for fork, other in running if fork.is_alive()]
        launch_folder = folder / f"launch-{len(files)}"
        launch_folder.mkdir()
        files.append(launch_folder / "outcome.json")
        forks.append(context.Process(target=_write_launch_outcome, args=(job, launch, files[-1])))
        forks[-1].start()
        running.append((forks[-1], launch))
    outcomes = []
    for launch, file, fork in zip(launches, files, forks, strict=True):
        fork.join()
        outcomes.append(_read_launch_outcome(launch, file, fork))
    return outcomes


def _count_ranks(running: list[tuple[ForkProcess, LaunchLayout]]) -> int:
    """Return the number of ranks of running launches."""
    return sum(launch.processes for _, launch in running)


def _write_launch_outcome(job: Job, launch: LaunchLayout, file: Path) -> None:
    """Run a launch, and write its outcome into a file. The folder of the file is the launch's."""
    began = time.perf_counter()
    ranks = _run_launch(job, launch, file.parent)
    seconds = time.perf_counter() - began
    outcome: LaunchOutcome = {"layout": launch.to_dict(), "seconds": seconds, "ranks": ranks}
    file.write_text(json.dumps(outcome, default=str), encoding="utf-8")


def _read_launch_outcome(launch: LaunchLayout, file: Path, fork: ForkProcess) -> LaunchOutcome:
    """Return the outcome that the fork of a launch wrote, or its exit code if it wrote none."""
    if not file.is_file():
        ended: list[RankOutcome] = [{"ended": f"exit code {fork.exitcode}"}]
        return {"layout": launch.to_dict(), "seconds": 0.0, "ranks": ended}
    outcome: LaunchOutcome = json.loads(file.read_text(encoding="utf-8"))
    return outcome


def _run_launch(job: Job, launch: LaunchLayout, folder: Path) -> list[RankOutcome]:
    """Train, save and resume in a launch, and return the outcome of each rank."""
    trained = _fork_ranks("train_and_save", job, launch, folder)
    if not _has_failed(trained):
        resumed = _fork_ranks("resume", job, launch, folder)
        return [first | second for first, second in zip(trained, resumed, strict=True)]
    # If only the checkpoint fails, the formats of the steps can still be compared with the plan.
    without_saving = _fork_ranks("train", job, launch, folder)
    if _has_failed(without_saving):
        return trained
    outcomes = []
    for sound, failed in zip(without_saving, trained, strict=True):
        outcome = sound | failed
        outcome["phase"] = "it saves its checkpoint"
        outcomes.append(outcome)
    return outcomes


def _has_failed(outcomes: list[RankOutcome]) -> bool:
    """Return whether a rank ended with an error, or without an outcome."""
    return any("error" in outcome or "ended" in outcome for outcome in outcomes)


def _fork_ranks(work: Work, job: Job, launch: LaunchLayout, folder: Path) -> list[RankOutcome]:
    """Do some work in a fork for each rank, and return the outcomes that the ranks wrote."""
    from torch._C._distributed_c10d import TCPStore  # torch.distributed re-exports it untyped

    # The store lives as long as the ranks.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    size = str(launch.processes)
    launch_variables = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        # The ranks are clients of this store, as under torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    context = multiprocessing.get_context("fork")
    files = [folder / f"{work}-{rank}.json" for rank in range(launch.processes)]
    ranks = []
    for rank, file in enumerate(files):
        variables = {**launch_variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(context.Process(target=_run_rank, args=(work, job, launch, file, variables)))
    for process in ranks:
        process.start()
    _wait_for_ranks(ranks)
    return list(map(_read_outcome, files, ranks))


def _read_outcome(file: Path, process: ForkProcess) -> RankOutcome:
    """Return the outcome that a rank wrote, or its exit code if it wrote none."""
    if not file.is_file():
        return {"ended": f"exit code {process.exitcode}"}
    outcome: RankOutcome = json.loads(file.read_text(encoding="utf-8"))
    return outcome


def _wait_for_ranks(ranks: list[ForkProcess]) -> None:
    """Wait for all ranks, and end those that take too long.

    After a rank has failed, the other ranks may wait for it forever. So they are ended after
    `GRACE_SECONDS`.
    """
    deadline = time.monotonic() + LAUNCH_SECONDS
    while time.monotonic() < deadline:
        sentinels = [rank.sentinel for rank in ranks if rank.is_alive()]
        if not sentinels:
            break
        connection.wait(sentinels, timeout=1.0)
        if any(rank.exitcode for rank in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
        rank.join()


def _run_rank(
    work: Work, job: Job, launch: LaunchLayout, file: Path, variables: dict[str, str]
) -> None:
    """Do the work of a rank in this fork, and write its outcome into a file."""
    os.environ.update(variables)
    outcome: RankOutcome = {}
    try:
        _train_rank(work, job, launch, file.parent, outcome)
    except Exception as error:  # noqa: BLE001 an error of Megatron's is what a rehearsal looks for
        outcome["error"] = _error_to_dict(error, job["sections"])
    file.write_text(json.dumps(outcome, default=str), encoding="utf-8")
    if "error" in outcome:
        sys.exit(1)


def _error_to_dict(error: Exception, sections: Sections) -> RankError:
    """Return an error as findings, or as its message with the settings in its condition."""
    now = time.time()
    root = find_root_error(error)
    if isinstance(root, PrecisionConfigError | SyncError | CheckError):
        findings = [_attributes_to_dict(finding, FINDING_FIELDS) for finding in root.findings]
        return {"at": now, "findings": findings}
    if isinstance(root, BridgeError):
        finding = {"path": "run", "rule": str(root), "remedy": ""}
        if getattr(root, "path", ""):
            finding = _attributes_to_dict(root, ("path", "rule", "value", "remedy"))
        return {"at": now, "findings": [finding]}
    configs = {name: sections[name] for name in ("model", "optimizer", "ddp")}
    location, fields = find_cause(root, configs)
    return {
        "at": now,
        "type": type(root).__name__,
        "message": " ".join(str(root).split()),
        "location": location,
        "fields": fields,
    }


def _attributes_to_dict(value: object, names: Iterable[str]) -> dict[str, Any]:
    """Return the named attributes of a value as plain data."""
    return {name: getattr(value, name) for name in names}


def _train_rank(
    work: Work, job: Job, launch: LaunchLayout, folder: Path, outcome: RankOutcome
) -> None:
    """Build and train the run of a rank.

    Args:
        folder: The folder of the launch.
        outcome: The outcome so far is written into it, so that it is known after an error too.
    """
    from bridge.preflight.last_sync import apply_last_sync
    from bridge.training.loop import pretrain

    outcome["phase"] = "the configs are built"
    if work == "resume":
        outcome["phase"] = PHASE_OF_WORK[work]
    checkpoint = _build_checkpoint_section(work, str(folder / CHECKPOINT_FOLDER), job["steps"])
    run, problems = make_run(RunInput(sections=_build_sections(job, launch, checkpoint)))
    config = build_container(run, problems)
    # `build_container` has resolved a recipe's name.
    precision = cast("MixedPrecisionConfig | None", config.mixed_precision)
    apply_last_sync(config, precision)
    outcome["phase"] = PHASE_OF_WORK[work]
    # Recording doubles the time of a step, and `rehearse` compares two records with the plan.
    recorded_steps = [1, job["steps"] + 1]
    if work == "resume":
        recorded_steps = []
    summary = pretrain(config, run_dir=folder / work, recorded_steps=recorded_steps)
    if work == "resume":
        outcome["resumed_loss"] = summary.train_loss
        return
    outcome["loss"], outcome["parameters"] = summary.train_loss, summary.parameters
    if os.environ["RANK"] == "0":
        last = Record.read(folder / work / RECORD_FILE)
        first = Record(gemms=summary.gemms, census=summary.census, step=1)
        outcome["records"] = _make_step_records(first, last)


def _make_step_records(first: Record, last: Record) -> list[StepRecord]:
    """Return the records of the first and the last audited step as plain data.

    If both are the same step, there is one record.
    """
    records: list[StepRecord] = []
    for record in {first.step: first, last.step: last}.values():
        gemms = list(map(dataclasses.asdict, record.gemms))
        census = list(map(dataclasses.asdict, record.census))
        records.append({"step": record.step, "gemms": gemms, "census": census})
    return records


def _build_checkpoint_section(work: Work, folder: str, steps: int) -> dict[str, Any]:
    """Return the checkpoint section for a rank's work. Only saving and resuming need one."""
    if work == "train_and_save":
        return {"save": folder, "save_interval": steps, "save_last": False}
    if work == "resume":
        return {"load": folder}
    return {}


def _build_sections(job: Job, launch: LaunchLayout, checkpoint: dict[str, Any]) -> Sections:
    """Return the sections of a launch, with its layout, its batch and its checkpoint section.

    The run takes one step more than the checkpoint has. The loss of that step is compared with the
    loss of the same step after a resume.
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
            # `rehearse` compares the record with the plan, and needs every rank to go on.
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
