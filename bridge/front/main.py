"""A script's command line under Hydra: what is refused, what is run, and the exit code.

A run is composed and checked before Hydra starts, so that a run that is refused leaves no run
folder. `hydra.main` then makes the run folder and the log, and starts the run in it (`job.py`). A
sweep is Hydra's: each of its jobs is checked on the config that Hydra composed for it.

Exit codes: 0; 2 for what cannot be done as asked (`BridgeError.exit_code`); 1 for a crash, with its
traceback. With ``HYDRA_FULL_ERROR=1`` every error comes with its traceback.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from omegaconf import OmegaConf

from bridge.errors import BridgeError
from bridge.front.command_line import FULL_ERROR, CommandLine
from bridge.front.compose import compose, load_named_recipes, register
from bridge.front.decode import decoded_sections
from bridge.front.errors import in_our_words
from bridge.front.job import Job, PrepareRun, is_first_process, prepared_run
from bridge.front.loader import run_of
from bridge.front.search import JOB
from bridge.read.given_run import GivenRun
from bridge.read.keys import SECTIONS
from bridge.registry.hydra_group import own_environment
from bridge.runtime.checkpoint.lock import require_unlocked

CLOCK_SECONDS = 1
"""The clock of a file system may be behind this machine's by that much."""


@dataclass(frozen=True, kw_only=True)
class AroundSweep:
    """A script's work before and after the runs of a sweep."""

    before: Callable[[Mapping[str, Mapping[str, Any]]], object] | None = None
    """Called with the sections of the config, without the values that are swept over.

    An error of it refuses the sweep.
    """
    after: Callable[[Path, Sequence[Path]], object] | None = None
    """Called with the folders of the sweep and of its runs, in order, also when a run failed."""


def main(
    prepare: PrepareRun,
    *,
    config_path: Path,
    name: str = JOB,
    words: Sequence[str] | None = None,
    around: AroundSweep = AroundSweep(),
) -> None:
    """Start the runs of a command line; end the process with an exit code on failure.

    Args:
        prepare: Checks a run, writes its precision into the configs, and returns the function that
            starts it.
        config_path: The folder of the Hydra tree, where the command line names no other.
        name: Hydra's name of the job and of its log.
        words: The words of the command line; those of the process where they are None.
        around: The script's work before and after a sweep.
    """
    if words is None:
        words = sys.argv[1:]
    try:
        line = CommandLine.of(words, config_path=config_path, name=name)
        with in_our_words(line.overrides):
            _run(prepare, line, around)
    except BridgeError as error:
        if os.environ.get(FULL_ERROR) == "1":
            raise
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


def _run(prepare: PrepareRun, line: CommandLine, around: AroundSweep) -> None:
    flags, job = line.flags, Job(prepare, line.name)
    if flags.version or flags.shell_completion:
        register()
        line.start_hydra(job)
    elif flags.experimental_rerun:
        register()
        with line.search.started(line.name):
            line.start_hydra(job)
    elif flags.help or flags.hydra_help or flags.info:
        load_named_recipes(line.search, line.overrides)
        line.start_hydra(job)
    else:
        _run_composed(line, job, around)


def _run_composed(line: CommandLine, job: Job, around: AroundSweep) -> None:
    """Refuse what can be refused before Hydra starts; then show the config, run, or sweep."""
    flags = line.flags
    may_sweep = None
    if flags.multirun:
        may_sweep = True
    with own_environment():  # the variables that a recipe sets are those of its own run
        composed, settings = compose(
            line.search,
            line.overrides,
            job_name=line.name,
            is_complete=not flags.cfg,
            may_sweep=may_sweep,
        )
        is_sweep = flags.multirun or settings.mode == RunMode.MULTIRUN
        if not flags.cfg and not is_sweep:
            _run_once(line, job, composed, settings)
            return
        sections = _checked_sections(composed)
        if not flags.cfg and around.before is not None:
            around.before(sections)
    if flags.cfg:
        line.start_hydra(job)
    else:
        _sweep(line, job, settings, around)


def _run_once(line: CommandLine, job: Job, composed: GivenRun, settings: Any) -> None:
    """Prepare the run; then have Hydra make the run folder and the log, and start the run."""
    job.run = prepared_run(composed, job.prepare)
    checkpoint = job.run.config.checkpoint
    if is_first_process():  # before Hydra makes a folder, or writes into that of another run
        require_unlocked(Path(settings.runtime.output_dir), "logging.run_dir")
        if checkpoint.save is not None:
            require_unlocked(Path(checkpoint.save), "checkpoint.save")
    line.start_hydra(job, _override("hydra.run.dir", settings.run.dir))
    if job.refused is not None:
        raise job.refused  # after Hydra's end, which would add a line of its own


def _sweep(line: CommandLine, job: Job, settings: Any, around: AroundSweep) -> None:
    folder = Path(settings.runtime.output_dir)
    began = time.time() - CLOCK_SECONDS
    try:
        line.start_hydra(job, _override("hydra.sweep.dir", settings.sweep.dir))
    finally:
        if around.after is not None:
            around.after(folder, _runs_of_sweep(folder, began))


def _runs_of_sweep(folder: Path, began: float) -> list[Path]:
    """Return the run folders that a sweep wrote since a time, in order of their jobs."""
    numbers: dict[Path, int] = {}
    for path in folder.rglob(".hydra/hydra.yaml"):
        if path.stat().st_mtime >= began:
            numbers[path.parents[1]] = int(OmegaConf.load(path).hydra.job.num)
    return sorted(numbers, key=numbers.__getitem__)


def _override(key: str, value: str) -> str:
    """Return an override with a value of any characters."""
    return f"{key}={QuotedString(text=value, quote=Quote.single).with_quotes()}"


def _checked_sections(composed: GivenRun) -> dict[str, dict[str, Any]]:
    """Return the decoded sections, after every check that can do without Megatron Core.

    The fields of Megatron's classes are not looked at.
    """
    run, problems = run_of(composed, resolve=False)
    sections = decoded_sections(run, SECTIONS, problems)
    problems.raise_any()
    if run.precision is not None:
        run.precision.finalize()
    return sections
