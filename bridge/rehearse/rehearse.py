"""`rehearse`: makes a run small, runs it in a worker process, and compares the steps with the plan.

The command `precision-bridge rehearse` calls it.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from bridge.errors import BackendUnavailableError, Finding
from bridge.plan.precision_plan import PrecisionPlan, precision_plan
from bridge.precision.schemes import GEMMS
from bridge.precision.statements import get_recipe_name
from bridge.preflight import gpu_for_te_cpu
from bridge.preflight.run import Run
from bridge.read.run_keys import RECIPE_NAME_KEY
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.nearest_recipe import format_nearest_label
from bridge.rehearse.job import Job, JobAnswer, LaunchOutcome, RankOutcome, StepRecord
from bridge.rehearse.layout import LaunchLayout
from bridge.rehearse.rehearsal import LaunchResult, Rehearsal
from bridge.rehearse.release import Release, find_release
from bridge.rehearse.shrink import TRAIN_STEPS, shrink
from bridge.rehearse.small_run import SmallRun
from bridge.rules.rulebook import RULES_BY_ID
from bridge.runtime.audit.plan_comparison import GEMM_MODULE_KINDS, compare_with_plan
from bridge.runtime.audit.record import CensusRow, GemmRow, Record
from bridge.target.fields import OWNER_DEFAULTS
from bridge.target.target import Target
from bridge.target.versions import PRODUCT_TITLES, parse_version

ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Environment variables that Megatron compares with `attention_backend`."""
PROCESS_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**30),
}
"""Environment variables of the rehearsal's processes.

Threads of a parallel region do not survive a fork, so there is one thread. Dynamo is off: nothing
is compiled, and importing it would double the time of the imports. glibc keeps freed memory:
otherwise each tensor of each step causes page faults.
"""
UNSAVED_EXPERTS_RULE = "PB436"
"""The rule about megatron-core before 0.19, which saves no grouped experts without extra state."""
SAVED_AS_IN_TARGET = (
    f"{UNSAVED_EXPERTS_RULE}, which the target does not have: "
    "grouped experts were saved here as its releases save them."
)


def rehearse(
    run: Run,
    *,
    backend: str = gpu_for_te_cpu.TE_CPU_BACKEND,
    processes: int = 4,
    max_layers: int = 8,
) -> Rehearsal:
    """Shrink a run, launch it on this machine's CPU, and compare its steps with its plan.

    Args:
        run: The run, at its full size.
        backend: The backend of the low-precision GEMMs: te_cpu or emulated.
        processes: The most processes of a launch.
        max_layers: The most layers, as for `shrink`.

    Raises:
        RunConfigError: The model cannot be built, or cannot be planned.
        BackendUnavailableError: The worker process ended without an answer, or refused the job.
    """
    run.prediction.require_plan()
    target = run.prediction.target
    if not run.states_target or run.reading.release.is_installed:
        # The target does not state a release. Reading the run has filled in the installed release.
        target = replace(target, mcore=None)
    release = find_release(target.mcore)
    small_run = shrink(
        run.sections,
        run.precision,
        target=target,
        local_version=release.version,
        processes=processes,
        max_layers=max_layers,
    )
    answer = _run_job(run, small_run, backend, release)
    releases = answer["versions"].items()
    versions = {name: version for name, version in releases if version is not None}
    left_out_by_worker = []
    for setting in answer["left_out"]:
        left_out_by_worker.append(Finding(**setting, remedy="", severity="warning"))
    return Rehearsal(
        label=_format_precision(run),
        target=_format_declared_target(run),
        backend=backend,
        versions=versions,
        kept=_format_kept_fields(run, small_run),
        layers=small_run.shape.num_layers,
        small_run=small_run,
        launches=_evaluate_launches(
            _remove_settings(small_run, left_out_by_worker),
            answer["launches"],
            release,
            run.reading.environment,
        ),
        left_out=(*small_run.left_out, *left_out_by_worker),
        unknown=_list_open_questions(target, versions, small_run, answer),
    )


def _remove_settings(small_run: SmallRun, left_out: Sequence[Finding]) -> SmallRun:
    """Return the small run without the settings that the worker left out.

    The record must be compared with the plan of the run without these settings. An offloaded
    optimizer, for example, keeps FP32 masters. The precision-aware optimizer that replaces it here
    keeps remainders of 16 bits.
    """
    paths = {finding.path for finding in left_out}
    sections = dict(small_run.sections)
    for name in ("model", "optimizer", "ddp"):
        fields = sections[name].items()
        sections[name] = {key: value for key, value in fields if f"{name}.{key}" not in paths}
    return replace(small_run, sections=sections)


def _format_precision(run: Run) -> str:
    """Return the name of the nearest recipe with the fields stated over it."""
    if run.precision is None:
        return "the configs' own precision"
    return format_nearest_label(run.precision)


def _format_declared_target(run: Run) -> str:
    """Return the target as it was declared.

    The reading of a file adds the installed release to the target. It is removed here.
    """
    declared = str(run.sections.get("target") or "")
    if run.reading.release.is_installed:
        declared = declared.removesuffix(f"mcore{run.reading.release.version}").rstrip(",")
    return declared or "no declared target"


