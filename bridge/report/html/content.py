"""The content of a report as plain data: what the page shows, and what stands as JSON beside it."""

import math
import shlex
from collections.abc import Sequence
from typing import Any

from bridge.errors import RunConfigError
from bridge.plan.precision_plan import PrecisionPlan
from bridge.precision import strict_yaml
from bridge.precision.formats import FORMATS
from bridge.precision.grouping import grouped
from bridge.report.plan_table import line_of
from bridge.runtime.audit.compare import format_gemms
from bridge.runtime.audit.early_warnings import WARNINGS, Signs, early_warnings
from bridge.runtime.audit.quantisation import last_measured
from bridge.runtime.audit.record import CensusRow
from bridge.runtime.audit.run_folder import RunFolder

FLAT = 0.01
"""Relative fall of the training loss below which it has not moved."""

FIGURES = (
    *(
        "train_loss",
        "validation_loss",
        "unigram_entropy",
        "tokens_per_second",
        "parameters",
        "steps",
    ),
    *("skipped_steps", "seconds"),
)
"""Of the summary."""
KINDS = {"weights": "parameters"}
"""Kind of tensor in the memory plan -> its name in a record, where they differ."""


def run_content(
    run: RunFolder,
    *,
    plan: PrecisionPlan | None = None,
    predicted_bytes: dict[str, int] | None = None,
    base: dict[str, Any] | None = None,
    compared: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return everything that a report says about a run; `compared` is what a comparison with its twins says."""
    record, summary = run.record, run.summary or {}
    reasons = run.config.get("silence") or {}
    silenced = [{"id": name, "silenced": why} for name, why in reasons.items() if name in WARNINGS]
    if base is not None:
        by = {row["field"]: row["by"] for row in reversed(run.sync.get("rows", ()))}
        base = {
            **base,
            "fields": [{**row, "by": by.get(row["field"], "")} for row in base["fields"]],
        }
    content: dict[str, Any] = {
        "name": run.findings.get("precision") or summary.get("precision") or run.path.name,
        "folder": str(run.path),
        "figures": {name: summary.get(name) for name in FIGURES}
        | {"train_iters": run.config.get("train", {}).get("train_iters")},
        "compared": compared,
        "base": base,
        "plan": [] if plan is None else _plan_rows(plan),
        "ran": format_gemms(record.gemms) if record is not None else "",
        "recorded_gemms": len(record.gemms) if record is not None else 0,
        "backend": record.backend if record is not None else "",
        "mismatches": list(record.audit) if record is not None else [],
        "sync": [
            row for row in run.sync.get("rows", ()) if row["verdict"] not in ("agree", "absent")
        ],
        "findings": _findings(run),
        "silenced": [*run.findings.get("silenced", ()), *silenced],
        "warnings": dict(early_warnings(Signs.of(run))),
        "train": run.metrics("train"),
        "validation": run.metrics("validation"),
        "heat": _heat(run),
        "memory": _memory(record.census if record is not None else (), predicted_bytes or {}),
        "environment": {
            "target": run.findings.get("target"),
            "megatron-core": run.sync.get("megatron_core"),
        },
        "commands": [
            *_train_command(run),
            shlex.join(["precision-bridge", "report", str(run.path)]),
        ],
    }
    return {**content, "verdict": _verdict(content, summary, run)}


def _findings(run: RunFolder) -> list[dict[str, Any]]:
    """Return the findings of the check, and those of the sync that it did not have."""
    found = [*run.findings.get("findings", ()), *run.sync.get("findings", ())]
    return list({(one["id"], one["path"]): one for one in reversed(found)}.values())[::-1]


def _verdict(
    content: dict[str, Any], summary: dict[str, Any], run: RunFolder
) -> list[dict[str, str]]:
    found, count = len(content["findings"]), len(content["mismatches"])
    if not summary:
        end = "unknown", "The run has not come to its end."
    elif summary.get("failure"):
        end = "bad", str(summary["failure"])
    elif run.stopped:
        end = "unknown", f"The run was {run.stopped}."
    else:
        end = (
            "good",
            f"Ended after step {summary['iteration']}, {summary['skipped_steps']} of them skipped.",
        )
    audit = (
        "good",
        f"Plan = record: all {content['recorded_gemms']} GEMMs ran in the planned formats.",
    )
    if run.record is None:
        audit = "unknown", "No record was held against the plan."
    elif count:
        audit = "bad", f"The run was not what the plan says, in {count} point{'s' * (count != 1)}."
    answers = [
        end,
        audit,
        _moved([one["loss"] for one in content["train"] if one["loss"] is not None]),
        (
            "unknown" if found else "good",
            f"{found or 'No'} finding{'s' * (found != 1)} of check and sync.",
        ),
        *(("bad", f"{name}: {sentence}") for name, sentence in content["warnings"].items()),
    ]
    return [{"state": state, "sentence": sentence} for state, sentence in answers]


def _moved(losses: list[float]) -> tuple[str, str]:
    if len(losses) < 2:
        return "unknown", "Too few losses to say whether it learned."
    fall = 1 - losses[-1] / losses[0]
    if fall < FLAT:
        return "bad", f"The training loss did not fall: {losses[0]:.4f} to {losses[-1]:.4f}."
    return "good", f"The training loss fell from {losses[0]:.4f} to {losses[-1]:.4f}."


def _plan_rows(plan: PrecisionPlan) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for layers, modules in plan.folded():
        lines = ((module.name, line_of(module)) for module in modules)
        by_formats = grouped(
            ((line["forward"], line["dgrad"], line["wgrad"]), name) for name, line in lines
        )
        for (forward, dgrad, wgrad), names in by_formats.items():
            columns = {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}
            rows.append({"layers": [layer.label for layer in layers], "modules": names, **columns})
    return [row for row in rows if row["forward"]]


def _heat(run: RunFolder) -> list[dict[str, Any]]:
    """Return the last SQNR per operand, layer and module, and how far it is below what the format should have."""
    found = []
    for row in last_measured(run.quantisation):
        if math.isfinite(row.sqnr_db) and row.format in FORMATS:
            place = {
                "operand": row.operand,
                "layer": row.layer,
                "module": row.module.rpartition(".")[2],
            }
            below = FORMATS[row.format].healthy_db - row.sqnr_db
            found.append(
                {**place, "format": row.format, "sqnr_db": row.sqnr_db, "below_normal_db": below}
            )
    return found


def _memory(census: Sequence[CensusRow], predicted: dict[str, int]) -> list[dict[str, Any]]:
    held = grouped((row.kind, row) for row in census)
    expected = grouped((KINDS.get(name, name), size) for name, size in predicted.items())
    rows = []
    for kind in {**held, **expected}:
        own = held.get(kind, [])
        size = sum(row.bytes for row in own) if own else None
        formats = ", ".join(dict.fromkeys(row.dtype for row in own))
        rows.append(
            {
                "kind": kind,
                "dtype": formats,
                "bytes": size,
                "predicted": sum(expected.get(kind, ())) or None,
            }
        )
    return [row for row in rows if row["bytes"] or row["predicted"]]


def _train_command(run: RunFolder) -> list[str]:
    """Return the command that Hydra recorded; none where there is no record of it."""
    overrides = run.path / ".hydra" / "overrides.yaml"
    if not overrides.is_file():
        return []
    words = strict_yaml.load_all(run.text_of(overrides), str(overrides), error=RunConfigError)
    return [shlex.join(["python", "scripts/train.py", *map(str, words[0] if words else ())])]
