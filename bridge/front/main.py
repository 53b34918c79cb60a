"""A script's command line: Hydra's flags and overrides, our answers to mistakes, and exit codes.

The config is composed once, its container is built once, and the run is prepared, all in memory: a run that is refused
leaves no run folder. Hydra gets the composed config and adds the run folder and the log. A sweep is Hydra's, and each
of its jobs does the same with the config that Hydra composed for it.

Exit codes: 0; 2 for what cannot be done as asked (`BridgeError.exit_code`); 1 for a crash, with its traceback. With
``HYDRA_FULL_ERROR=1`` every error comes with its traceback.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from bridge.checkpoint.lock import require_unlocked
from bridge.errors import BridgeError, RunConfigError, TrainingError, close_matches
from bridge.front.compose import (
    CRASH,
    JOB,
    VERSION_BASE,
    Composition,
    Search,
    as_hydra_reads,
    composed,
    in_our_words,
    own_environment,
    prepared,
    register,
    retraced,
)
from bridge.front.decode import container, decoded_sections, require_startable
from bridge.front.loader import RunValues, config_folder, run_of
from bridge.front.problems import KEYS, SECTIONS
from bridge.training.config import ConfigContainer

Work = Callable[[Path], None]
"""The work on a run that is prepared, in its folder."""
Prepare = Callable[["ConfigContainer"], Work]
"""A script's preparation of a run, which writes no file and returns the work."""


@dataclass(frozen=True, kw_only=True)
class AroundSweep:
    """A script's work before and after the runs of a sweep."""

    before: Callable[[Mapping[str, Mapping[str, Any]]], object] | None = None
    """Called with the sections of the config, without the values that are swept over; its error refuses the sweep."""
    after: Callable[[Path, Sequence[Path]], object] | None = None
    """Called with the folder of the sweep and those of its runs, in order, also when a run of it failed."""


FULL_ERROR = "HYDRA_FULL_ERROR"
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Reasons for which a disk takes no more."""
CLOCK_SECONDS = 1
"""A file system's clock may be behind ours by that much."""

log = logging.getLogger(__name__)


def main(
    prepare: Prepare,
    *,
    config_path: Path,
    name: str = JOB,
    words: Sequence[str] | None = None,
    around: AroundSweep = AroundSweep(),
) -> None:
    """Do a script's work as the command line says, and end the process with an exit code where that fails.

    `name` is Hydra's of the job and of its log; `words` are those of the process where they are None.
    """
    try:
        arguments = _parsed(words)
        arguments.overrides = as_hydra_reads(arguments.overrides)
        own_folder = _config_path(arguments.config_path) or str(config_path)
        search = Search(own_folder, arguments.config_name or "config", arguments.config_dir)
        with in_our_words(arguments.overrides):
            _run(prepare, arguments, search, name, around)
    except BridgeError as error:
        if os.environ.get(FULL_ERROR) == "1":
            raise
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


def _parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags and overrides of a command line; RunConfigError with the nearest key for an unknown flag."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        flag = next((word.lstrip("-") for word in message.split() if word.startswith("--")), "")
        near = [flag] if flag in KEYS else close_matches(flag, KEYS)
        hint = f"Write {near[0]}=VALUE." if near else "`--help` lists the flags; a setting is KEY=VALUE."
        raise RunConfigError(f"{message}. {hint}", near)

    parser.error = refuse  # type: ignore[method-assign]
    return parser.parse_intermixed_args(words)


def _config_path(given: str | None) -> str | None:
    """Return the folder that ``--config-path`` names: here, or else in the script's folder, where Hydra looks."""
    if given is None or "://" in given:
        return given
    by_script = Path(sys.argv[0]).resolve().parent / given
    return str(by_script if by_script.is_dir() and not Path(given).is_dir() else config_folder(given))


def _run(prepare: Prepare, arguments: argparse.Namespace, search: Search, name: str, around: AroundSweep) -> None:
    overrides: list[str] = arguments.overrides
    if arguments.experimental_rerun:
        register()
        hydra.main(version_base=VERSION_BASE)(Task(prepare))()
    elif arguments.shell_completion or arguments.help or arguments.hydra_help or arguments.info:
        if arguments.shell_completion:
            register()
        else:
            prepared(search, overrides)
        arguments.config_path = None  # Hydra would look for it in this module's folder
        _run_hydra(arguments, get_args_parser(), lambda _: None, search.main, search.config_name)
    elif arguments.cfg:
        with composed(search, overrides, job_name=name) as composition:
            _check(composition)
            with _started(composition, name) as app:
                app.show_cfg(search.config_name, overrides, arguments.cfg, arguments.package, arguments.resolve)
    elif arguments.multirun or _is_multirun(search, overrides):
        _sweep(prepare, search, [*overrides, "hydra.mode=MULTIRUN"], name, around)
    else:
        _run_once(prepare, search, [*overrides, "hydra.mode=RUN"], name)


def _sweep(prepare: Prepare, search: Search, overrides: list[str], name: str, around: AroundSweep) -> None:
    with own_environment(), composed(search, overrides, sweep=True, job_name=name) as composition:
        sections = _check(composition)
        if around.before is not None:
            around.before(sections)
        folder = Path(HydraConfig.get().runtime.output_dir)
    began = time.time() - CLOCK_SECONDS
    try:
        with _started(composition, name) as app:
            app.multirun(search.config_name, Task(prepare), overrides)
    finally:
        if around.after is not None:
            nodes = [path for path in folder.rglob(".hydra/hydra.yaml") if path.stat().st_mtime >= began]
            numbers = {path.parents[1]: int(OmegaConf.load(path).hydra.job.num) for path in nodes}
            around.after(folder, sorted(numbers, key=numbers.__getitem__))


