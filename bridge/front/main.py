"""`main`: a script's command line under Hydra, from its arguments to the exit code.

A run is composed and checked before Hydra starts, so that a refused run leaves no run folder. Then
`hydra.main` makes the run folder and the log, and calls the `Job` in it. Hydra runs a sweep: each
of its jobs is checked on the config that Hydra composed for it.

The exit code is 0 for success, 2 for a request that is refused (`BridgeError.exit_code`), and 1 for
a crash, with its traceback. With ``HYDRA_FULL_ERROR=1`` every error has its traceback.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from omegaconf import OmegaConf

from bridge.errors import BridgeError
from bridge.front.command_line import FULL_ERROR_VARIABLE, CommandLine
from bridge.front.compose import Sweeps, compose, load_named_recipes, register_with_hydra
from bridge.front.container import decode_sections
from bridge.front.errors import translate_errors
from bridge.front.job import CheckAndSync, Job, is_first_process, make_stated_run_dir, prepare_run
from bridge.front.loader import make_run
from bridge.front.search import DEFAULT_JOB_NAME
from bridge.read.run_input import RunInput
from bridge.read.run_keys import SECTION_CLASSES
from bridge.registry.hydra_group import restore_environment
from bridge.runtime.checkpoint.lock import require_unlocked

if TYPE_CHECKING:
    from hydra.conf import HydraConf

CLOCK_SECONDS = 1
"""Seconds by which the clock of a file system may be behind the clock of this machine."""


@dataclass(frozen=True, kw_only=True)
class AroundSweep:
    """A script's work before and after the runs of a sweep."""

    before: Callable[[Mapping[str, Mapping[str, Any]]], object] | None = None
    """Called with the sections of the config, without the values that are swept over.

    If it raises, the sweep is refused.
    """
    after: Callable[[Path, Sequence[Path]], object] | None = None
    """Called with the folder of the sweep and the folders of its runs, also if a run failed."""


def main(
    check_and_sync: CheckAndSync,
    *,
    config_path: Path,
    name: str = DEFAULT_JOB_NAME,
    arguments: Sequence[str] | None = None,
    around: AroundSweep = AroundSweep(),
) -> None:
    """Start the run or the sweep of a command line. A failure ends the process with an exit code.

    Args:
        check_and_sync: Checks a run, writes its precision into the configs, and returns the
            function that starts it.
        config_path: The folder of the Hydra tree, if the command line names no other.
        name: Hydra's name of the job and of its log.
        arguments: The arguments of the command line. None: the arguments of this process.
        around: The script's work before and after a sweep.
    """
    if arguments is None:
        arguments = sys.argv[1:]
    try:
        command_line = CommandLine.from_arguments(arguments, config_path=config_path, name=name)
        with translate_errors(command_line.overrides):
            _run_command_line(check_and_sync, command_line, around)
    except BridgeError as error:
        if os.environ.get(FULL_ERROR_VARIABLE) == "1":
            raise
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


def _run_command_line(
    check_and_sync: CheckAndSync, command_line: CommandLine, around: AroundSweep
) -> None:
    """Let Hydra answer flags such as ``--help``. Otherwise compose the config, and run or sweep."""
    flags, job = command_line.flags, Job(check_and_sync, command_line.name)
    if flags.version or flags.shell_completion:
        register_with_hydra()
        command_line.start_hydra(job)
    elif flags.experimental_rerun:
        register_with_hydra()
        with command_line.search.start_hydra_over_folders(command_line.name):
            command_line.start_hydra(job)
    elif flags.help or flags.hydra_help or flags.info:
        load_named_recipes(command_line.search, command_line.overrides)
        command_line.start_hydra(job)
    else:
        _run_composed(command_line, job, around)


def _run_composed(command_line: CommandLine, job: Job, around: AroundSweep) -> None:
    """Compose and check the config before Hydra starts. Then show the config, run, or sweep."""
    flags = command_line.flags
    sweeps = Sweeps.BY_MODE
    if flags.multirun:
        sweeps = Sweeps.ALLOWED
    with restore_environment():  # a recipe may set environment variables for its run
        composition = compose(
            command_line.search,
            command_line.overrides,
            job_name=command_line.name,
            is_complete=not flags.cfg,
            sweeps=sweeps,
        )
        settings = composition.hydra_settings
        is_sweep = flags.multirun or settings.mode == RunMode.MULTIRUN
        if not flags.cfg and not is_sweep:
            _run_once(command_line, job, composition.run_input, settings)
            return
        sections = _decode_and_check(composition.run_input)
        if not flags.cfg and around.before is not None:
            around.before(sections)
    if flags.cfg:
        command_line.start_hydra(job)
    else:
        _run_sweep(command_line, job, settings, around)


def _run_once(
    command_line: CommandLine, job: Job, run_input: RunInput, settings: HydraConf
) -> None:
    """Prepare the run. Then let Hydra make the run folder and the log, and start the run in it."""
    job.run = prepare_run(run_input, job.check_and_sync)
    make_stated_run_dir(job.run.container)
    checkpoint = job.run.container.checkpoint
    # Before Hydra makes a folder, or writes into the folder of another run.
    if is_first_process():
        require_unlocked(Path(settings.runtime.output_dir), "logging.run_dir")
        if checkpoint.save is not None:
            require_unlocked(Path(checkpoint.save), "checkpoint.save")
    command_line.start_hydra(job, _format_override("hydra.run.dir", settings.run.dir))
    if job.refused is not None:
        raise job.refused


def _run_sweep(
    command_line: CommandLine, job: Job, settings: HydraConf, around: AroundSweep
) -> None:
    """Let Hydra run the sweep, and do the script's work after it, also if a job failed."""
    folder = Path(settings.runtime.output_dir)
    start_time = time.time() - CLOCK_SECONDS
    try:
        command_line.start_hydra(job, _format_override("hydra.sweep.dir", settings.sweep.dir))
    finally:
        if around.after is not None:
            around.after(folder, _list_sweep_runs(folder, start_time))


def _list_sweep_runs(folder: Path, start_time: float) -> list[Path]:
    """Return the run folders that a sweep wrote since a time, in order of their jobs."""
    job_number_by_folder: dict[Path, int] = {}
    for path in folder.rglob(".hydra/hydra.yaml"):
        if path.stat().st_mtime >= start_time:
            job_number_by_folder[path.parents[1]] = int(OmegaConf.load(path).hydra.job.num)
    return sorted(job_number_by_folder, key=job_number_by_folder.__getitem__)


def _format_override(key: str, value: str) -> str:
    """Return an override whose value may have any characters."""
    return f"{key}={QuotedString(text=value, quote=Quote.single).with_quotes()}"


def _decode_and_check(run_input: RunInput) -> dict[str, dict[str, Any]]:
    """Return the decoded sections of our classes, and check the precision.

    The sections of Megatron's classes would need Megatron Core, so they are not decoded.

    Raises:
        BridgeError: A value of these sections, or the precision, is refused.
    """
    run, problems = make_run(run_input, resolves_auto=False)
    sections = decode_sections(run, SECTION_CLASSES, problems)
    problems.raise_any()
    if run.precision is not None:
        run.precision.finalize()
    return sections
