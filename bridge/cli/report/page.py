"""`precision-bridge report RUN [RUN ...]`: some runs or logs as one HTML file, Markdown or JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.logged_runs import described_logs, is_log
from bridge.cli.output import refuse_inputs, text_of, write_file
from bridge.cli.recipes.difference import field_differences
from bridge.errors import BridgeError, RunConfigError
from bridge.extras import require_extra
from bridge.precision.mode import mode_of
from bridge.precision.statements import recipe_name
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config
from bridge.runtime.audit.run_folder import RunFolder

if TYPE_CHECKING:
    from bridge.plan.run import PlannedRun
    from bridge.precision.config import PrecisionConfig

STANDARD_OUTPUT = "-"
"""The name of a file that stands for standard output."""
FORMATS = ("html", "md", "json")
"""Formats of a report, the usual one first."""
BASES = {"bf16": "bf16_mixed", "fp16": "fp16_mixed", "fp32": "fp32"}
"""Mode -> the recipe without any scaling scheme, which a recipe of that mode is compared with."""


def write_page(args: argparse.Namespace) -> None:
    """Write a report of some runs and print the names of its files; or print the report itself."""
    require_extra("train", "precision-bridge report")
    from bridge.report.html.page import content_json, render_markdown, render_page

    form = args.format or FORMATS[0]
    forms = _forms_of_files(args, form)
    for file in forms:
        refuse_inputs(file, "--out", args.runs)
    folders = [path for path in args.runs if not is_log(path)]
    logs = [path for path in args.runs if is_log(path)]
    runs = [*_content_of_folders(folders), *_content_of_logs(logs)]
    render = {"html": render_page, "md": render_markdown, "json": content_json}
    if not forms:
        print(render[form](runs))
        return
    texts = {file: render[form_of_file](runs) for file, form_of_file in forms.items()}
    for file, text in texts.items():
        write_file(file, text, "--out")
        print(file)


def _forms_of_files(args: argparse.Namespace, form: str) -> dict[Path, str]:
    """Return file -> its format, of the files that a report has; none for standard output."""
    if str(args.out) == STANDARD_OUTPUT:
        return {}
    out = args.out or _place_beside(args.runs[0], form)
    forms = {out: form}
    if form == "html":
        forms[out.with_suffix(".json")] = "json"
    return forms


def _content_of_folders(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the content of runs of ours."""
    from bridge.report.html.content import run_content

    compared = _compared(paths)
    runs = []
    for path in paths:
        planned = _planned(path / "config.yaml")
        more: dict[str, Any] = {}
        if planned is not None:
            more = {"plan": planned.plan, "predicted_bytes": planned.memory.ranks[0].bytes_of}
            more["base"] = _base(planned.prediction.precision)
        runs.append(run_content(RunFolder.of(path), compared=compared.get(path), **more))
    return runs


def _content_of_logs(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the content of the runs of logs."""
    from bridge.report.comparison import answers
    from bridge.report.log import log_content
    from bridge.runtime.compare.logged_run import place_of
    from bridge.runtime.compare.logs import compare_logs

    described = described_logs(paths)
    compared_runs = [log.compared() for log in described]
    compared: dict[Path, dict[str, str]] = {}
    if len(described) > 1:
        compared = answers([compare_logs(compared_runs)])
    runs = []
    for each, compared_run in zip(described, compared_runs, strict=True):
        more: dict[str, Any] = {}
        planned = None
        if each.log.described_by is not None:
            planned = _planned(each.log.described_by)
        if planned is not None:
            more = {"plan": planned.plan, "predicted_bytes": planned.memory.ranks[0].bytes_of}
        name = each.name
        if each.precision:
            name = f"{each.precision}, {each.name}"
        answer = compared.get(place_of(compared_run, compared_runs))
        runs.append(log_content(each.log, name=name, compared=answer, **more))
    return runs


def _place_beside(run: Path, form: str) -> Path:
    """Return the file of a report that no option names: in the folder of a run, or next to a log."""
    if run.is_dir():
        return run / f"report.{form}"
    return run.with_name(f"{run.stem}.report.{form}")


def _compared(paths: Sequence[Path]) -> dict[Path, dict[str, str]]:
    """Return the answers of the comparison of these runs, by the run's folder.

    A run that has no twin among them has none.
    """
    from bridge.report.comparison import answers
    from bridge.runtime.compare.arm import read_arm
    from bridge.runtime.compare.comparison import compare

    arms = []
    for path in dict.fromkeys(paths):
        with suppress(RunConfigError):  # not every run is one of a training that can be compared
            arm = read_arm(path)
            if arm is not None:
                arms.append(arm)
    if len(arms) < 2:
        return {}
    return answers(compare(arms))


def _planned(file: Path) -> PlannedRun | None:
    """Return the run that a file describes as the calculators take it.

    None where it cannot be planned here.
    """
    from bridge.front.loader import load_run
    from bridge.plan.run import PlannedRun

    try:
        planned = PlannedRun(prediction=load_run(config_file=file).prediction)
        planned.plan  # noqa: B018  computed once; a model that has no plan raises
        planned.memory  # noqa: B018  so does one whose sizes are not known
    except BridgeError:
        return None
    return planned


def _base(precision: PrecisionConfig | None) -> dict[str, Any] | None:
    """Return the plain recipe of a precision's mode, and the fields in which the two differ."""
    if not isinstance(precision, MixedPrecisionConfig):
        return None
    base = get_mixed_precision_config(BASES[mode_of(precision)])
    fields = []
    for row in field_differences(base, precision):
        if row["a"] != row["b"]:
            fields.append(
                {"field": row["field"], "base": text_of(row["a"]), "run": text_of(row["b"])}
            )
    return {"name": recipe_name(base), "fields": fields}
