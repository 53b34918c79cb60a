"""The page: the content of one or several runs rendered as one HTML file that needs no network."""

import json
from collections.abc import Sequence
from importlib import resources
from operator import itemgetter
from pathlib import PurePath
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from bridge.plan.precision_plan import compact
from bridge.report.curves import points
from bridge.report.html.chart import line_chart
from bridge.report.quantisation import WORST_DB
from bridge.report.table import mib

Run = dict[str, Any]

TEMPLATE = "page.html.j2"
WORD_OF_STATE = {"good": "Good", "bad": "Problem", "unknown": "Note"}
"""State of an answer -> its word, so that colour is not the only sign."""


def render_page(runs: Sequence[Run]) -> str:
    """Return the page of some runs, each the result of `run_content`."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        number=_number, mib=mib, layers=compact, heat=_heat_table, charts=_charts
    )
    text = resources.files("bridge.report.html").joinpath(TEMPLATE).read_text(encoding="utf-8")
    runs = _told_apart(runs)
    curves = {}
    if len(runs) > 1:
        for run in runs:
            curves[run["name"]] = points(run["train"], "loss")
    chart = line_chart(curves, title="Training loss of all runs", y="nats per token")
    overlay = Markup(chart)  # noqa: S704  as below
    return environment.from_string(text).render(
        runs=runs, overlay=overlay, compared=_comparison(runs), states=WORD_OF_STATE
    )


def render_markdown(runs: Sequence[Run]) -> str:
    """Return the verdicts, figures and plan of some runs for a comment."""
    lines = _answers(_comparison(runs))
    if lines:
        lines.append("")
    for run in _told_apart(runs):
        lines += _markdown(run)
    return "\n".join(lines)


def _markdown(run: Run) -> list[str]:
    """Return the lines of one run."""
    lines = [f"## {run['name']}", "", *_answers(run["verdict"]), ""]
    lines += ["| figure | value |", "|---|---|"]
    for name, value in run["figures"].items():
        lines.append(f"| {name.replace('_', ' ')} | {_number(value)} |")
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


def _answers(verdict: Sequence[dict[str, str]]) -> list[str]:
    lines = []
    for answer in verdict:
        lines.append(f"- **{WORD_OF_STATE[answer['state']]}.** {answer['sentence']}")
    return lines


def content_json(runs: Sequence[Run]) -> str:
    """Return the content as JSON, the numbers of the page."""
    return json.dumps(runs, indent=1) + "\n"


def _told_apart(runs: Sequence[Run]) -> list[Run]:
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


def _comparison(runs: Sequence[Run]) -> list[dict[str, str]]:
    """Return the different answers of comparisons, in the order of the runs."""
    answers: list[dict[str, str]] = []
    for run in runs:
        answer = run["compared"]
        if answer is not None and answer not in answers:
            answers.append(answer)
    return answers


def _charts(run: Run) -> Markup:
    losses = {
        "training": points(run["train"], "loss"),
        "validation": points(run["validation"], "loss"),
    }
    entropy, train = run["figures"].get("unigram_entropy"), run["train"]
    if entropy is not None and train:
        losses["unigram entropy"] = [(train[0]["step"], entropy), (train[-1]["step"], entropy)]
    charts = [line_chart(losses, title="Loss", y="nats per token")]
    norms = {"gradient norm": points(run["train"], "grad_norm")}
    charts.append(line_chart(norms, title="Gradient norm before clipping", y="log scale", log=True))
    scale = points(run["train"], "loss_scale")
    if len({value for _, value in scale}) > 1:
        charts.append(
            line_chart({"loss scale": scale}, title="Loss scale", y="log scale", log=True)
        )
    return Markup("".join(charts))  # noqa: S704  numbers and escaped names


def _heat_table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
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


def _number(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    return str(value)
