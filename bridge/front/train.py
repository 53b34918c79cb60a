"""The training command: check the run, write its precision into the configs, record, and train."""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, cast

import yaml

from bridge.errors import CheckError, TrainingError
from bridge.extras import require_extra
from bridge.front.folders import find_config_folder
from bridge.front.job import StartRun, is_first_process
from bridge.front.main import AroundSweep, main
from bridge.front.plain_config import container_to_dict, origins_to_dict
from bridge.preflight.check import Report, check
from bridge.preflight.last_sync import apply_last_sync
from bridge.preflight.run import Run
from bridge.report.findings import format_verdict, report_to_dict
from bridge.report.sync_table import render_sync
from bridge.rules.topics.system.train_script import RULES
from bridge.runtime.audit.setting import ORIGINS_FILE as ORIGINS
from bridge.sync.report import SyncReport
from bridge.training.config import ConfigContainer

if TYPE_CHECKING:
    from bridge.registry.config import MixedPrecisionConfig
    from bridge.runtime.compare.comparison import Comparison

FINDINGS_FILE = "findings.json"
BUILD_RULE_IDS = frozenset(rule.id for rule in RULES)
"""Ids of the rules that `require_startable` checks again. They cannot be silenced."""

log = logging.getLogger("train")


def main_train(words: Sequence[str] | None = None, *, config_path: Path | None = None) -> None:
    """Train as the command line says."""
    exit_on_signals()
    logging.raiseExceptions = False  # a full disk would print a traceback for each line of the log
    folder = config_path or find_config_folder()
    around = AroundSweep(
        before=lambda _sections: require_extra("train", "A training run"), after=report_sweep
    )
    main(check_and_sync, config_path=folder, name="train", words=words, around=around)


def exit_on_signals() -> None:
    """End the process with 128 + the number of a signal, without a traceback.

    The signals are Ctrl-C's and a scheduler's SIGTERM.

    Elsewhere than in the main thread nothing changes, and a signal that the caller's shell ignores
    stays ignored. While it trains, the loop takes the signals over: it ends after the running step,
    with everything written.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _exit_with_signal)


def _exit_with_signal(number: int, _frame: FrameType | None) -> None:
    sys.stderr.write("Stopped on request.\n")
    sys.exit(128 + number)


def report_sweep(
    folder: Path, runs: Sequence[Path], *, gate: float | None = None
) -> list[Comparison]:
    """Print what each set of twins of a sweep says about its recipes.

    The comparisons are written to the folder, and returned.
    """
    from bridge.report.comparison import print_comparisons, write_comparisons
    from bridge.runtime.compare.arm import read_arm
    from bridge.runtime.compare.comparison import compare_arms  # SciPy is heavy

    if not is_first_process():
        return []
    arms = []
    for run in runs:
        arm = read_arm(run)
        if arm is not None:
            arms.append(arm)
    if len(arms) < 2:
        return []
    if gate is None:
        comparisons = compare_arms(arms)
    else:
        comparisons = compare_arms(arms, gate=gate)
    write_comparisons(folder, comparisons)
    print_comparisons(comparisons)
    return comparisons


def check_and_sync(config: ConfigContainer) -> StartRun:
    """Check a run, and write its precision into the configs in memory.

    Returns:
        The function that trains. It records the check and the sync in the run's folder first.

    Raises:
        CheckError: The check has errors. Those of the rules about scripts/train.py are left to
            `require_startable`, which asks them next.
    """
    run = Run.from_container(config, target=config.target or "auto")
    checked = check(run)
    errors = [finding for finding in checked.of("error") if finding.id not in BUILD_RULE_IDS]
    if errors:
        first, verdict = errors[0].id, format_verdict(checked)
        shown = []
        for finding in errors:
            shown.append(dataclasses.replace(finding, path=f"{finding.id} {finding.path}"))
        raise CheckError(
            f"The check stops this run ({verdict}). `precision-bridge explain {first}` explains "
            f"the rule; 'silence.{first}=why it is all right here' lets the run pass:",
            shown,
        )
    # `container` of front/decode.py resolved the name.
    precision = cast("MixedPrecisionConfig | None", config.mixed_precision)
    sync_report = apply_last_sync(config, precision, run.prediction)
    return partial(train, config, checked, sync_report)


def train(
    config: ConfigContainer, checked: Report, report: SyncReport | None, run_dir: Path
) -> None:
    """Record in the run's folder what was checked and written, and train."""
    for finding in checked.of("warning"):
        log.warning("%s %s", finding.id, finding)
    if report is not None:
        logged = {(finding.id, finding.path) for finding in checked.of("warning")}
        report.log(log, file=run_dir / "sync.txt", known=logged)
    write_run_files(run_dir, config, report, checked)
    # The loop imports torch and Megatron, which `--help` and `--cfg` can do without.
    from bridge.training.loop import pretrain

    summary = pretrain(config, run_dir=run_dir)
    if summary.failure is not None:
        raise TrainingError(summary.failure)
    if summary.stop_signal is not None:
        # Not 0: the scheduler that waits for the run has to see that it is not done.
        sys.exit(128 + summary.stop_signal)


def write_run_files(
    run_dir: Path, config: ConfigContainer, report: SyncReport | None, checked: Report | None = None
) -> None:
    """Write what a run is into its folder; only the first process of a launch writes.

    ``config.yaml`` and ``origins.json``; after a check ``findings.json``, with the choice made for
    `auto`; after a sync ``sync.txt`` and ``sync.json``.
    """
    if not is_first_process():
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    text = "# The run as it was: every field, after the precision was written into it.\n"
    text += yaml.safe_dump(container_to_dict(config), sort_keys=False)
    (run_dir / "config.yaml").write_text(text)
    (run_dir / ORIGINS).write_text(json.dumps(origins_to_dict(config), indent=2) + "\n")
    if checked is not None:
        content = report_to_dict(checked)
        if config.precision_choice:
            content["auto"] = config.precision_choice
        (run_dir / FINDINGS_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if report is not None:
        (run_dir / "sync.txt").write_text(render_sync(report))
        (run_dir / "sync.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
