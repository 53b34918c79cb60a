"""The content of a report as plain data, which the page shows and which is written as JSON."""

import math
import shlex
from collections.abc import Sequence
from typing import Any

from bridge.errors import RunConfigError
from bridge.plan.precision_plan import PrecisionPlan
from bridge.precision import strict_yaml
from bridge.precision.formats import FORMATS
from bridge.report.plan_table import make_line
from bridge.runtime.audit.early_warnings import EARLY_WARNINGS, WarningInputs, find_early_warnings
from bridge.runtime.audit.plan_comparison import format_gemms
from bridge.runtime.audit.quantisation import select_last_step
from bridge.runtime.audit.record import CensusRow, GemmRow
from bridge.runtime.audit.run_folder import RunFolder

MIN_LOSS_FALL = 0.01
"""Relative fall of the training loss below which it has not moved."""

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
"""Of the summary."""
RECORD_KINDS = {"weights": "parameters"}
"""Kind of tensor in the memory plan -> its name in a record, where they differ."""


def collect_run_content(
    run: RunFolder,
    *,
    plan: PrecisionPlan | None = None,
    predicted_bytes: dict[str, int] | None = None,
    base: dict[str, Any] | None = None,
    compared: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return everything that a report says about a run.

    `compared` is what a comparison with its twins says.
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
    content: dict[str, Any] = {
        "name": run.findings.get("precision") or summary.get("precision") or run.path.name,
        "folder": str(run.path),
        "source": None,
        "figures": figures,
        "compared": compared,
        "base": _add_deciders(base, run),
        "plan": make_plan_rows(plan),
        "ran": ran,
        "recorded_gemms": len(gemms),
        "backend": backend,
        "mismatches": mismatches,
        "sync": _collect_changed_fields(run),
        "findings": _collect_findings(run),
        "silenced": _collect_silenced(run),
        "warnings": dict(find_early_warnings(WarningInputs.from_run_folder(run))),
        "train": run.metrics("train"),
        "validation": run.metrics("validation"),
        "heat": _collect_sqnr_cells(run),
        "memory": make_memory_rows(census, predicted_bytes or {}),
        "environment": {
            "target": run.findings.get("target"),
            "megatron-core": run.sync.get("megatron_core"),
        },
        "commands": [*_read_train_command(run), report_command],
    }
    return {**content, "verdict": _collect_verdicts(content, summary, run)}


def _add_deciders(base: dict[str, Any] | None, run: RunFolder) -> dict[str, Any] | None:
    """Return the differences from a base, each field with who set it in the sync."""
    if base is None:
        return None
    by: dict[str, str] = {}
    for row in run.sync.get("rows", ()):
        by.setdefault(row["field"], row["by"])
    fields = []
    for row in base["fields"]:
        fields.append({**row, "by": by.get(row["field"], "")})
    return {**base, "fields": fields}


def _collect_changed_fields(run: RunFolder) -> list[dict[str, Any]]:
    """Return the rows of the sync, without fields that agree or are absent."""
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
    """Return the findings of the check, and those of the sync that it did not have."""
    of_check, of_sync = run.findings.get("findings", ()), run.sync.get("findings", ())
    # The last of equal findings stands last, and the first of them is shown.
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for finding in reversed([*of_check, *of_sync]):
        rows[finding["id"], finding["path"]] = finding
    return list(rows.values())[::-1]


def _collect_verdicts(
    content: dict[str, Any], summary: dict[str, Any], run: RunFolder
) -> list[dict[str, str]]:
    losses = [record["loss"] for record in content["train"] if record["loss"] is not None]
    count = len(content["findings"])
    of_findings = "good", "No findings of check and sync."
    if count:
        of_findings = "unknown", f"{_format_count(count, 'finding')} of check and sync."
    verdicts = [
        _describe_end(summary, run),
        _describe_audit(content, run),
        describe_loss_fall(losses),
        of_findings,
    ]
    for name, sentence in content["warnings"].items():
        verdicts.append(("bad", f"{name}: {sentence}"))
    return [{"state": state, "sentence": sentence} for state, sentence in verdicts]


def _describe_end(summary: dict[str, Any], run: RunFolder) -> tuple[str, str]:
    if not summary:
        return "unknown", "The run has not come to its end."
    if summary.get("failure"):
        return "bad", str(summary["failure"])
    if run.stopped:
        return "unknown", f"The run was {run.stopped}."
    skipped = summary["skipped_steps"]
    return "good", f"Ended after step {summary['iteration']}, {skipped} of them skipped."


def _describe_audit(content: dict[str, Any], run: RunFolder) -> tuple[str, str]:
    if run.record is None:
        return "unknown", "No record was held against the plan."
    count = len(content["mismatches"])
    if count:
        return "bad", f"The run was not what the plan says, in {_format_count(count, 'point')}."
    gemms = content["recorded_gemms"]
    return "good", f"Plan = record: all {gemms} GEMMs ran in the planned formats."


def _format_count(count: int, noun: str) -> str:
    if count == 1:
        return f"{count} {noun}"
    return f"{count} {noun}s"


def describe_loss_fall(losses: list[float]) -> tuple[str, str]:
    """Return the state and the sentence about the fall of a training loss."""
    if len(losses) < 2:
        return "unknown", "Too few losses to say whether it learned."
    fall = 1 - losses[-1] / losses[0]
    if fall < MIN_LOSS_FALL:
        return "bad", f"The training loss did not fall: {losses[0]:.4f} to {losses[-1]:.4f}."
    return "good", f"The training loss fell from {losses[0]:.4f} to {losses[-1]:.4f}."


def make_plan_rows(plan: PrecisionPlan | None) -> list[dict[str, Any]]:
    """Return the formats of each group of equal layers.

    Modules that compute nothing are left out.
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
                columns = {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}
                rows.append({"layers": labels, "modules": names, **columns})
    return rows


def _collect_sqnr_cells(run: RunFolder) -> list[dict[str, Any]]:
    """Return the last SQNR per operand, layer and module, and how far it is below its format's."""
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
    """Return the recorded and the predicted bytes of each kind of tensor; None where unknown."""
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
    """Return the command that Hydra recorded; none where there is no record of it."""
    overrides = run.path / ".hydra" / "overrides.yaml"
    if not overrides.is_file():
        return []
    documents = strict_yaml.load_documents(
        run.text_of(overrides), str(overrides), error=RunConfigError
    )
    words = ["python", "scripts/train.py"]
    if documents:
        words.extend(map(str, documents[0]))
    return [shlex.join(words)]
