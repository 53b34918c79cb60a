"""The content of a report on each run: a run folder of this project, or another trainer's log."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.described_logs import read_described_logs
from bridge.cli.output import format_value
from bridge.cli.recipes.difference import list_field_differences
from bridge.errors import BridgeError, RunConfigError
from bridge.precision.mode import get_mode
from bridge.precision.statements import get_recipe_name
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config
from bridge.runtime.audit.run_folder import CONFIG_FILE, RunFolder

if TYPE_CHECKING:
    from bridge.plan.planned_run import PlannedRun
    from bridge.precision.precision_config import PrecisionConfig
    from bridge.report.answer import Answer
    from bridge.report.html.run_content import RunContent

BASE_RECIPES = {"bf16": "bf16_mixed", "fp16": "fp16_mixed", "fp32": "fp32"}
"""Mode -> its recipe without a scaling scheme. Recipes of the mode are compared with it."""


def collect_folder_contents(paths: Sequence[Path]) -> list[RunContent]:
    """Return the content of the report on each run folder."""
    from bridge.report.html.content import collect_run_content

    answer_of = _compare_folders(paths)
    contents = []
    for path in paths:
        planned = _plan_file(path / CONFIG_FILE)
        plan, predicted_bytes, base = None, None, None
        if planned is not None:
            plan, predicted_bytes = planned.plan, planned.memory.ranks[0].bytes_of
            base = _compare_with_base(planned.prediction.precision)
        content = collect_run_content(
            RunFolder.from_path(path),
            plan=plan,
            predicted_bytes=predicted_bytes,
            base=base,
            compared=answer_of.get(path),
        )
        contents.append(content)
    return contents


def collect_log_contents(paths: Sequence[Path]) -> list[RunContent]:
    """Return the content of the report on each run of some logs."""
    from bridge.report.comparison import collect_answers
    from bridge.report.log_content import collect_log_content
    from bridge.runtime.compare.log_comparison import compare_logs
    from bridge.runtime.compare.logged_run import get_log_path

    described = read_described_logs(paths)
    logged_runs = [log.to_logged_run() for log in described]
    answer_of: dict[Path, Answer] = {}
    if len(described) > 1:
        answer_of = collect_answers([compare_logs(logged_runs)])
    contents = []
    for described_log, logged_run in zip(described, logged_runs, strict=True):
        log = described_log.log
        planned = None
        if log.described_by is not None:
            planned = _plan_file(log.described_by)
        plan, predicted_bytes = None, None
        if planned is not None:
            plan, predicted_bytes = planned.plan, planned.memory.ranks[0].bytes_of
        name = described_log.name
        if described_log.precision:
            name = f"{described_log.precision}, {described_log.name}"
        content = collect_log_content(
            log,
            name=name,
            plan=plan,
            predicted_bytes=predicted_bytes,
            compared=answer_of.get(get_log_path(logged_run, logged_runs)),
        )
        contents.append(content)
    return contents


def _compare_folders(paths: Sequence[Path]) -> dict[Path, Answer]:
    """Return folder of a run -> the result of its comparison with the other runs.

    A run that has no twin among them has no result.
    """
    from bridge.report.comparison import collect_answers
    from bridge.runtime.compare.arm import read_arm
    from bridge.runtime.compare.comparison import compare_arms

    arms = []
    for path in dict.fromkeys(paths):
        with suppress(RunConfigError):  # a run that cannot be compared still has a report
            arm = read_arm(path)
            if arm is not None:
                arms.append(arm)
    if len(arms) < 2:
        return {}
    return collect_answers(compare_arms(arms))


def _plan_file(file: Path) -> PlannedRun | None:
    """Return the planned run of a file; None if it cannot be planned."""
    from bridge.front.loader import load_run
    from bridge.plan.planned_run import PlannedRun

    try:
        planned = PlannedRun(prediction=load_run(config_file=file).prediction)
        planned.plan  # noqa: B018  raises for a model without a plan; computed once
        planned.memory  # noqa: B018  raises for a model whose sizes are not known
    except BridgeError:
        return None
    return planned


def _compare_with_base(precision: PrecisionConfig | None) -> dict[str, Any] | None:
    """Return the recipe of a precision's mode without a scheme, and the fields that differ from it.

    None if the precision of the run is not known.
    """
    if not isinstance(precision, MixedPrecisionConfig):
        return None
    base = get_mixed_precision_config(BASE_RECIPES[get_mode(precision)])
    fields = []
    for difference in list_field_differences(base, precision):
        if difference.a != difference.b:
            fields.append(
                {
                    "field": difference.field,
                    "base": format_value(difference.a),
                    "run": format_value(difference.b),
                }
            )
    return {"name": get_recipe_name(base), "fields": fields}
