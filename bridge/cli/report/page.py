"""`precision-bridge report RUN [RUN ...]`: some runs or logs as one HTML file, Markdown or JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.described_logs import is_log, read_described_logs
from bridge.cli.output import format_value, refuse_input_files, write_file
from bridge.cli.recipes.difference import list_field_differences
from bridge.errors import BridgeError, RunConfigError
from bridge.extras import require_extra
from bridge.precision.mode import get_mode
from bridge.precision.statements import get_recipe_name
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config
from bridge.runtime.audit.run_folder import RunFolder

if TYPE_CHECKING:
    from bridge.plan.planned_run import PlannedRun
    from bridge.precision.config import PrecisionConfig

STANDARD_OUTPUT = "-"
"""The name of a file that stands for standard output."""
REPORT_FORMATS = ("html", "md", "json")
"""Formats of a report, the usual one first."""
BASE_RECIPES = {"bf16": "bf16_mixed", "fp16": "fp16_mixed", "fp32": "fp32"}
"""Mode -> the recipe without any scaling scheme, which a recipe of that mode is compared with."""


def write_page(args: argparse.Namespace) -> None:
    """Write a report of some runs and print the names of its files; or print the report itself."""
    require_extra("train", "precision-bridge report")
    from bridge.report.html.page import format_json, render_markdown, render_page

    form = args.format or REPORT_FORMATS[0]
    forms = _choose_file_formats(args, form)
    for file in forms:
        refuse_input_files(file, "--out", args.runs)
    folders = [path for path in args.runs if not is_log(path)]
    logs = [path for path in args.runs if is_log(path)]
    runs = [*_collect_folder_content(folders), *_collect_log_content(logs)]
    render = {"html": render_page, "md": render_markdown, "json": format_json}
    if not forms:
        print(render[form](runs))
        return
    texts = {file: render[form_of_file](runs) for file, form_of_file in forms.items()}
    for file, text in texts.items():
        write_file(file, text, "--out")
        print(file)


def _choose_file_formats(args: argparse.Namespace, form: str) -> dict[Path, str]:
    """Return file -> its format, of the files that a report has; none for standard output."""
    if str(args.out) == STANDARD_OUTPUT:
        return {}
    out = args.out or _get_default_file(args.runs[0], form)
    forms = {out: form}
    if form == "html":
        forms[out.with_suffix(".json")] = "json"
    return forms


def _collect_folder_content(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the content of runs of ours."""
    from bridge.report.html.content import collect_run_content

    compared = _compare_folders(paths)
    runs = []
    for path in paths:
        planned = _plan_file(path / "config.yaml")
        more: dict[str, Any] = {}
        if planned is not None:
            more = {"plan": planned.plan, "predicted_bytes": planned.memory.ranks[0].bytes_of}
            more["base"] = _compare_with_base(planned.prediction.precision)
        runs.append(
            collect_run_content(RunFolder.from_path(path), compared=compared.get(path), **more)
        )
    return runs


def _collect_log_content(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the content of the runs of logs."""
    from bridge.report.comparison import collect_answers
    from bridge.report.log_content import collect_log_content
    from bridge.runtime.compare.log_comparison import compare_logs
    from bridge.runtime.compare.logged_run import get_log_path

    described = read_described_logs(paths)
    compared_runs = [log.compared() for log in described]
    compared: dict[Path, dict[str, str]] = {}
    if len(described) > 1:
        compared = collect_answers([compare_logs(compared_runs)])
    runs = []
    for each, compared_run in zip(described, compared_runs, strict=True):
        more: dict[str, Any] = {}
        planned = None
        if each.log.described_by is not None:
            planned = _plan_file(each.log.described_by)
        if planned is not None:
            more = {"plan": planned.plan, "predicted_bytes": planned.memory.ranks[0].bytes_of}
        name = each.name
        if each.precision:
            name = f"{each.precision}, {each.name}"
        answer = compared.get(get_log_path(compared_run, compared_runs))
        runs.append(collect_log_content(each.log, name=name, compared=answer, **more))
    return runs


def _get_default_file(run: Path, form: str) -> Path:
    """Return the file of a report that no option names: in the folder of a run, or next to a log."""
    if run.is_dir():
        return run / f"report.{form}"
    return run.with_name(f"{run.stem}.report.{form}")


def _compare_folders(paths: Sequence[Path]) -> dict[Path, dict[str, str]]:
    """Return the answers of the comparison of these runs, by the run's folder.

    A run that has no twin among them has none.
    """
    from bridge.report.comparison import collect_answers
    from bridge.runtime.compare.arm import read_arm
    from bridge.runtime.compare.comparison import compare_arms

    arms = []
    for path in dict.fromkeys(paths):
        with suppress(RunConfigError):  # not every run is one of a training that can be compared
            arm = read_arm(path)
            if arm is not None:
                arms.append(arm)
    if len(arms) < 2:
        return {}
    return collect_answers(compare_arms(arms))


def _plan_file(file: Path) -> PlannedRun | None:
    """Return the run that a file describes as the calculators take it.

    None where it cannot be planned here.
    """
    from bridge.front.loader import load_run
    from bridge.plan.planned_run import PlannedRun

    try:
        planned = PlannedRun(prediction=load_run(config_file=file).prediction)
        planned.plan  # noqa: B018  computed once; a model that has no plan raises
        planned.memory  # noqa: B018  so does one whose sizes are not known
    except BridgeError:
        return None
    return planned


def _compare_with_base(precision: PrecisionConfig | None) -> dict[str, Any] | None:
    """Return the plain recipe of a precision's mode, and the fields in which the two differ."""
    if not isinstance(precision, MixedPrecisionConfig):
        return None
    base = get_mixed_precision_config(BASE_RECIPES[get_mode(precision)])
    fields = []
    for row in list_field_differences(base, precision):
        if row["a"] != row["b"]:
            fields.append(
                {
                    "field": row["field"],
                    "base": format_value(row["a"]),
                    "run": format_value(row["b"]),
                }
            )
    return {"name": get_recipe_name(base), "fields": fields}