def _format_kept_fields(run: Run, small_run: SmallRun) -> str:
    """Return how many fields of each section have the value of the full run."""
    changed = {change.field for change in small_run.changes}
    counts = []
    for name in ("model", "optimizer", "ddp"):
        count = 0
        for key, value in small_run.sections[name].items():
            is_set = value not in (None, OWNER_DEFAULTS[name].get(key))
            if is_set and f"{name}.{key}" not in changed:
                count += 1
        counts.append(f"{count} of {name}")
    precision = "the precision"
    if run.precision is not None:
        precision = f"all {len(small_run.precision or {})} fields of the precision"
    return f"{precision}, and {', '.join(counts)}"


def _list_open_questions(
    target: Target, versions: Mapping[str, str], small_run: SmallRun, answer: JobAnswer
) -> tuple[str, ...]:
    """Return sentences about properties of the run that the rehearsal does not show."""
    sentences = [
        "CUDA kernels, cuBLAS's sums, fused attention, overlapped communication, memory and speed: "
        "none of them runs.",
        "Convergence: a few steps of a small model say nothing of it.",
    ]
    for name, declared in (("mcore", target.mcore), ("te", target.te)):
        version = versions.get(name)
        if declared is None or version is None:
            continue
        if declared.release[:2] != parse_version(version).release[:2]:
            title = PRODUCT_TITLES[name]
            sentences.append(f"{title} {declared}, which the target declares: {version} ran here.")
    sentences += small_run.unshown_choices
    if _saves_without_state(target) and small_run.sections["model"].get("moe_grouped_gemm"):
        sentences.append(SAVED_AS_IN_TARGET)
    if answer["left_out"] and any(map(_has_error, answer["launches"])):
        sentences.append("Whether the run has the same error with the settings that were left out.")
    return tuple(sentences)


def _has_error(launch: LaunchOutcome) -> bool:
    """Return whether a rank of a launch ended with an error."""
    return any("error" in rank for rank in launch["ranks"])


def _saves_without_state(target: Target) -> bool:
    """Return whether the target is known to save grouped experts that have no extra state."""
    ranges = RULES_BY_ID[UNSAVED_EXPERTS_RULE].versions
    return any(versions.holds(getattr(target, versions.product)) is False for versions in ranges)


def _run_job(run: Run, small_run: SmallRun, backend: str, release: Release) -> JobAnswer:
    """Run the small run in a worker process, and return the worker's answer.

    Args:
        run: The full run.
        backend: The backend of the low-precision GEMMs.
        release: The release of Megatron Core that the worker imports.

    Raises:
        BackendUnavailableError: The worker ended without an answer, or refused the job.
    """
    precision = small_run.precision
    if precision is not None and run.precision is not None and get_recipe_name(run.precision):
        precision = {**precision, RECIPE_NAME_KEY: get_recipe_name(run.precision)}
    sections = {
        **small_run.sections,
        "mixed_precision": precision,
        "target": run.sections.get("target"),
        "precision_backend": backend,
    }
    variables = _collect_te_variables(run, small_run)
    job: Job = {
        "sections": sections,
        "launches": [launch.to_dict() for launch in small_run.launches],
        "steps": TRAIN_STEPS,
        "variables": variables,
        "saves_without_state": _saves_without_state(run.prediction.target),
    }
    environment = {**os.environ, **variables, **release.environment(), **PROCESS_VARIABLES}
    with tempfile.TemporaryDirectory(prefix="precision-bridge-rehearse-") as name:
        return _run_worker(job, Path(name), environment)


def _collect_te_variables(run: Run, small_run: SmallRun) -> dict[str, str]:
    """Return the environment variables of the run about Transformer Engine.

    The variables about attention are left out if the rehearsal has another attention backend.
    """
    environment = run.reading.environment
    variables = {name: value for name, value in environment.items() if name.startswith("NVTE_")}
    if any(change.field == "model.attention_backend" for change in small_run.changes):
        for name in ATTENTION_VARIABLES:
            variables.pop(name, None)
    return variables


