"""`rehearse`: a shrunk run, launched in a few processes for each part of its layout."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

from bridge.errors import BackendUnavailableError, Finding
from bridge.plan.precision_plan import PrecisionPlan, precision_plan
from bridge.precision.schemes import GEMMS
from bridge.precision.statements import get_recipe_name
from bridge.preflight import declared_gpu
from bridge.preflight.run import Run
from bridge.read.run_keys import RECIPE_NAME_KEY
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.nearest_recipe import format_nearest_label
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
"""Variables that Megatron compares with `attention_backend`."""
UNSAVED_EXPERTS_RULE = "PB436"
"""The rule about megatron-core before 0.19, which does not save grouped experts without extra state."""
SAVED_AS_IN_TARGET = (
    f"{UNSAVED_EXPERTS_RULE}, which the target does not have: "
    "grouped experts were saved here as its releases save them."
)


def rehearse(
    run: Run, *, backend: str = declared_gpu.TE_CPU_BACKEND, processes: int = 4, max_layers: int = 8
) -> Rehearsal:
    """Shrink a run and launch it on a backend for CPUs.

    Args:
        run: The run, at its full size.
        backend: The backend that stands for a GPU: te_cpu or emulated.
        processes: The most processes of a launch.
        max_layers: The most layers, as for `shrink`.

    Raises:
        RunConfigError: No such model can be built, or planned.
        BackendUnavailableError: The process that imports Megatron ended without an answer.
    """
    run.prediction.require_plan()
    target = run.prediction.target
    if not run.states_target or run.reading.is_release_installed:
        # The release is that of this machine; no target states one.
        target = replace(target, mcore=None)
    release = find_release(target.mcore)
    small = shrink(
        run.sections,
        run.precision,
        target=target,
        here=release.version,
        processes=processes,
        max_layers=max_layers,
    )
    answer = _run_job(run, small, backend, release)
    ran = answer["versions"].items()
    versions = {name: version for name, version in ran if version is not None}
    label = "the configs' own precision"
    if run.precision is not None:
        label = format_nearest_label(run.precision)
    left_out_here = [
        Finding(**entry, remedy="", severity="warning") for entry in answer["left_out"]
    ]
    planned = replace(small, sections=_drop_left_out(small.sections, left_out_here))
    launches = []
    for launch in answer["launches"]:
        launches.append(_evaluate_launch(planned, launch, release, run.reading.environment))
    return Rehearsal(
        label=label,
        target=_format_declared_target(run),
        backend=backend,
        versions=versions,
        kept=_format_kept_fields(run, small),
        layers=small.shape.num_layers,
        small=small,
        launches=tuple(launches),
        left_out=(*small.left_out, *left_out_here),
        unknown=_list_open_questions(target, versions, small, answer),
    )


def _drop_left_out(sections: Mapping[str, Any], left_out: Sequence[Finding]) -> dict[str, Any]:
    """Return sections without the settings that the rehearsal left out.

    The record is compared with the plan of what ran. An offloaded optimizer for example keeps FP32
    masters, and the precision-aware optimizer that runs in its place keeps remainders of 16 bits.
    """
    paths = {finding.path for finding in left_out}
    rest: dict[str, Any] = dict(sections)
    for name in ("model", "optimizer", "ddp"):
        rest[name] = {
            key: value for key, value in sections[name].items() if f"{name}.{key}" not in paths
        }
    return rest


def _format_declared_target(run: Run) -> str:
    """Return the target as it was declared, without the installed release.

    That release is written into the target of a file.
    """
    declared = str(run.sections.get("target") or "")
    if run.reading.is_release_installed:
        declared = declared.removesuffix(f"mcore{run.reading.release}").rstrip(",")
    return declared or "no declared target"


def _format_kept_fields(run: Run, small: SmallRun) -> str:
    """Return the numbers of fields that the rehearsal has as the run has them, as a clause."""
    changed = {change.field for change in small.changes}
    counts = []
    for name in ("model", "optimizer", "ddp"):
        count = 0
        for key, value in small.sections[name].items():
            is_set = value not in (None, OWNER_DEFAULTS[name].get(key))
            count += is_set and f"{name}.{key}" not in changed
        counts.append(f"{count} of {name}")
    precision = "the precision"
    if run.precision is not None:
        precision = f"all {len(small.precision or {})} fields of the precision"
    return f"{precision}, and {', '.join(counts)}"


def _list_open_questions(
    target: Target, versions: Mapping[str, str], small: SmallRun, answer: dict[str, Any]
) -> tuple[str, ...]:
    """Return the sentences about what a rehearsal cannot find out."""
    sentences = [
        "CUDA kernels, cuBLAS's sums, fused attention, overlapped communication, memory and speed: "
        "none of them runs.",
        "Convergence: a few steps of a small model say nothing of it.",
    ]
    for name, theirs in (("mcore", target.mcore), ("te", target.te)):
        ours = versions.get(name)
        if theirs is None or ours is None:
            continue
        if theirs.release[:2] != parse_version(ours).release[:2]:
            declared = f"{PRODUCT_TITLES[name]} {theirs}, which the target declares"
            sentences.append(f"{declared}: {ours} ran here.")
    sentences += small.dropped
    if _saves_without_state(target) and small.sections["model"].get("moe_grouped_gemm"):
        sentences.append(SAVED_AS_IN_TARGET)
    if answer["left_out"] and any(map(_has_error, answer["launches"])):
        sentences.append("Whether the run has the same error with the settings that were left out.")
    return tuple(sentences)


def _has_error(launch: dict[str, Any]) -> bool:
    """Return whether a rank of a launch ended with an error."""
    return any("error" in outcome for outcome in launch["outcomes"])


def _saves_without_state(target: Target) -> bool:
    """Return whether the target is known to save grouped experts that have no extra state."""
    rows = RULES_BY_ID[UNSAVED_EXPERTS_RULE].versions
    return any(row.holds(getattr(target, row.product)) is False for row in rows)


def _run_job(run: Run, small: SmallRun, backend: str, release: Release) -> dict[str, Any]:
    """Return the answer of the process that imports Megatron."""
    precision = small.precision
    if precision is not None and run.precision is not None and get_recipe_name(run.precision):
        precision = {**precision, RECIPE_NAME_KEY: get_recipe_name(run.precision)}
    sections = {
        **small.sections,
        "mixed_precision": precision,
        "target": run.sections.get("target"),
        "precision_backend": backend,
    }
    variables = _collect_te_variables(run, small)
    job = {
        "sections": sections,
        "rounds": list(map(asdict, small.rounds)),
        "steps": TRAIN_STEPS,
        "variables": variables,
        "saves_without_state": _saves_without_state(run.prediction.target),
    }
    # Threads of a region do not outlive a fork; nothing is compiled, and Dynamo is half of the
    # imports.
    environment = {
        **os.environ,
        **variables,
        **release.environment(),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    with tempfile.TemporaryDirectory(prefix="precision-bridge-rehearse-") as name:
        return _run_worker(job, Path(name), environment)


def _collect_te_variables(run: Run, small: SmallRun) -> dict[str, str]:
    """Return the run's variables of Transformer Engine.

    Those of attention are left out where the rehearsal has another attention.
    """
    environment = run.reading.environment
    variables = {name: value for name, value in environment.items() if name.startswith("NVTE_")}
    if any(change.field == "model.attention_backend" for change in small.changes):
        for name in ATTENTION_VARIABLES:
            variables.pop(name, None)
    return variables


def _run_worker(job: dict[str, Any], folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run the worker on a job, in a folder of its own, and return its answer."""
    file = folder / "job.json"
    file.write_text(json.dumps(job, default=str), encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-m", "bridge.rehearse.worker", str(file)]
    done = subprocess.run(  # noqa: S603 our own module
        command, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        last = "nothing was printed"
        for line in done.stderr.splitlines():
            if line.strip():
                last = line
        raise BackendUnavailableError(
            f"rehearse: the process that imports Megatron ended without an answer: {last}"
        )
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    if "refused" in answer:
        raise BackendUnavailableError(answer["refused"])
    return answer


def _evaluate_launch(
    small: SmallRun, launch: dict[str, Any], release: Release, environment: Mapping[str, str]
) -> LaunchResult:
    """Return the result of a launch: its outcomes, compared with the plan of the small run."""
    layout = launch["round"]
    small_round = LaunchLayout(**{**layout, "kinds": tuple(layout["kinds"])})
    first = launch["outcomes"][0]
    findings = _collect_errors(launch["outcomes"])
    planned = equal = None
    if "records" in first:
        plan = _plan_launch(small, small_round, release, environment)
        planned = _count_planned_gemms(plan)
        different, of_records = _compare_records(plan, first["records"])
        equal = planned - different
        findings += of_records
        findings += _check_resumed_loss(first)
    return LaunchResult(
        round=small_round,
        seconds=launch["seconds"],
        planned=planned,
        equal=equal,
        loss=first.get("loss"),
        resumed_loss=first.get("resumed_loss"),
        parameters=first.get("parameters"),
        findings=tuple(findings),
    )


def _count_planned_gemms(plan: PrecisionPlan) -> int:
    """Return the number of GEMMs that a plan has rows of."""
    count = 0
    for layer in plan.layers:
        for module in layer.modules:
            if module.kind in GEMM_MODULE_KINDS:
                count += sum(row.item in GEMMS for row in module.rows)
    return count


def _check_resumed_loss(outcome: dict[str, Any]) -> list[Finding]:
    """Return a finding where the step after a resume has another loss than without a break."""
    loss = outcome["loss"]
    resumed = outcome.get("resumed_loss", loss)
    if resumed == loss:
        return []
    same = "the step after a resume has the loss of the same step without a break"
    rule, value = f"{same}, {loss:.6f}", f"{resumed:.6f}"
    return [Finding(path="checkpoint", rule=rule, value=value, remedy="", severity="warning")]


def _compare_records(
    plan: PrecisionPlan, records: list[dict[str, Any]]
) -> tuple[int, list[Finding]]:
    """Return how many planned GEMMs ran otherwise in some recorded step, and the findings."""
    different: set[tuple[str, str, str]] = set()
    findings: dict[str, Finding] = {}
    for content in records:
        gemms = tuple(GemmRow(**row) for row in content["gemms"])
        census = tuple(CensusRow(**row) for row in content["census"])
        for mismatch in compare_with_plan(plan, Record(gemms=gemms, census=census)):
            if mismatch.column != "unplanned":
                different.update(product(mismatch.layers, mismatch.modules, mismatch.gemms))
            rule = str(mismatch)
            path = f"step {content['step']}"
            findings.setdefault(rule, Finding(path=path, rule=rule, remedy=""))
    return len(different), list(findings.values())


def _plan_launch(
    small: SmallRun, launch: LaunchLayout, release: Release, environment: Mapping[str, str]
) -> PrecisionPlan:
    """Return the plan of the small run in the layout of a launch."""
    precision = None
    if small.precision is not None:
        precision = MixedPrecisionConfig.from_dict(small.precision)
    model = {**small.sections["model"], **launch.fields()}
    return precision_plan(
        precision,
        model,
        optimizer=small.sections["optimizer"],
        ddp=small.sections["ddp"],
        mcore=release.version,
        environment=environment,
    )


def _collect_errors(outcomes: list[dict[str, Any]]) -> list[Finding]:
    """Return the errors of the rank that failed first; others lose its connection, or are ended."""
    failed = [outcome for outcome in outcomes if "error" in outcome]
    if failed:
        return _make_error_findings(min(failed, key=lambda outcome: float(outcome["error"]["at"])))
    ended = {outcome["ended"] for outcome in outcomes if "ended" in outcome}
    if not ended:
        return []
    rule, remedy = "the ranks ended without an answer", "Rehearse with fewer processes."
    return [Finding(path="run", rule=rule, value=", ".join(sorted(ended)), remedy=remedy)]


def _make_error_findings(outcome: dict[str, Any]) -> list[Finding]:
    """Return the findings of an error, or the error as one finding."""
    error = outcome["error"]
    if "findings" in error:
        return [Finding(**finding) for finding in error["findings"]]
    rule = f"{error['type']} when {outcome['phase']}"
    if error["where"]:
        rule = f"{rule}, {error['where']}"
    path = ", ".join(error["fields"]) or "run"
    return [Finding(path=path, rule=rule, value=error["message"], remedy="")]
