"""The page: the content of one or several runs rendered as one HTML file that needs no network."""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import PurePath
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from bridge.plan.precision_plan import compact
from bridge.precision.grouping import grouped
from bridge.report.curves import points
from bridge.report.html.chart import line_chart
from bridge.report.quantisation import WORST_DB
from bridge.report.table import mib

Run = dict[str, Any]

TEMPLATE = "page.html.j2"
STATES = {"good": "Good", "bad": "Problem", "unknown": "Note"}
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
    curves = {run["name"]: points(run["train"], "loss") for run in runs} if len(runs) > 1 else {}
    overlay = Markup(line_chart(curves, title="Training loss of all runs", y="nats per token"))  # noqa: S704  as below
    return environment.from_string(text).render(
        runs=runs, overlay=overlay, compared=_comparison(runs), states=STATES
    )


def render_markdown(runs: Sequence[Run]) -> str:
    """Return the verdicts, figures and plan of some runs for a comment."""

    def answers(found: Sequence[dict[str, str]]) -> list[str]:
        return [f"- **{STATES[one['state']]}.** {one['sentence']}" for one in found]

    lines = answers(_comparison(runs))
    lines += [""] * bool(lines)
    for run in _told_apart(runs):
        lines += [
            f"## {run['name']}",
            "",
            *answers(run["verdict"]),
            "",
            "| figure | value |",
            "|---|---|",
        ]
        lines += [
            f"| {name.replace('_', ' ')} | {_number(value)} |"
            for name, value in run["figures"].items()
        ]
        if run["base"]:
            fields = ", ".join(f"{row['field']}={row['run']}" for row in run["base"]["fields"])
            lines += ["", f"Differs from {run['base']['name']} in: {fields or 'no field'}."]
        if run["ran"]:
            lines += ["", f"Recorded ({run['backend']}): {run['ran']}."]
        lines += [f"- {sentence}" for sentence in run["mismatches"]]
        lines += [
            f"- {one['severity']} {one['id']} {one['path']}: {one['rule']}."
            for one in run["findings"]
        ]
        lines.append("")
    return "\n".join(lines)


def content_json(runs: Sequence[Run]) -> str:
    """Return the content as JSON, the numbers of the page."""
    return json.dumps(runs, indent=1) + "\n"


def _told_apart(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with names of their own: of one precision, with the words in which their folders differ."""
    words = [PurePath(run["folder"]).name.split(",") for run in runs]
    named = []
    for run, own in zip(runs, words, strict=True):
        alike = zip(runs, words, strict=True)
        others = [other for one, other in alike if one["name"] == run["name"] and one is not run]
        apart = [word for word in own if any(word not in other for other in others)] or own
        named.append(run | {"name": ", ".join([run["name"], *apart])} if others else run)
    return named


def _comparison(runs: Sequence[Run]) -> list[dict[str, str]]:
    answers = [run["compared"] for run in runs if run["compared"] is not None]
    return [answer for number, answer in enumerate(answers) if answer not in answers[:number]]


def _charts(run: Run) -> Markup:
    losses = {
        "training": points(run["train"], "loss"),
        "validation": points(run["validation"], "loss"),
    }
    entropy, steps = run["figures"]["unigram_entropy"], [one["step"] for one in run["train"]]
    if entropy is not None and steps:
        losses["unigram entropy"] = [(steps[0], entropy), (steps[-1], entropy)]
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
    """Return a table per operand: layers by modules, each cell with its colour between 0 (healthy) and 1."""
    tables = []
    for operand, own in grouped((row["operand"], row) for row in rows).items():
        cells: dict[int, dict[str, Any]] = {}
        for row in sorted(own, key=lambda one: one["layer"]):
            strength = min(1.0, max(0.0, row["below_normal_db"] / WORST_DB))
            cells.setdefault(row["layer"], {})[row["module"]] = {
                **row,
                "strength": round(strength, 2),
            }
        modules = sorted({row["module"] for row in own})
        formats = ", ".join(sorted({row["format"] for row in own}))
        tables.append({"operand": operand, "formats": formats, "modules": modules, "cells": cells})
    return tables


def _number(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
