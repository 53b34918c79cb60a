"""`rehearse`: a shrunk run, launched in a few processes for each part of its layout, and what came of it."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from bridge.errors import BackendUnavailableError, Finding
from bridge.plan.precision_plan import PrecisionPlan, precision_plan
from bridge.precision.schemes import GEMMS
from bridge.precision.statements import recipe_name
from bridge.preflight import te_cpu
from bridge.preflight.run import Run
from bridge.read.keys import MADE_BY
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.nearest import nearest_label
from bridge.rehearse.layout import Round
from bridge.rehearse.release import Release, release_for
from bridge.rehearse.sections import SmallRun
from bridge.rehearse.shrink import STEPS, shrink
from bridge.rules.rulebook import BY_ID
from bridge.runtime.audit.compare import MULTIPLIES, compare
from bridge.runtime.audit.record import CensusRow, GemmRow, Record
from bridge.target.fields import DEFAULTS
from bridge.target.target import Target
from bridge.target.versions import TITLES, parse_version

ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Variables that Megatron compares with `attention_backend`."""
STATELESS = "PB436"
"""The rule of the fault by which megatron-core before 0.19 does not save grouped experts."""
CORRECTED = f"{STATELESS}, which the target does not have: grouped experts were saved here as its releases save them."


@dataclass(frozen=True, kw_only=True)
class Launched:
    """One launch."""

    round: Round
    seconds: float
    planned: int | None = None
    """GEMMs of the plan; None where no step was recorded."""
    equal: int | None = None
    """Those of them that ran as planned in every recorded step."""
    loss: float | None = None
    resumed_loss: float | None = None
    parameters: int | None = None
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The answer."""

    label: str
    target: str
    backend: str
    versions: Mapping[str, str]
    """Product -> the release that ran: mcore, and te where Transformer Engine did."""
    kept: str
    """What the rehearsal has as the run has it, as a clause."""
    layers: int
    """Layers of the run."""
    small: SmallRun
    launches: tuple[Launched, ...]
    left_out: tuple[Finding, ...] = ()
    """Settings that the rehearsal has not, with the reason."""
    unknown: tuple[str, ...] = ()
    """What the rehearsal cannot know, as sentences."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Everything that went wrong, each once."""
        return tuple(
            {
                (one.path, one.rule): one for launch in self.launches for one in launch.findings
            }.values()
        )

    @property
    def verdict(self) -> str:
        """The outcome as one sentence."""
        errors = sum(finding.severity == "error" for finding in self.findings)
        if errors:
            return f"{errors} error{'s' if errors > 1 else ''}"
        planned = sum(launch.planned or 0 for launch in self.launches)
        left = f", {len(self.left_out)} left out" if self.left_out else ""
        launches = "1 launch" if len(self.launches) == 1 else f"{len(self.launches)} launches"
        return f"plan = record in all {planned} GEMMs of {launches}{left}"

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 2 with errors, 1 where something was left out and that counts, else 0."""
        if any(finding.severity == "error" for finding in self.findings):
            return 2
        return 1 if strict and (self.left_out or self.findings) else 0


def rehearse(
    run: Run, *, backend: str = te_cpu.BACKEND, processes: int = 4, max_layers: int = 8
) -> Rehearsal:
    """Shrink a run and launch it on a backend for CPUs.

    `processes` is the most of one launch, `max_layers` as for `shrink`. RunConfigError: no such model can be built, or
    planned. BackendUnavailableError: the process that imports Megatron ended without an answer.
    """
    run.prediction.refuse_unplanned()
    target = run.prediction.target
    if not run.states_target or run.reading.is_release_installed:
        target = replace(target, mcore=None)  # nothing but this machine has a release
    release = release_for(target.mcore)
    small = shrink(
        run.sections,
        run.precision,
        target=target,
        here=release.version,
        processes=processes,
        max_layers=max_layers,
    )
    answer = _answer(run, small, backend, release)
    versions = {
        name: version for name, version in answer["versions"].items() if version is not None
    }
    return Rehearsal(
        label=nearest_label(run.precision)
        if run.precision is not None
        else "the configs' own precision",
        target=_declared(run),
        backend=backend,
        versions=versions,
        kept=_kept(run, small),
        layers=small.shape.num_layers,
        small=small,
        launches=tuple(
            _launched(small, launch, release, run.reading.environment)
            for launch in answer["launches"]
        ),
        left_out=(
            *small.left_out,
            *(Finding(**one, remedy="", severity="warning") for one in answer["left_out"]),
        ),
        unknown=_unknown(target, versions, small, answer),
    )


def _declared(run: Run) -> str:
    """Return the target as it was declared, without the installed release, which is written into that of a file."""
    declared = str(run.sections.get("target") or "")
    if run.reading.is_release_installed:
        declared = declared.removesuffix(f"mcore{run.reading.release}").rstrip(",")
    return declared or "no declared target"


def _kept(run: Run, small: SmallRun) -> str:
    changed = {change.field for change in small.changes}
    counts = {
        name: sum(
            f"{name}.{key}" not in changed and value not in (None, DEFAULTS[name].get(key))
            for key, value in small.sections[name].items()
        )
        for name in ("model", "optimizer", "ddp")
    }
    fields = f"all {len(small.precision or {})} fields of " if run.precision is not None else ""
    return f"{fields}the precision, and {', '.join(f'{count} of {name}' for name, count in counts.items())}"


def _unknown(
    target: Target, versions: Mapping[str, str], small: SmallRun, answer: dict[str, Any]
) -> tuple[str, ...]:
    found = [
        "CUDA kernels, cuBLAS's sums, fused attention, overlapped communication, memory and speed: none of them runs.",
        "Convergence: a few steps of a small model say nothing of it.",
    ]
    for name, theirs in (("mcore", target.mcore), ("te", target.te)):
        ours = versions.get(name)
        if (
            theirs is not None
            and ours is not None
            and theirs.release[:2] != parse_version(ours).release[:2]
        ):
            found.append(f"{TITLES[name]} {theirs}, which the target declares: {ours} ran here.")
    found += small.dropped
    if _saves_without_state(target) and small.sections["model"].get("moe_grouped_gemm"):
        found.append(CORRECTED)
    fails = any(
        "error" in outcome for launch in answer["launches"] for outcome in launch["outcomes"]
    )
    if fails and answer["left_out"]:
        found.append("Whether the run has the same error with the settings that were left out.")
    return tuple(found)


def _saves_without_state(target: Target) -> bool:
    """Return whether the target is known to save grouped experts that have no extra state."""
    return any(
        one.holds(getattr(target, one.product)) is False for one in BY_ID[STATELESS].versions
    )


def _answer(run: Run, small: SmallRun, backend: str, release: Release) -> dict[str, Any]:
    made_by = (
        {MADE_BY: recipe_name(run.precision)}
        if run.precision is not None and recipe_name(run.precision)
        else {}
    )
    precision = None if small.precision is None else {**small.precision, **made_by}
    keys = {
        "mixed_precision": precision,
        "target": run.sections.get("target"),
        "precision_backend": backend,
    }
    chosen = any(change.field == "model.attention_backend" for change in small.changes)
    own = {
        name: value for name, value in run.reading.environment.items() if name.startswith("NVTE_")
    }
    variables = {name: value for name, value in own.items() if not (chosen and name in ATTENTION)}
    plan = {
        "sections": {**small.sections, **keys},
        "rounds": [asdict(one) for one in small.rounds],
        "steps": STEPS,
        "variables": variables,
        "saves_without_state": _saves_without_state(run.prediction.target),
    }
    with tempfile.TemporaryDirectory(prefix="precision-bridge-rehearse-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(plan, default=str), encoding="utf-8")
        done = subprocess.run(  # noqa: S603 our own module
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "bridge.rehearse.worker",
                str(folder / "plan.json"),
            ],
            capture_output=True,
            text=True,
            check=False,
            # Threads of a region do not outlive a fork; nothing is compiled, and Dynamo is half of the imports.
            env={
                **os.environ,
                **variables,
                **release.environment(),
                "OMP_NUM_THREADS": "1",
                "TORCHDYNAMO_DISABLE": "1",
            },
        )
        if done.returncode:
            last = next(
                (line for line in reversed(done.stderr.splitlines()) if line.strip()),
                "nothing was printed",
            )
            raise BackendUnavailableError(
                f"rehearse: the process that imports Megatron ended without an answer: {last}"
            )
        answer: dict[str, Any] = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
        if "refused" in answer:
            raise BackendUnavailableError(answer["refused"])
        return answer


def _launched(
    small: SmallRun, launch: dict[str, Any], release: Release, environment: Mapping[str, str]
) -> Launched:
    one = Round(**{**launch["round"], "kinds": tuple(launch["round"]["kinds"])})
    first = launch["outcomes"][0]
    findings = _errors(launch["outcomes"])
    planned = equal = None
    if "records" in first:
        plan = _plan(small, one, release, environment)
        modules = [
            module for layer in plan.layers for module in layer.modules if module.kind in MULTIPLIES
        ]
        planned = sum(row.item in GEMMS for module in modules for row in module.rows)
        different, found = _compared(plan, first["records"])
        equal = planned - different
        findings += found
        if first.get("resumed_loss", first["loss"]) != first["loss"]:
            rule = f"the step after a resume has the loss of the same step without a break, {first['loss']:.6f}"
            resumed = f"{first['resumed_loss']:.6f}"
            findings.append(
                Finding(path="checkpoint", rule=rule, value=resumed, remedy="", severity="warning")
            )
    return Launched(
        round=one,
        seconds=launch["seconds"],
        planned=planned,
        equal=equal,
        loss=first.get("loss"),
        resumed_loss=first.get("resumed_loss"),
        parameters=first.get("parameters"),
        findings=tuple(findings),
    )


def _compared(plan: PrecisionPlan, records: list[dict[str, Any]]) -> tuple[int, list[Finding]]:
    """Return how many planned GEMMs ran otherwise in some recorded step, and the findings."""
    different: set[tuple[str, str, str]] = set()
    found: dict[str, Finding] = {}
    for record in records:
        gemms = tuple(GemmRow(**row) for row in record["gemms"])
        census = tuple(CensusRow(**row) for row in record["census"])
        for one in compare(plan, Record(gemms=gemms, census=census)):
            if one.column != "unplanned":
                different |= {*product(one.layers, one.modules, one.gemms)}
            found.setdefault(
                str(one), Finding(path=f"step {record['step']}", rule=str(one), remedy="")
            )
    return len(different), list(found.values())


def _plan(
    small: SmallRun, one: Round, release: Release, environment: Mapping[str, str]
) -> PrecisionPlan:
    precision = (
        MixedPrecisionConfig.from_dict(small.precision) if small.precision is not None else None
    )
    model = {**small.sections["model"], **one.fields()}
    return precision_plan(
        precision,
        model,
        optimizer=small.sections["optimizer"],
        ddp=small.sections["ddp"],
        mcore=release.version,
        environment=environment,
    )


def _errors(outcomes: list[dict[str, Any]]) -> list[Finding]:
    """Return the errors of the rank that failed first; others lose the connection to it, or are ended."""
    failed = sorted(
        (one for one in outcomes if "error" in one),
        key=lambda outcome: float(outcome["error"]["at"]),
    )
    if failed:
        error, phase = failed[0]["error"], failed[0]["phase"]
        if "findings" in error:
            return [Finding(**finding) for finding in error["findings"]]
        where = f", {error['where']}" if error["where"] else ""
        rule = f"{error['type']} when {phase}{where}"
        return [
            Finding(
                path=", ".join(error["fields"]) or "run",
                rule=rule,
                value=error["message"],
                remedy="",
            )
        ]
    ended = sorted({outcome["ended"] for outcome in outcomes if "ended" in outcome})
    rule, remedy = "the ranks ended without an answer", "Rehearse with fewer processes."
    return [Finding(path="run", rule=rule, value=", ".join(ended), remedy=remedy)] if ended else []