def _run_worker(job: Job, folder: Path, environment: dict[str, str]) -> JobAnswer:
    """Run the worker on a job, with an empty folder for its files, and return its answer."""
    file = folder / "job.json"
    file.write_text(json.dumps(job, default=str), encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-m", "bridge.rehearse.worker", str(file)]
    done = subprocess.run(  # noqa: S603 our own module
        command, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        last_line = "nothing was printed"
        for line in done.stderr.splitlines():
            if line.strip():
                last_line = line
        raise BackendUnavailableError(
            f"rehearse: the process that imports Megatron ended without an answer: {last_line}"
        )
    content = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    if "refused" in content:
        raise BackendUnavailableError(content["refused"])
    answer: JobAnswer = content
    return answer


def _evaluate_launches(
    small_run: SmallRun,
    launches: Sequence[LaunchOutcome],
    release: Release,
    environment: Mapping[str, str],
) -> tuple[LaunchResult, ...]:
    """Return the result of each launch.

    Args:
        small_run: The small run, without the settings that the worker left out.
        release: The release of Megatron Core that ran.
        environment: Environment variables of the run.
    """
    results = []
    for launch in launches:
        layout = LaunchLayout.from_dict(launch["layout"])
        plan = None
        if "records" in launch["ranks"][0]:
            plan = _plan_launch(small_run, layout, release, environment)
        results.append(_evaluate_launch(launch, layout, plan))
    return tuple(results)


def _evaluate_launch(
    launch: LaunchOutcome, layout: LaunchLayout, plan: PrecisionPlan | None
) -> LaunchResult:
    """Return the result of a launch, whose records are compared with its plan.

    Args:
        plan: The plan of the launch. None: no step was recorded.
    """
    first = launch["ranks"][0]
    findings = _collect_errors(launch["ranks"])
    planned = equal = None
    if plan is not None:
        planned = _count_planned_gemms(plan)
        different, mismatches = _compare_records(plan, first["records"])
        equal = planned - different
        findings += mismatches
        findings += _check_resumed_loss(first)
    return LaunchResult(
        layout=layout,
        seconds=launch["seconds"],
        planned=planned,
        equal=equal,
        loss=first.get("loss"),
        resumed_loss=first.get("resumed_loss"),
        parameters=first.get("parameters"),
        findings=tuple(findings),
    )


def _count_planned_gemms(plan: PrecisionPlan) -> int:
    """Return the number of GEMMs in a plan."""
    count = 0
    for layer in plan.layers:
        for module in layer.modules:
            if module.kind in GEMM_MODULE_KINDS:
                count += sum(row.item in GEMMS for row in module.rows)
    return count


def _check_resumed_loss(outcome: RankOutcome) -> list[Finding]:
    """Return a finding if the step after a resume is missing, or has another loss than without a break."""
    loss = outcome["loss"]
    resumed = outcome.get("resumed_loss", loss)
    if resumed == loss:
        return []
    same = "the step after a resume has the loss of the same step without a break"
    rule, value = f"{same}, {_format_loss(loss)}", _format_loss(resumed)
    return [Finding(path="checkpoint", rule=rule, value=value, remedy="", severity="warning")]


def _format_loss(loss: float | None) -> str:
    """Return a loss for a message. A run that took no step has none."""
    if loss is None:
        return "no step"
    return f"{loss:.6f}"


def _compare_records(
    plan: PrecisionPlan, records: Sequence[StepRecord]
) -> tuple[int, list[Finding]]:
    """Return the number of planned GEMMs that ran differently in any step, and the findings.

    A difference that several steps have is one finding, with the first of these steps.
    """
    different: set[tuple[str, str, str]] = set()
    findings: dict[str, Finding] = {}
    for record in records:
        gemms = tuple(GemmRow(**row) for row in record["gemms"])
        census = tuple(CensusRow(**row) for row in record["census"])
        for mismatch in compare_with_plan(plan, Record(gemms=gemms, census=census)):
            if mismatch.column != "unplanned":
                different.update(product(mismatch.layers, mismatch.modules, mismatch.gemms))
            rule = str(mismatch)
            path = f"step {record['step']}"
            findings.setdefault(rule, Finding(path=path, rule=rule, remedy=""))
    return len(different), list(findings.values())


def _plan_launch(
    small_run: SmallRun, layout: LaunchLayout, release: Release, environment: Mapping[str, str]
) -> PrecisionPlan:
    """Return the plan of the small run in the layout of a launch."""
    precision = None
    if small_run.precision is not None:
        precision = MixedPrecisionConfig.from_dict(small_run.precision)
    model = {**small_run.sections["model"], **layout.fields()}
    return precision_plan(
        precision,
        model,
        optimizer=small_run.sections["optimizer"],
        ddp=small_run.sections["ddp"],
        mcore=release.version,
        environment=environment,
    )


def _collect_errors(outcomes: Sequence[RankOutcome]) -> list[Finding]:
    """Return the errors of the rank that failed first.

    Errors of other ranks are a consequence: they lose the connection to it, or are ended.
    """
    failed = [outcome for outcome in outcomes if "error" in outcome]
    if failed:
        return _make_error_findings(min(failed, key=lambda outcome: float(outcome["error"]["at"])))
    ended = {outcome["ended"] for outcome in outcomes if "ended" in outcome}
    if not ended:
        return []
    rule, remedy = "the ranks ended without an answer", "Rehearse with fewer processes."
    return [Finding(path="run", rule=rule, value=", ".join(sorted(ended)), remedy=remedy)]


def _make_error_findings(outcome: RankOutcome) -> list[Finding]:
    """Return the findings that an error has, or else the error as one finding."""
    error = outcome["error"]
    if "findings" in error:
        return [Finding(**finding) for finding in error["findings"]]
    rule = f"{error['type']} when {outcome['phase']}"
    if error["location"]:
        rule = f"{rule}, {error['location']}"
    path = ", ".join(error["fields"]) or "run"
    return [Finding(path=path, rule=rule, value=error["message"], remedy="")]
