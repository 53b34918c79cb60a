"""`collect_run_content`: the content of a report on a run folder of ours."""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.errors import RunConfigError
from bridge.plan.precision_plan import PrecisionPlan
from bridge.precision import strict_yaml
from bridge.precision.formats import FORMATS
from bridge.report.answer import Answer
from bridge.report.html.run_content import RunContent
from bridge.report.plan.plan_table import make_line
from bridge.runtime.audit.early_warnings import EARLY_WARNINGS, WarningInputs, find_early_warnings
from bridge.runtime.audit.gemm_formats import format_gemms
from bridge.runtime.audit.quantisation import select_last_step
from bridge.runtime.audit.record import CensusRow, GemmRow
from bridge.runtime.audit.run_folder import RunFolder

MIN_LOSS_FALL = 0.01
"""The least relative fall of the training loss that counts as a fall."""

SUMMARY_FIGURES = (
    "train_loss",
    "validation_loss",
    "unigram_entropy",
    "tokens_per_second",
    "parameters",
    "steps",
    "skipped_steps",
    "seconds",
)
"""Values of `summary.json` that a report shows."""
RECORD_KINDS = {"weights": "parameters"}
"""Kind of tensor in the memory report -> its name in a record, if they differ."""


def collect_run_content(
    run: RunFolder,
    *,
    plan: PrecisionPlan | None = None,
    predicted_bytes: dict[str, int] | None = None,
    base: dict[str, Any] | None = None,
    compared: Answer | None = None,
) -> RunContent:
    """Return the content of a report on a run.

    Args:
        plan: The precision plan of the run; None: it cannot be planned.
        predicted_bytes: Kind of tensor -> its predicted bytes; None: not known.
        base: The plain recipe of the run's mode, and the fields in which the run differs from it.
        compared: The result of the comparison with the other runs; None: it is not compared.
    """
    record, summary = run.record, run.summary or {}
    figures = {name: summary.get(name) for name in SUMMARY_FIGURES}
    figures["train_iters"] = run.config.get("train", {}).get("train_iters")
    ran, backend = "", ""
    gemms: Sequence[GemmRow] = ()
    mismatches: list[str] = []
    census: Sequence[CensusRow] = ()
    if record is not None:
        ran, backend = format_gemms(record.gemms), record.backend
        gemms, mismatches, census = record.gemms, list(record.audit), record.census
    report_command = shlex.join(["precision-bridge", "report", str(run.path)])
    warnings = dict(find_early_warnings(WarningInputs.from_run_folder(run)))
    return RunContent(
        name=run.findings.get("precision") or summary.get("precision") or run.path.name,
        folder=str(run.path),
        figures=figures,
        compared=compared,
        base=_add_deciders(base, run),
        plan=make_plan_rows(plan),
        ran=ran,
        recorded_gemms=len(gemms),
        backend=backend,
        mismatches=mismatches,
        sync=_collect_changed_fields(run),
        findings=_collect_findings(run),
        silenced=_collect_silenced(run),
        warnings=warnings,
        train=run.read_metrics("train"),
        validation=run.read_metrics("validation"),
        heat=_collect_sqnr_cells(run),
        memory=make_memory_rows(census, predicted_bytes or {}),
        environment={
            "target": run.findings.get("target"),
            "megatron-core": run.sync.get("megatron_core"),
        },
        commands=[*_read_train_command(run), report_command],
        verdict=_collect_verdicts(run, warnings),
    )


def _collect_verdicts(run: RunFolder, warnings: Mapping[str, str]) -> list[Answer]:
    """Return the summary of the report: end, audit, loss, findings and early warnings."""
    losses = [row["loss"] for row in run.read_metrics("train") if row["loss"] is not None]
    verdicts = [
        _describe_end(run),
        _describe_audit(run),
        describe_loss_fall(losses),
        _describe_findings(_collect_findings(run)),
    ]
    for name, sentence in warnings.items():
        verdicts.append(Answer(state="bad", sentence=f"{name}: {sentence}"))
    return verdicts


def _add_deciders(base: dict[str, Any] | None, run: RunFolder) -> dict[str, Any] | None:
    """Return the differences from a base recipe, each field with its decider in the sync."""
    if base is None:
        return None
    deciders: dict[str, str] = {}
    for row in run.sync.get("rows", ()):
        deciders.setdefault(row["field"], row["by"])
    fields = []
    for row in base["fields"]:
        fields.append({**row, "by": deciders.get(row["field"], "")})
    return {**base, "fields": fields}


def _collect_changed_fields(run: RunFolder) -> list[dict[str, Any]]:
    """Return the rows of the sync that wrote or kept another value."""
    rows = run.sync.get("rows", ())
    return [row for row in rows if row["verdict"] not in ("agree", "absent")]


def _collect_silenced(run: RunFolder) -> list[dict[str, Any]]:
    """Return the silenced findings of the check, and the silenced early warnings."""
    rows = list(run.findings.get("silenced", ()))
    reasons = run.config.get("silence") or {}
    for name, reason in reasons.items():
        if name in EARLY_WARNINGS:
            rows.append({"id": name, "silenced": reason})
    return rows


