"""The training command: check a run, write its precision into the configs, record it, and train.

`train.py mixed_precision=bf16_mixed` goes through these stages. Each function gets the result of the
function before it:

    result            function                          content
    CommandLine       command_line.py, from_arguments   flags and overrides
    RunInput          compose.py, compose               sections, recipe and origins of the YAML files
    Run               loader.py, make_run               `auto` resolved, fields stated over the recipe
    ConfigContainer   container.py, build_container     Megatron's config objects
    Run               check_and_sync                    the same run, with the values of these objects
    Report            preflight/rule_check.py, check         the findings of every rule
    SyncReport        preflight/last_sync.py            the precision, written into the objects
    StartRun          check_and_sync                    the function that `Job` calls in its folder
    a trained run     train                             records of the check and the sync, the loop

`main` calls the first two functions, `prepare_run` of job.py the others, and Hydra calls the `Job`.
The stages up to the last one run in memory before Hydra starts, so that a refused run leaves no
folder.
"""

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
from bridge.preflight.last_sync import apply_last_sync
from bridge.preflight.rule_check import Report, check
from bridge.preflight.run import Run
from bridge.report.findings import format_verdict, report_to_dict
from bridge.report.sync_table import render_sync
from bridge.rules.topics.system.train_script import RULES
from bridge.runtime.audit.setting import ORIGINS_FILE
from bridge.sync.report import SyncReport
from bridge.training.config import ConfigContainer

if TYPE_CHECKING:
    from bridge.registry.mixed_precision_config import MixedPrecisionConfig
    from bridge.runtime.compare.comparison import Comparison

FINDINGS_FILE = "findings.json"
BUILD_RULE_IDS = frozenset(rule.id for rule in RULES)
"""Ids of the rules that `require_startable` checks again. They cannot be silenced."""

log = logging.getLogger("train")


def main_train(arguments: Sequence[str] | None = None, *, config_path: Path | None = None) -> None:
    """Train the run of a command line.

    Args:
        arguments: The arguments of the command line. None: the arguments of this process.
        config_path: The folder of the Hydra tree. None: the folder that `find_config_folder` finds.
    """
    exit_on_signals()
    logging.raiseExceptions = False  # a full disk would print a traceback for each line of the log
    folder = config_path or find_config_folder()
    around = AroundSweep(
        before=lambda _sections: require_extra("train", "A training run"), after=report_sweep
    )
    main(check_and_sync, config_path=folder, name="train", arguments=arguments, around=around)


def exit_on_signals() -> None:
    """Let SIGINT (Ctrl-C) and SIGTERM end the process with 128 + the signal, without a traceback.

    Nothing changes outside the main thread, and a signal that the caller's shell ignores stays
    ignored. The training loop replaces these handlers: it ends after the running step, and saves.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _exit_with_signal)


def _exit_with_signal(number: int, _frame: FrameType | None) -> None:
    """Handle a signal."""
    sys.stderr.write("Stopped on request.\n")
    sys.exit(128 + number)


def report_sweep(
    folder: Path, runs: Sequence[Path], *, gate: float | None = None
) -> list[Comparison]:
    """Compare the recipes of a sweep, write the comparisons to its folder, and print them.

    Each set of twins is one comparison. Only the first process of a launch does it.

    Args:
        folder: The folder of the sweep.
        runs: The folders of its runs. A folder whose run cannot be compared is left out.
        gate: The largest gap of the losses that passes. None: the default of `compare_arms`.

    Returns:
        The comparisons; empty for fewer than two runs.
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
        The function that trains in a run folder. It records the check and the sync there first.

    Raises:
        CheckError: The check has errors. Errors of the rules about scripts/train.py are left to
            `require_startable`, which evaluates these rules next.
    """
    # Megatron computes values when it makes its objects. So the run is read again from the objects.
    run = Run.from_container(config, target=config.target or "auto")
    check_report = check(run)
    _require_no_errors(check_report)
    # `make_run` of front/loader.py has resolved the name of a recipe to its config.
    precision = cast("MixedPrecisionConfig | None", config.mixed_precision)
    sync_report = apply_last_sync(config, precision, run.prediction)
    return partial(train, config, check_report, sync_report)


def _require_no_errors(check_report: Report) -> None:
    """Refuse a run whose check has errors that `require_startable` does not report."""
    shown = []
    for finding in check_report.of("error"):
        if finding.id not in BUILD_RULE_IDS:
            shown.append(dataclasses.replace(finding, path=f"{finding.id} {finding.path}"))
    if not shown:
        return
    first, verdict = shown[0].id, format_verdict(check_report)
    raise CheckError(
        f"The check stops this run ({verdict}). `precision-bridge explain {first}` explains "
        f"the rule; 'silence.{first}=why it is all right here' lets the run pass:",
        shown,
    )


def train(
    config: ConfigContainer, check_report: Report, sync_report: SyncReport | None, run_dir: Path
) -> None:
    """Record the check and the sync in the run's folder, and train.

    Raises:
        TrainingError: The run ended with a failure.
        SystemExit: A signal stopped the run. The exit code is 128 + the signal.
    """
    warnings = check_report.of("warning")
    for finding in warnings:
        log.warning("%s %s", finding.id, finding)
    if sync_report is not None:
        logged = {(finding.id, finding.path) for finding in warnings}
        sync_report.log(log, file=run_dir / "sync.txt", known=logged)
    write_run_files(run_dir, config, sync_report, check_report)
    # The loop imports torch and Megatron, which `--help` and `--cfg` do not need.
    from bridge.training.loop import pretrain

    summary = pretrain(config, run_dir=run_dir)
    if summary.failure is not None:
        raise TrainingError(summary.failure)
    if summary.stop_signal is not None:
        # The exit code is not 0, so that a scheduler sees that the run is not finished.
        sys.exit(128 + summary.stop_signal)


def write_run_files(
    run_dir: Path,
    config: ConfigContainer,
    sync_report: SyncReport | None,
    check_report: Report | None = None,
) -> None:
    """Write the records of a run into its folder, in the first process of a launch.

    The files are ``config.yaml`` and ``origins.json``. After a check ``findings.json`` is added,
    with the choice made for `auto`. After a sync ``sync.txt`` and ``sync.json`` are added.
    """
    if not is_first_process():
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    config_text = "# The run as it was: every field, after the precision was written into it.\n"
    config_text += yaml.safe_dump(container_to_dict(config), sort_keys=False)
    (run_dir / "config.yaml").write_text(config_text)
    (run_dir / ORIGINS_FILE).write_text(json.dumps(origins_to_dict(config), indent=2) + "\n")
    if check_report is not None:
        content = report_to_dict(check_report)
        if config.precision_choice:
            content["auto"] = config.precision_choice
        (run_dir / FINDINGS_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if sync_report is not None:
        (run_dir / "sync.txt").write_text(render_sync(sync_report))
        (run_dir / "sync.json").write_text(json.dumps(sync_report.to_dict(), indent=2) + "\n")
