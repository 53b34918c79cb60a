"""The training command: check the run, write its precision into the configs, record both, and train."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from bridge.errors import CheckError
from bridge.front.loader import config_folder
from bridge.front.main import main
from bridge.front.record import record
from bridge.front.run_folder import is_first_process
from bridge.preflight.run_check import check_run
from bridge.report.findings import findings_dict, verdict_line
from bridge.training.config import write_precision

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from bridge.training.config import ConfigContainer

__all__ = ["FINDINGS", "STOPPED", "main_train", "require_checked", "train"]

STOPPED = 130
"""Exit code of a run that Ctrl-C or a termination signal ended before its last step; everything is written."""
FINDINGS = "findings.json"

log = logging.getLogger("train")


def main_train(words: Sequence[str] | None = None, *, config_path: Path | None = None) -> None:
    """Train as the command line says.

    Args:
        words: Overrides and Hydra's flags; None: the process's command line.
        config_path: Folder of the config tree; None: ``conf`` here, or else the one of this package.
    """
    main(train, config_path=config_path or config_folder(), name="train", words=words)


def train(config: ConfigContainer, run_dir: Path) -> None:
    """Check the run, write its precision into the configs, record both in its folder, and train."""
    known = require_checked(config, run_dir)
    report = write_precision(config)
    if report is not None:
        report.log(log, file=run_dir / "sync.txt", known=known)
    record(run_dir, config, report)
    from bridge.training.loop import pretrain  # imports torch and Megatron, which `--help` and `--cfg` can do without

    if pretrain(config, run_dir=run_dir).stopped_early:
        sys.exit(STOPPED)  # not 0: the scheduler that waits for the run has to see that it is not done


def require_checked(config: ConfigContainer, run_dir: Path) -> set[tuple[str, str]]:
    """Check a run before anything of it is built, log its warnings, and keep the findings in its folder.

    Args:
        config: The run, before its precision is written into the sections.
        run_dir: Gets ``findings.json``: the findings, the silenced ones with their reasons, and the choice behind
            ``auto``.

    Returns:
        (rule's id, path) of each finding that was logged, so that the sync does not log it again.

    Raises:
        CheckError: Every finding that is an error.
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
            f"The check stops this run ({verdict_line(report)}). `precision-bridge explain {first}` explains the rule; "
            f"'silence.{first}=why it is all right here' lets the run pass:",
            [replace(finding, path=f"{finding.id} {finding.path}") for finding in errors],
        )
    return {(finding.id, finding.path) for finding in report.of("warning")}