def _collect_findings(run: RunFolder) -> list[dict[str, Any]]:
    """Return the findings of the check and of the sync, without repetitions.

    A finding of both has the text from the check, and its position in the list from the sync.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for finding in (*run.findings.get("findings", ()), *run.sync.get("findings", ())):
        key = finding["id"], finding["path"]
        first = rows.pop(key, finding)
        rows[key] = first
    return list(rows.values())


def _describe_findings(findings: Sequence[dict[str, Any]]) -> Answer:
    """Return the number of findings of the check and the sync as a sentence."""
    if not findings:
        return Answer(state="good", sentence="No findings of check and sync.")
    count = _format_count(len(findings), "finding")
    return Answer(state="unknown", sentence=f"{count} of check and sync.")


def _describe_end(run: RunFolder) -> Answer:
    """Return how the run ended, or that it has not ended."""
    summary = run.summary
    if not summary:
        return Answer(state="unknown", sentence="The run has not come to its end.")
    if summary.get("failure"):
        return Answer(state="bad", sentence=str(summary["failure"]))
    if run.stopped:
        return Answer(state="unknown", sentence=f"The run was {run.stopped}.")
    skipped = summary["skipped_steps"]
    sentence = f"Ended after step {summary['iteration']}, {skipped} of them skipped."
    return Answer(state="good", sentence=sentence)


def _describe_audit(run: RunFolder) -> Answer:
    """Return whether the record of the run agrees with its plan."""
    record = run.record
    if record is None:
        return Answer(state="unknown", sentence="No record was held against the plan.")
    if record.audit:
        points = _format_count(len(record.audit), "point")
        return Answer(state="bad", sentence=f"The run was not what the plan says, in {points}.")
    sentence = f"Plan = record: all {len(record.gemms)} GEMMs ran in the planned formats."
    return Answer(state="good", sentence=sentence)


def _format_count(count: int, noun: str) -> str:
    """Return "1 finding" or "2 findings"."""
    if count == 1:
        return f"{count} {noun}"
    return f"{count} {noun}s"


def describe_loss_fall(losses: list[float]) -> Answer:
    """Return whether a training loss fell, by its first and its last value."""
    if len(losses) < 2:
        return Answer(state="unknown", sentence="Too few losses to say whether it learned.")
    fall = 1 - losses[-1] / losses[0]
    if fall < MIN_LOSS_FALL:
        sentence = f"The training loss did not fall: {losses[0]:.4f} to {losses[-1]:.4f}."
        return Answer(state="bad", sentence=sentence)
    sentence = f"The training loss fell from {losses[0]:.4f} to {losses[-1]:.4f}."
    return Answer(state="good", sentence=sentence)


def make_plan_rows(plan: PrecisionPlan | None) -> list[dict[str, Any]]:
    """Return the formats of each group of equal layers. Modules that compute nothing are left out.

    Args:
        plan: The plan; None: there are no rows.
    """
    if plan is None:
        return []
    rows: list[dict[str, Any]] = []
    for layers, modules in plan.folded():
        labels = [layer.label for layer in layers]
        names_of: dict[tuple[str, str, str], list[str]] = {}
        for module in modules:
            line = make_line(module)
            formats = (line["forward"], line["dgrad"], line["wgrad"])
            names_of.setdefault(formats, []).append(module.name)
        for (forward, dgrad, wgrad), names in names_of.items():
            if forward:
                rows.append(
                    {
                        "layers": labels,
                        "modules": names,
                        "forward": forward,
                        "dgrad": dgrad,
                        "wgrad": wgrad,
                    }
                )
    return rows


def _collect_sqnr_cells(run: RunFolder) -> list[dict[str, Any]]:
    """Return the last SQNR of each operand, layer and module, and its distance to a healthy SQNR.

    The distance is positive if the SQNR is below the healthy SQNR.
    """
    cells = []
    for row in select_last_step(run.quantisation):
        if math.isfinite(row.sqnr_db) and row.format in FORMATS:
            cells.append(
                {
                    "operand": row.operand,
                    "layer": row.layer,
                    "module": row.module.rpartition(".")[2],
                    "format": row.format,
                    "sqnr_db": row.sqnr_db,
                    "below_normal_db": FORMATS[row.format].healthy_db - row.sqnr_db,
                }
            )
    return cells


def make_memory_rows(
    census: Sequence[CensusRow], predicted: dict[str, int]
) -> list[dict[str, Any]]:
    """Return the recorded and the predicted bytes of each kind of tensor; None if not known."""
    recorded: dict[str, int] = {}
    dtypes: dict[str, dict[str, None]] = {}
    for tensors in census:
        recorded[tensors.kind] = recorded.get(tensors.kind, 0) + tensors.bytes
        dtypes.setdefault(tensors.kind, {})[tensors.dtype] = None
    expected: dict[str, int] = {}
    for name, size in predicted.items():
        kind = RECORD_KINDS.get(name, name)
        expected[kind] = expected.get(kind, 0) + size
    rows = []
    for kind in {**recorded, **expected}:
        row = {
            "kind": kind,
            "dtype": ", ".join(dtypes.get(kind, ())),
            "bytes": recorded.get(kind),
            "predicted": expected.get(kind) or None,
        }
        if row["bytes"] or row["predicted"]:
            rows.append(row)
    return rows


def _read_train_command(run: RunFolder) -> list[str]:
    """Return the training command that Hydra recorded; empty if there is no record of it."""
    overrides = run.path / ".hydra" / "overrides.yaml"
    if not overrides.is_file():
        return []
    documents = strict_yaml.load_documents(
        run.read_text(overrides), str(overrides), error=RunConfigError
    )
    command = ["python", "scripts/train.py"]
    if documents:
        command.extend(map(str, documents[0]))
    return [shlex.join(command)]
