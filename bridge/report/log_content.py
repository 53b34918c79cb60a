"""The log of another trainer's run: a view for a terminal, and the content of a report."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.plan.precision_plan import PrecisionPlan
from bridge.report.answer import Answer
from bridge.report.html.content import describe_loss_fall, make_memory_rows, make_plan_rows
from bridge.report.html.run_content import RunContent
from bridge.report.table import format_cell, make_facts_table
from bridge.report.watch import draw_bars
from bridge.runtime.audit.early_warnings import find_early_warnings
from bridge.runtime.audit.log_warning_inputs import make_log_warning_inputs
from bridge.runtime.audit.run_log import RunLog


def make_log_view(
    log: RunLog, *, silenced: Sequence[str] = (), precision: str = ""
) -> RenderableType:
    """Return the last metrics of a log, the names of missing metrics, and the early warnings.

    Args:
        silenced: Names of early warnings that are left out.
        precision: The precision of the run as a short text; empty: not known.
    """
    parts: list[RenderableType] = [
        make_facts_table(
            _list_facts(log), title=f"{precision or log.name}: {log.path}, {log.source}"
        )
    ]
    for name, sentence in find_early_warnings(make_log_warning_inputs(log, silenced=silenced)):
        parts.append(Text(f"{name}: {sentence}", style="yellow"))
    return Group(*parts)


def _list_facts(log: RunLog) -> list[tuple[str, str]]:
    """Return the state of a run from its log, as names with values."""
    step = str(log.last_step)
    if log.train_iters is not None:
        step = f"{log.last_step} of {log.train_iters}"
    losses = [record["loss"] for record in log.list_records()]
    last = log.train[-1]
    rows = [("step", step), ("loss", f"{format_cell(losses[-1])}  {draw_bars(losses)}")]
    figures = (
        ("loss scale", last.loss_scale, "g"),
        ("gradient norm", last.grad_norm, ".4f"),
        ("learning rate", last.learning_rate, ".4g"),
        ("tokens/s", last.tokens_per_second, ",.0f"),
        ("TFLOP/s per GPU", last.tflops_per_gpu, ",.1f"),
        ("seconds per step", last.seconds_per_step, ".3g"),
        ("skipped steps", log.skipped_steps, "d"),
    )
    for name, value, form in figures:
        if value is not None:
            rows.append((name, format(value, form)))
    if log.validation:
        validated, loss = log.validation[-1]
        rows.append(("validation loss", f"{format_cell(loss)}, step {validated}"))
    if log.has_ended:
        rows.append(("ended", "yes"))
    for sentence in _describe_gaps(log):
        rows.append(("note", sentence))
    return rows


def collect_log_content(
    log: RunLog,
    *,
    name: str,
    plan: PrecisionPlan | None = None,
    predicted_bytes: dict[str, int] | None = None,
    compared: Answer | None = None,
) -> RunContent:
    """Return the content of a report on the log of a run.

    Args:
        name: The name of the run in the report.
        plan: The precision plan of the run; None: it cannot be planned.
        predicted_bytes: Kind of tensor -> its predicted bytes; None: not known.
        compared: The result of the comparison with the other logs; None: it is not compared.
    """
    records = log.list_records()
    warnings = dict(find_early_warnings(make_log_warning_inputs(log)))
    commands = [shlex.join(["precision-bridge", "report", str(log.path)])]
    if log.described_by is not None:
        commands.insert(0, shlex.join(["precision-bridge", "check", str(log.described_by)]))
    return RunContent(
        name=name,
        folder=str(log.path),
        source=log.source,
        figures=_collect_figures(log, records),
        compared=compared,
        plan=make_plan_rows(plan),
        warnings=warnings,
        train=records,
        validation=log.list_validations(),
        memory=make_memory_rows((), predicted_bytes or {}),
        environment={},
        commands=commands,
        verdict=_collect_verdicts(log, records, warnings),
    )


def _collect_figures(log: RunLog, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return name of a metric -> value, for the metrics that the log has."""
    validation_loss = None
    if log.validation:
        _step, validation_loss = log.validation[-1]
    figures = {
        "train_loss": records[-1]["loss"],
        "validation_loss": validation_loss,
        "tokens_per_second": log.compute_mean_throughput("tokens_per_second"),
        "seconds_per_step": log.compute_mean_throughput("seconds_per_step"),
        "tflops_per_gpu": log.compute_mean_throughput("tflops_per_gpu"),
        "steps": log.last_step,
        "skipped_steps": log.skipped_steps,
        "train_iters": log.train_iters,
    }
    return {name: value for name, value in figures.items() if value is not None}


def _collect_verdicts(
    log: RunLog, records: Sequence[Mapping[str, Any]], warnings: Mapping[str, str]
) -> list[Answer]:
    """Return the summary of the report: the end of the run, its loss, gaps and early warnings."""
    end = Answer(state="unknown", sentence=f"The last record is of step {log.last_step}.")
    if log.has_ended:
        end = Answer(state="good", sentence=f"Ended after step {log.last_step}.")
    verdicts = [end]
    losses = [record["loss"] for record in records if record["loss"] is not None]
    if not log.is_policy:
        verdicts.append(describe_loss_fall(losses))
    for sentence in _describe_gaps(log):
        verdicts.append(Answer(state="unknown", sentence=sentence))
    for name, sentence in warnings.items():
        verdicts.append(Answer(state="bad", sentence=f"{name}: {sentence}"))
    return verdicts


def _describe_gaps(log: RunLog) -> list[str]:
    """Return sentences about parts of the log that are missing, not read or easy to misread."""
    sentences = list(log.notes)
    if log.is_policy:
        sentences.append("The loss is that of a policy gradient, which need not fall.")
    if log.missing_sentence:
        sentences.append(log.missing_sentence)
    return sentences
