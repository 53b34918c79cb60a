"""`check`: the check of a run in Python, with the findings of `precision-bridge check` as objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.preflight.rule_check import Report
from bridge.preflight.rule_check import check as check_run
from bridge.preflight.run import Run
from bridge.target.declaration import make_target

if TYPE_CHECKING:
    from bridge.training.config import ConfigContainer


def check(
    run: Run | ConfigContainer | Mapping[str, Any],
    *,
    target: str | None = None,
    silenced: Mapping[str, str] | None = None,
) -> Report:
    """Report the known faults of a run before it is built, without a GPU.

        from bridge import check, load_run

        run = load_run(config_file="run_config.yaml", strict=False)
        report = check(run, target="h100x64,te2.9,cuda12.9")
        for finding in report.findings:
            print(finding.severity, finding)
        sys.exit(report.exit_code())  # 2 with errors

    Args:
        run: A run that `load_run` read, a `ConfigContainer`, or a mapping of sections
            ("mixed_precision", "model", "optimizer", "ddp", ...) with Megatron's field names.
            Nothing is written into it.
        target: The machines of the run: GPU and number, then versions ("h100x64,te2.9,cuda12.9"),
            or "auto" for this machine. None: the target that the run states. Without a target,
            rules that need a GPU are not evaluated.
        silenced: Id of a rule -> the reason. Their findings are in `Report.silenced`.

    Returns:
        The findings, errors first. Each has an id, a severity (error, warning or info), the path of
        a field, the rule, the value, its source and a remedy.

    Raises:
        RunConfigError: The target cannot be read, or a silenced rule does not exist.
        UnknownRecipeError: There is no such recipe.
    """
    if not isinstance(run, Run):
        run = Run.from_container(run, target=target)
    elif target is not None:
        machines = make_target(target)
        sections = {**run.sections, "target": target}
        reading = run.reading.with_target_release(machines, is_stated=True)
        run = replace(run, sections=sections, target=machines, reading=reading)
    return check_run(run, silenced=silenced)
