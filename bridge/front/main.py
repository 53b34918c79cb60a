"""A script's command line: Hydra's flags and overrides, our answers to mistakes, and exit codes.

The run is composed, its container is built and the work is prepared before Hydra starts: a run that
is refused leaves no run folder. `hydra.main` then makes the run folder and the log, and does the
work in it. A sweep is Hydra's, and each of its jobs is prepared from the config that Hydra composed
for it.

Exit codes: 0; 2 for what cannot be done as asked (`BridgeError.exit_code`); 1 for a crash, with its
traceback. With ``HYDRA_FULL_ERROR=1`` every error comes with its traceback.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from bridge.errors import BridgeError, RunConfigError, TrainingError, close_matches
from bridge.front.compose import as_hydra_reads, compose, given_of_job, prepare_composing, register
from bridge.front.decode import container, decoded_sections, require_startable
from bridge.front.errors import CRASH, in_our_words
from bridge.front.loader import config_folder, run_of
from bridge.front.search import JOB, VERSION_BASE, Search
from bridge.preflight.problems import Problems
from bridge.preflight.run import Run
from bridge.read.given_run import GivenRun
from bridge.read.keys import KEYS, SECTIONS
from bridge.registry.hydra_group import own_environment
from bridge.runtime.checkpoint.lock import require_unlocked
from bridge.training.config import ConfigContainer

Work = Callable[[Path], None]
"""The work on a run that is prepared, in its folder."""
Prepare = Callable[["ConfigContainer"], Work]
"""A script's preparation of a run, which writes no file and returns the work."""


@dataclass(frozen=True, kw_only=True)
class AroundSweep:
    """A script's work before and after the runs of a sweep."""

    before: Callable[[Mapping[str, Mapping[str, Any]]], object] | None = None
    """Called with the sections of the config, without the values that are swept over; its error
    refuses the sweep."""
    after: Callable[[Path, Sequence[Path]], object] | None = None
    """Called with the folder of the sweep and those of its runs, in order, also when a run of it
    failed."""


SWITCHES = (
    ("--help", "-h"),
    ("--hydra-help",),
    ("--version",),
    ("--resolve",),
    ("--run", "-r"),
    ("--multirun", "-m"),
    ("--shell-completion", "-sc"),
)
VALUES = (
    ("--package", "-p"),
    ("--config-path", "-cp"),
    ("--config-name", "-cn"),
    ("--config-dir", "-cd"),
    ("--experimental-rerun",),
)
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
"""Hydra's flags: switches, those with a value, and the values of ``--info``."""
OURS = ("overrides", "config_path", "config_name")
"""Parsed words that Hydra gets from us."""
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
    """Do a script's work as the command line says; end the process with an exit code on failure.

    `name` is Hydra's of the job and of its log; `words` are those of the process where they are
    None.
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


class _Parser(argparse.ArgumentParser):
    """The parser of Hydra's flags, which names the nearest key for an unknown flag."""

    def error(self, message: str) -> NoReturn:
        """Raise RunConfigError."""
        flag = ""
        for word in message.split():
            if word.startswith("--"):
                flag = word.lstrip("-")
                break
        near = close_matches(flag, KEYS)
        if flag in KEYS:
            near = [flag]
        hint = "`--help` lists the flags; a setting is KEY=VALUE."
        if near:
            hint = f"Write {near[0]}=VALUE."
        raise RunConfigError(f"{message}. {hint}", near)


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A command line of Hydra."""

    flags: argparse.Namespace
    overrides: list[str]
    """The words that are no flags, as Hydra reads them."""
    search: Search
    name: str
    """Hydra's name of the job and of its log."""

    @classmethod
    def of(cls, words: Sequence[str], *, config_path: Path, name: str) -> CommandLine:
        """Return the parsed words.

        The tree is that of `config_path` where no flag names another.
        """
        parser = _Parser(add_help=False)
        parser.add_argument("overrides", nargs="*")
        for spellings in SWITCHES:
            parser.add_argument(*spellings, action="store_true")
        for spellings in VALUES:
            parser.add_argument(*spellings)
        parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
        parser.add_argument("--info", "-i", const="all", nargs="?", choices=INFO)
        flags = parser.parse_intermixed_args(words)
        folder = _config_path(flags.config_path) or str(config_path)
        search = Search(folder, flags.config_name or "config", flags.config_dir)
        return cls(flags=flags, overrides=as_hydra_reads(flags.overrides), search=search, name=name)

    def start_hydra(self, job: Job, *more: str) -> None:
        """Give the process to Hydra, with further overrides.

        The errors of Hydra and of the job are raised.
        """
        words = []
        for name, value in vars(self.flags).items():
            flag = f"--{name.replace('_', '-')}"
            if name in OURS or not value:
                continue
            words.append(flag)
            if value is not True:
                words[-1] = f"{flag}={value}"
        before = sys.argv
        full_error = os.environ.get(FULL_ERROR)
        sys.argv = [sys.argv[0], *words, *self.overrides, *more]
        # Without it Hydra prints an error and ends the process with exit code 1.
        os.environ[FULL_ERROR] = "1"
        try:
            decorate = hydra.main(self.search.main, self.search.config_name, VERSION_BASE)
            decorate(job)()
        finally:
            sys.argv = before
            del os.environ[FULL_ERROR]
            if full_error is not None:
                os.environ[FULL_ERROR] = full_error


