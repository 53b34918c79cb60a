"""The check that stands before a run: everything the rules know, against the machine the run is on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.errors import CheckError
from bridge.front.run_folder import is_first_process
from bridge.preflight.run_check import check_run
from bridge.report.findings import findings_dict, verdict_line

if TYPE_CHECKING:
    import logging
    from pathlib import Path

    from bridge.training.config import ConfigContainer

__all__ = ["FINDINGS", "require_checked"]

FINDINGS = "findings.json"


def require_checked(config: ConfigContainer, run_dir: Path, log: logging.Logger) -> None:
    """Check a run before anything of it is built, and keep what was found in its folder.

    Args:
        config: The run, before its precision is written into the sections.
        run_dir: Gets ``findings.json``: the findings, what was silenced and why, and the choice behind ``auto``.
        log: Is told the warnings, one line each.

    Raises:
        CheckError: What is known to go wrong, all of it.
    """
    report = check_run(config, target=config.target or "auto")
    if is_first_process():
        run_dir.mkdir(parents=True, exist_ok=True)
        content = findings_dict(report) | ({"auto": config.precision_choice} if config.precision_choice else {})
        (run_dir / FINDINGS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for finding in report.of("warning"):
        log.warning("%s %s", finding.id, finding)
    errors = report.of("error")
    if errors:
        first = errors[0].id
        raise CheckError(
            f"The check stops this run ({verdict_line(report)}). `precision-bridge explain {first}` tells more; "
            f"'silence.{first}=why it is all right here' lets it pass:",
            [replace(finding, path=f"{finding.id} {finding.path}") for finding in errors],
        )
