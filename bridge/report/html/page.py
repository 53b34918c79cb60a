"""The page: the content of one or several runs rendered as one HTML file that needs no network."""

import json
from collections.abc import Sequence
from importlib import resources
from operator import itemgetter
from pathlib import PurePath
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from bridge.plan.precision_plan import format_ranges
from bridge.report.curves import collect_points
from bridge.report.html.chart import draw_line_chart
from bridge.report.quantisation_table import WORST_DB
from bridge.report.table import format_mib

RunContent = dict[str, Any]

TEMPLATE = "page.html.j2"
STATE_WORDS = {"good": "Good", "bad": "Problem", "unknown": "Note"}
"""State of an answer -> its word, so that colour is not the only sign."""


def render_page(runs: Sequence[RunContent]) -> str:
    """Return the page of some runs, each the result of `collect_run_content`."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=_format_number,
        mib=format_mib,
        layers=format_ranges,
        heat=_make_heat_table,
        charts=_draw_charts,
    )
    text = resources.files("bridge.report.html").joinpath(TEMPLATE).read_text(encoding="utf-8")
    runs = _make_names_unique(runs)
    curves = {}
    if len(runs) > 1:
        for run in runs:
            curves[run["name"]] = collect_points(run["train"], "loss")
    chart = draw_line_chart(curves, title="Training loss of all runs", y="nats per token")
    overlay = Markup(chart)  # noqa: S704  as below
    return environment.from_string(text).render(
        runs=runs, overlay=overlay, compared=_collect_answers(runs), states=STATE_WORDS
    )


def render_markdown(runs: Sequence[RunContent]) -> str:
    """Return the verdicts, figures and plan of some runs for a comment."""
    lines = _format_answers(_collect_answers(runs))
    if lines:
        lines.append("")
    for run in _make_names_unique(runs):
        lines += _format_run(run)
    return "\n".join(lines)


def _format_run(run: RunContent) -> list[str]:
    """Return the lines of one run."""
    lines = [f"## {run['name']}", "", *_format_answers(run["verdict"]), ""]
    lines += ["| figure | value |", "|---|---|"]
    for name, value in run["figures"].items():
        lines.append(f"| {name.replace('_', ' ')} | {_format_number(value)} |")
    if run["base"]:
        fields = ", ".join(f"{row['field']}={row['run']}" for row in run["base"]["fields"])
        lines += ["", f"Differs from {run['base']['name']} in: {fields or 'no field'}."]
    if run["ran"]:
        lines += ["", f"Recorded ({run['backend']}): {run['ran']}."]
    for sentence in run["mismatches"]:
        lines.append(f"- {sentence}")
    for finding in run["findings"]:
        subject = f"{finding['severity']} {finding['id']} {finding['path']}"
        lines.append(f"- {subject}: {finding['rule']}.")
    lines.append("")
    return lines


def _format_answers(verdict: Sequence[dict[str, str]]) -> list[str]:
    lines = []
    for answer in verdict:
        lines.append(f"- **{STATE_WORDS[answer['state']]}.** {answer['sentence']}")
    return lines


def format_json(runs: Sequence[RunContent]) -> str:
    """Return the content as JSON, the numbers of the page."""
    return json.dumps(runs, indent=1) + "\n"


def _make_names_unique(runs: Sequence[RunContent]) -> list[RunContent]:
    """Return the runs with different names.

    Runs of one precision get the words in which their folders differ.
    """
    words_of = [PurePath(run["folder"]).name.split(",") for run in runs]
    named = []
    for run, words in zip(runs, words_of, strict=True):
        others = []
        for other, other_words in zip(runs, words_of, strict=True):
            if other["name"] == run["name"] and other is not run:
                others.append(other_words)
        if not others:
            named.append(run)
            continue
        apart = []
        for word in words:
            if any(word not in other_words for other_words in others):
                apart.append(word)
        name = ", ".join([run["name"], *(apart or words)])
        named.append({**run, "name": name})
    return named


def _collect_answers(runs: Sequence[RunContent]) -> list[dict[str, str]]:
    """Return the different answers of comparisons, in the order of the runs."""
    answers: list[dict[str, str]] = []
    for run in runs:
        answer = run["compared"]
        if answer is not None and answer not in answers:
            answers.append(answer)
    return answers


def _draw_charts(run: RunContent) -> Markup:
    losses = {
        "training": collect_points(run["train"], "loss"),
        "validation": collect_points(run["validation"], "loss"),
    }
    entropy, train = run["figures"].get("unigram_entropy"), run["train"]
    if entropy is not None and train:
        losses["unigram entropy"] = [(train[0]["step"], entropy), (train[-1]["step"], entropy)]
    charts = [draw_line_chart(losses, title="Loss", y="nats per token")]
    norms = {"gradient norm": collect_points(run["train"], "grad_norm")}
    charts.append(
        draw_line_chart(norms, title="Gradient norm before clipping", y="log scale", log=True)
    )
    scale = collect_points(run["train"], "loss_scale")
    if len({value for _, value in scale}) > 1:
        charts.append(
            draw_line_chart({"loss scale": scale}, title="Loss scale", y="log scale", log=True)
        )
    return Markup("".join(charts))  # noqa: S704  numbers and escaped names


def _make_heat_table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a table per operand, layers by modules.

    Each cell has its colour between 0 (healthy) and 1.
    """
    tables = []
    rows_of: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        rows_of.setdefault(row["operand"], []).append(row)
    for operand, of_operand in rows_of.items():
        cells: dict[int, dict[str, Any]] = {}
        modules: set[str] = set()
        formats: set[str] = set()
        for row in sorted(of_operand, key=itemgetter("layer")):
            modules.add(row["module"])
            formats.add(row["format"])
            strength = min(1.0, max(0.0, row["below_normal_db"] / WORST_DB))
            of_layer = cells.setdefault(row["layer"], {})
            of_layer[row["module"]] = {**row, "strength": round(strength, 2)}
        tables.append(
            {
                "operand": operand,
                "formats": ", ".join(sorted(formats)),
                "modules": sorted(modules),
                "cells": cells,
            }
        )
    return tables


def _format_number(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return str(value)