def _run_once(prepare: Prepare, search: Search, overrides: list[str], name: str) -> None:
    """Prepare the run, then have Hydra make the run folder and the log, and do the work in it."""
    with composed(search, overrides, job_name=name) as composition:
        run = _prepared(run_of(composition.given(name=search.config_name, missing=False)), prepare)
        if is_first_process():  # before Hydra makes a folder, or writes into that of another run
            require_unlocked(Path(HydraConfig.get().runtime.output_dir), "logging.run_dir")
            if run.config.checkpoint.save is not None:
                require_unlocked(Path(run.config.checkpoint.save), "checkpoint.save")
        task = Task(prepare, run)
        with _started(composition, name) as app:
            app.run(search.config_name, task, overrides)
    if task.refused is not None:
        raise task.refused  # after Hydra's end, which would add a line of its own


class Prepared(NamedTuple):
    """A run that can begin."""

    config: ConfigContainer
    work: Work


class Task:
    """A script's work as Hydra calls it, in the run folder that Hydra made."""

    def __init__(self, prepare: Prepare, made: Prepared | None = None) -> None:
        self.prepare = prepare
        self.made = made
        """The run; None: that of the config that Hydra composed for a job of a sweep."""
        self.refused: BridgeError | None = None
        """The error of ours that ended a run which was made before Hydra started."""

    def __call__(self, config: DictConfig) -> None:
        """Do the work on the config's run."""
        settings: Any = HydraConfig.get()
        run_dir = Path(settings.runtime.output_dir)
        run = self.made
        try:
            with own_environment():
                run = run or _prepared(run_of(retraced(config, settings).given(missing=False)), self.prepare)
                run_dir = Path(run.config.logging.run_dir or run_dir)
                run.work(run_dir)
        except Exception as raised:
            error = _of_disk(raised, run_dir)
            if not isinstance(error, BridgeError):
                error.add_note(f"{CRASH}{run_dir}")
            elif self.made is not None:
                self.refused = error
                return
            if settings.mode == RunMode.MULTIRUN:
                _log_failure(error, run_dir, settings.job.name, was_made=run is not None)
            if error is raised:
                raise
            raise error from raised


def _log_failure(error: Exception, run_dir: Path, job_name: str, *, was_made: bool) -> None:
    """Log why a job of a sweep failed: Hydra shows the first failure only, and after the last job."""
    log.log(logging.ERROR, "This job failed. %s", error, exc_info=None if isinstance(error, BridgeError) else error)
    if not was_made and {path.name for path in run_dir.iterdir()} <= {".hydra", f"{job_name}.log"}:
        shutil.rmtree(run_dir)  # Hydra made it before this job was refused


def _of_disk(error: Exception, run_dir: Path) -> Exception:
    """Return the error to show: one sentence where a file of the run could not be written.

    On a full disk the end of a run fails too: the error that ended the run is shown where it is one of ours.
    """
    if not isinstance(error, OSError) or error.errno not in DISK:
        return error
    earlier = error.__context__
    while earlier is not None:
        if isinstance(earlier, BridgeError):
            return earlier
        earlier = earlier.__context__
    rule = f"the files of the run must be written, got {str(error.filename or run_dir)!r} ({error.strerror})"
    return TrainingError(f"logging.run_dir: {rule}. Make room, or choose another folder.")


def is_first_process() -> bool:
    """Return whether this process is the one that writes about the run."""
    return os.environ.get("RANK", "0") == "0"


def _prepared(values: RunValues, prepare: Prepare) -> Prepared:
    """Return a run that can begin; its own folder is made where one is named."""
    config = container(values)
    work = prepare(config)
    require_startable(config, values)
    folder, rule = config.logging.run_dir, ""
    if folder is not None and is_first_process():
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            rule = "" if os.access(folder, os.W_OK) else "cannot be written"
        except OSError as error:
            rule = f"cannot be made ({(error.strerror or 'an error').lower()})"
    if rule:
        raise RunConfigError.of("logging.run_dir", rule, folder, "Give another folder.")
    return Prepared(config, work)


def _check(composition: Composition) -> dict[str, dict[str, Any]]:
    """Return the sections; refused is what can be without Megatron Core: everything but the fields of its classes."""
    run = run_of(composition.given(), resolve=False)
    sections = decoded_sections(run, SECTIONS)
    run.problems.raise_any()
    if run.precision is not None:
        run.precision.finalize()
    return sections


def _is_multirun(search: Search, overrides: Sequence[str]) -> bool:
    if any(word.lower().startswith("hydra.mode=") for word in overrides):
        return any(word.lower() == "hydra.mode=multirun" for word in overrides)
    return str(search.primary("hydra.mode")).upper() == RunMode.MULTIRUN.name


@contextmanager
def _started(composition: Composition, name: str) -> Iterator[Hydra]:
    """Start Hydra over the loader that composed, which hands it the same config."""
    app = Hydra(task_name=name, config_loader=composition.loader)
    GlobalHydra.instance().initialize(app)
    try:
        yield app
    finally:
        GlobalHydra.instance().clear()
