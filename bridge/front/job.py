"""`Job`: the run of a script as Hydra calls it, in the run folder that Hydra makes."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from bridge.errors import BridgeError, RunConfigError, TrainingError
from bridge.front.compose import read_job_config
from bridge.front.container import build_container, require_startable
from bridge.front.errors import RUN_FOLDER_NOTE
from bridge.front.loader import make_run
from bridge.read.run_input import RunInput
from bridge.registry.hydra_group import restore_environment
from bridge.training.config import ConfigContainer

StartRun = Callable[[Path], None]
"""Starts a run that was checked, in a run folder."""
CheckAndSync = Callable[[ConfigContainer], StartRun]
"""Checks a run, writes its precision into the configs in memory, and returns the function that
starts the run. It writes no file. `check_and_sync` of train.py is such a function.
"""

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of a disk that cannot be written to, because it is full for example."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that can begin."""

    container: ConfigContainer
    """The configs of the run, with the precision written into them."""
    start: StartRun
    """Starts the run in its folder."""


class Job:
    """The function that Hydra calls in the run folder that it made, for a run or for each job.

    Args:
        check_and_sync: Checks a run, writes its precision, and returns the function that starts it.
        name: Hydra's name of the job and of its log.
    """

    def __init__(self, check_and_sync: CheckAndSync, name: str) -> None:
        # Hydra names the job after the last part of its function's module.
        self.__module__ = f"{__name__}.{name}"
        self.check_and_sync = check_and_sync
        self.run: PreparedRun | None = None
        """The run that was prepared before Hydra started.

        None: this is a job of a sweep, which prepares the run of the config that Hydra composed for it.
        """
        self.refused: BridgeError | None = None
        """The error that ended the prepared run.

        It is kept and not raised, because Hydra would add a line to it.
        """

    def __call__(self, composed: DictConfig) -> None:
        """Start the run of a config that Hydra composed."""
        settings = HydraConfig.get()
        run_dir = Path(settings.runtime.output_dir)
        run = self.run
        try:
            with restore_environment():
                if run is None:
                    run = prepare_run(read_job_config(composed), self.check_and_sync)
                    make_stated_run_dir(run.container)
                run_dir = Path(run.container.logging.run_dir or run_dir)
                run.start(run_dir)
        except Exception as raised:
            error = _choose_error(raised, run_dir)
            if not isinstance(error, BridgeError):
                error.add_note(f"{RUN_FOLDER_NOTE}{run_dir}")
            elif self.run is not None:
                self.refused = error
                return
            if settings.mode == RunMode.MULTIRUN:
                _log_failure(error)
                if run is None:
                    _remove_empty_folder(run_dir, settings.job.name)
            if error is raised:
                raise
            raise error from raised


def _log_failure(error: Exception) -> None:
    """Log why a job of a sweep failed.

    Hydra shows the first failure only, and after the last job.
    """
    traceback = None
    if not isinstance(error, BridgeError):
        traceback = error
    log.log(logging.ERROR, "This job failed. %s", error, exc_info=traceback)


def _remove_empty_folder(run_dir: Path, job_name: str) -> None:
    """Remove the run folder of a refused job, unless it has files."""
    names = {path.name for path in run_dir.iterdir()}
    if names <= {".hydra", f"{job_name}.log"}:
        shutil.rmtree(run_dir)


def _choose_error(error: Exception, run_dir: Path) -> Exception:
    """Return the error to show.

    An error of the disk becomes an error of this package. On a full disk the end of a failed run
    fails too. Then the error of this package that ended the run is shown.
    """
    if not isinstance(error, OSError) or error.errno not in DISK_ERRORS:
        return error
    earlier = error.__context__
    while earlier is not None:
        if isinstance(earlier, BridgeError):
            return earlier
        earlier = earlier.__context__
    path = str(error.filename or run_dir)
    rule = f"the files of the run must be written, got {path!r} ({error.strerror})"
    return TrainingError(f"logging.run_dir: {rule}. Make room, or choose another folder.")


def is_first_process() -> bool:
    """Return whether this process is the first of its launch, which writes the files of the run."""
    return os.environ.get("RANK", "0") == "0"


def prepare_run(run_input: RunInput, check_and_sync: CheckAndSync) -> PreparedRun:
    """Make the configs of a run, check the run, and write its precision into the configs.

    Everything happens in memory.

    Args:
        run_input: The composed sections of the run.
        check_and_sync: Checks the run, writes its precision, and returns the function that starts it.

    Raises:
        BridgeError: The run cannot begin.
    """
    run, problems = make_run(run_input)
    container = build_container(run, problems)
    start = check_and_sync(container)
    # The check comes after the sync, because the precision decides some of the checked values.
    require_startable(container, run, problems)
    return PreparedRun(container=container, start=start)


def make_stated_run_dir(container: ConfigContainer) -> None:
    """Make the run folder that the run states, in the first process of a launch.

    Hydra makes the folder of a run that states none.

    Raises:
        RunConfigError: The folder cannot be made, or no file can be written into it.
    """
    folder = container.logging.run_dir
    if folder is not None and is_first_process():
        make_run_dir(folder)


def make_run_dir(folder: str) -> None:
    """Make the folder of a run.

    Raises:
        RunConfigError: The folder cannot be made, or no file can be written into it.
    """
    rule = None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be made ({(error.strerror or 'an error').lower()})"
    else:
        if not os.access(folder, os.W_OK):
            rule = "cannot be written"
    if rule is not None:
        raise RunConfigError.of("logging.run_dir", rule, folder, "Give another folder.")