def _config_path(given: str | None) -> str | None:
    """Return the folder that ``--config-path`` names.

    It is looked up here, or else in the script's folder, where Hydra looks.
    """
    if given is None or "://" in given:
        return given
    by_script = Path(sys.argv[0]).resolve().parent / given
    if by_script.is_dir() and not Path(given).is_dir():
        return str(by_script)
    return str(config_folder(given))


def _run(prepare: Prepare, line: CommandLine, around: AroundSweep) -> None:
    flags, job = line.flags, Job(prepare, line.name)
    if flags.version or flags.shell_completion:
        register()
        line.start_hydra(job)
    elif flags.experimental_rerun:
        register()
        with line.search.started(line.name):
            line.start_hydra(job)
    elif flags.help or flags.hydra_help or flags.info:
        prepare_composing(line.search, line.overrides)
        line.start_hydra(job)
    else:
        _run_composed(line, job, around)


def _run_composed(line: CommandLine, job: Job, around: AroundSweep) -> None:
    """Refuse what can be refused before Hydra starts.

    Then show the config, run the job, or sweep.
    """
    flags = line.flags
    may_sweep = None
    if flags.multirun:
        may_sweep = True
    with own_environment():  # the variables that a recipe sets are those of its own run
        given, settings = compose(
            line.search,
            line.overrides,
            job_name=line.name,
            is_complete=not flags.cfg,
            may_sweep=may_sweep,
        )
        is_sweep = flags.multirun or settings.mode == RunMode.MULTIRUN
        if not flags.cfg and not is_sweep:
            _run_once(line, job, given, settings)
            return
        sections = _check(given)
        if not flags.cfg and around.before is not None:
            around.before(sections)
    if flags.cfg:
        line.start_hydra(job)
    else:
        _sweep(line, job, settings, around)


def _run_once(line: CommandLine, job: Job, given: GivenRun, settings: Any) -> None:
    """Prepare the run, then have Hydra make the run folder and the log, and do the work in it."""
    config, work = _prepared(*run_of(given), job.prepare)
    if is_first_process():  # before Hydra makes a folder, or writes into that of another run
        require_unlocked(Path(settings.runtime.output_dir), "logging.run_dir")
        if config.checkpoint.save is not None:
            require_unlocked(Path(config.checkpoint.save), "checkpoint.save")
    job.made = config, work
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
            numbers: dict[Path, int] = {}
            for path in folder.rglob(".hydra/hydra.yaml"):
                if path.stat().st_mtime >= began:
                    numbers[path.parents[1]] = int(OmegaConf.load(path).hydra.job.num)
            around.after(folder, sorted(numbers, key=numbers.__getitem__))


