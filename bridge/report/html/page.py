"""The report of one or several runs as an HTML page, as Markdown or as JSON.

The page is one file and needs no network.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import resources
from operator import itemgetter
from pathlib import PurePath
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from bridge.plan.precision_plan import format_ranges
from bridge.report.answer import Answer
from bridge.report.curves import collect_points
from bridge.report.html.chart import draw_line_chart
from bridge.report.html.run_content import RunContent
from bridge.report.quantisation_picture import WORST_DB
from bridge.report.table import format_mib

TEMPLATE = "page.html.j2"
STATE_WORDS = {"good": "Good", "bad": "Problem", "unknown": "Note"}
"""State of an answer -> its text on the page, so that colour is not the only sign."""


def render_page(runs: Sequence[RunContent]) -> str:
    """Return the HTML page of some runs."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=_format_number,
        mib=format_mib,
        layers=format_ranges,
        heat=_make_heat_tables,
        charts=_draw_charts,
    )
    template = resources.files("bridge.report.html").joinpath(TEMPLATE).read_text(encoding="utf-8")
    runs = _make_names_unique(runs)
    return environment.from_string(template).render(
        runs=runs,
        overlay=_draw_overlay(runs),
        compared=_collect_answers(runs),
        states=STATE_WORDS,
    )


def _draw_overlay(runs: Sequence[RunContent]) -> Markup:
    """Return the chart with the training losses of all runs. Empty for a single run."""
    curves = {}
    if len(runs) > 1:
        for run in runs:
            curves[run.name] = collect_points(run.train, "loss")
    chart = draw_line_chart(curves, title="Training loss of all runs", unit="nats per token")
    return Markup(chart)  # noqa: S704  numbers and escaped names


def render_markdown(runs: Sequence[RunContent]) -> str:
    """Return the verdicts, metrics and findings of some runs as Markdown, for a comment."""
    lines = _format_answers(_collect_answers(runs))
    if lines:
        lines.append("")
    for run in _make_names_unique(runs):
        lines += _format_run(run)
    return "\n".join(lines)


def _format_run(run: RunContent) -> list[str]:
    """Return the lines of one run."""
    lines = [f"## {run.name}", "", *_format_answers(run.verdict), ""]
    lines += ["| figure | value |", "|---|---|"]
    for name, value in run.figures.items():
        lines.append(f"| {name.replace('_', ' ')} | {_format_number(value)} |")
    if run.base:
        fields = ", ".join(f"{row['field']}={row['run']}" for row in run.base["fields"])
        lines += ["", f"Differs from {run.base['name']} in: {fields or 'no field'}."]
    if run.ran:
        lines += ["", f"Recorded ({run.backend}): {run.ran}."]
    for sentence in run.mismatches:
        lines.append(f"- {sentence}")
    for finding in run.findings:
        subject = f"{finding['severity']} {finding['id']} {finding['path']}"
        lines.append(f"- {subject}: {finding['rule']}.")
    lines.append("")
    return lines


def _format_answers(verdict: Sequence[Answer]) -> list[str]:
    """Return answers as the items of a list in Markdown."""
    lines = []
    for answer in verdict:
        lines.append(f"- **{STATE_WORDS[answer.state]}.** {answer.sentence}")
    return lines


def format_json(runs: Sequence[RunContent]) -> str:
    """Return the content of the page as JSON."""
    return json.dumps([asdict(run) for run in runs], indent=1) + "\n"


def _make_names_unique(runs: Sequence[RunContent]) -> list[RunContent]:
    """Return the runs with different names.

    Runs of the same name get the overrides in which the names of their folders differ.
    """
    # Hydra names the folder of a job of a sweep by its overrides, which commas separate.
    overrides_of = [PurePath(run.folder).name.split(",") for run in runs]
    named = []
    for run, overrides in zip(runs, overrides_of, strict=True):
        overrides_of_namesakes = []
        for other_run, other_overrides in zip(runs, overrides_of, strict=True):
            if other_run.name == run.name and other_run is not run:
                overrides_of_namesakes.append(other_overrides)
        if not overrides_of_namesakes:
            named.append(run)
            continue
        differing = []
        for override in overrides:
            if any(override not in other_overrides for other_overrides in overrides_of_namesakes):
                differing.append(override)
        name = ", ".join([run.name, *(differing or overrides)])
        named.append(replace(run, name=name))
    return named


def _collect_answers(runs: Sequence[RunContent]) -> list[Answer]:
    """Return the answers of comparisons without repetitions, in the order of the runs."""
    answers: list[Answer] = []
    for run in runs:
        answer = run.compared
        if answer is not None and answer not in answers:
            answers.append(answer)
    return answers


def _draw_charts(run: RunContent) -> Markup:
    """Return the charts of a run: loss, gradient norm, and the loss scale if it changed."""
    losses = {
        "training": collect_points(run.train, "loss"),
        "validation": collect_points(run.validation, "loss"),
    }
    entropy, train = run.figures.get("unigram_entropy"), run.train
    if entropy is not None and train:
        losses["unigram entropy"] = [(train[0]["step"], entropy), (train[-1]["step"], entropy)]
    charts = [draw_line_chart(losses, title="Loss", unit="nats per token")]
    norms = {"gradient norm": collect_points(run.train, "grad_norm")}
    charts.append(
        draw_line_chart(norms, title="Gradient norm before clipping", unit="log scale", log=True)
    )
    scale = collect_points(run.train, "loss_scale")
    if len({value for _, value in scale}) > 1:
        charts.append(
            draw_line_chart({"loss scale": scale}, title="Loss scale", unit="log scale", log=True)
        )
    return Markup("".join(charts))  # noqa: S704  numbers and escaped names


def _make_heat_tables(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a table for each operand, with the layers as rows and the modules as columns."""
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        rows_of.setdefault(row["operand"], []).append(row)
    tables = []
    for operand, of_operand in rows_of.items():
        tables.append(
            {
                "operand": operand,
                "formats": ", ".join(sorted({row["format"] for row in of_operand})),
                "modules": sorted({row["module"] for row in of_operand}),
                "cells": _make_heat_cells(of_operand),
            }
        )
    return tables


def _make_heat_cells(rows: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return layer -> module -> the cell, whose strength of colour is from 0 (healthy) to 1."""
    cells: dict[int, dict[str, Any]] = {}
    for row in sorted(rows, key=itemgetter("layer")):
        strength = min(1.0, max(0.0, row["below_normal_db"] / WORST_DB))
        cells_of_layer = cells.setdefault(row["layer"], {})
        cells_of_layer[row["module"]] = {**row, "strength": round(strength, 2)}
    return cells


def _format_number(value: object) -> str:
    """Return a number as text; "-" if it is not known."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return str(value)