def _override(key: str, value: str) -> str:
    """Return an override with a value of any characters."""
    return f"{key}={QuotedString(text=value, quote=Quote.single).with_quotes()}"


class Job:
    """A script's work as Hydra calls it, in the run folder that Hydra made."""

    def __init__(self, prepare: Prepare, name: str) -> None:
        # Hydra names the job after the last part of its function's module.
        self.__module__ = f"{__name__}.{name}"
        self.prepare = prepare
        self.made: tuple[ConfigContainer, Work] | None = None
        """The run that was prepared before Hydra started; None: that of the config of a sweep's
        job."""
        self.refused: BridgeError | None = None
        """The error of ours that ended a run which was prepared before Hydra started."""

    def __call__(self, config: DictConfig) -> None:
        """Do the work on the config's run."""
        settings: Any = HydraConfig.get()
        run_dir = Path(settings.runtime.output_dir)
        made = self.made
        try:
            with own_environment():
                if made is None:
                    made = _prepared(*run_of(given_of_job(config)), self.prepare)
                ready, work = made
                run_dir = Path(ready.logging.run_dir or run_dir)
                work(run_dir)
        except Exception as raised:
            error = _of_disk(raised, run_dir)
            if not isinstance(error, BridgeError):
                error.add_note(f"{CRASH}{run_dir}")
            elif self.made is not None:
                self.refused = error
                return
            if settings.mode == RunMode.MULTIRUN:
                _log_failure(error, run_dir, settings.job.name, was_made=made is not None)
            if error is raised:
                raise
            raise error from raised


def _log_failure(error: Exception, run_dir: Path, job_name: str, *, was_made: bool) -> None:
    """Log why a job of a sweep failed.

    Hydra shows the first failure only, and after the last job.
    """
    traceback = None
    if not isinstance(error, BridgeError):
        traceback = error
    log.log(logging.ERROR, "This job failed. %s", error, exc_info=traceback)
    if was_made:
        return
    names = {path.name for path in run_dir.iterdir()}
    if names <= {".hydra", f"{job_name}.log"}:
        shutil.rmtree(run_dir)  # Hydra made it before this job was refused


def _of_disk(error: Exception, run_dir: Path) -> Exception:
    """Return the error to show: one sentence where a file of the run could not be written.

    On a full disk the end of a run fails too: the error that ended the run is shown where it is one
    of ours.
    """
    if not isinstance(error, OSError) or error.errno not in DISK:
        return error
    earlier = error.__context__
    while earlier is not None:
        if isinstance(earlier, BridgeError):
            return earlier
        earlier = earlier.__context__
    place = str(error.filename or run_dir)
    rule = f"the files of the run must be written, got {place!r} ({error.strerror})"
    return TrainingError(f"logging.run_dir: {rule}. Make room, or choose another folder.")


def is_first_process() -> bool:
    """Return whether this process is the one that writes about the run."""
    return os.environ.get("RANK", "0") == "0"


def _prepared(run: Run, problems: Problems, prepare: Prepare) -> tuple[ConfigContainer, Work]:
    """Return a run that can begin, and its work; its own folder is made where one is named."""
    config = container(run, problems)
    work = prepare(config)
    require_startable(config, run, problems)
    folder = config.logging.run_dir
    rule = ""
    if folder is not None and is_first_process():
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            rule = f"cannot be made ({(error.strerror or 'an error').lower()})"
        else:
            if not os.access(folder, os.W_OK):
                rule = "cannot be written"
    if rule:
        raise RunConfigError.of("logging.run_dir", rule, folder, "Give another folder.")
    return config, work


def _check(given: GivenRun) -> dict[str, dict[str, Any]]:
    """Return the decoded sections, after every check that can do without Megatron Core.

    The fields of Megatron's classes are not looked at.
    """
    run, problems = run_of(given, resolve=False)
    sections = decoded_sections(run, SECTIONS, problems)
    problems.raise_any()
    if run.precision is not None:
        run.precision.finalize()
    return sections
