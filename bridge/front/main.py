"""A script's command line: Hydra's flags and overrides, our answers to mistakes, and exit codes.

The config is composed and checked before Hydra starts the job, so that a mistake is told before a run folder is made.
Exit codes: 0; 2 for what cannot be done as asked (`BridgeError.exit_code`); 1 for a crash, with its traceback. With
``HYDRA_FULL_ERROR=1`` every error comes with its traceback.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra._internal.utils import compute_search_path_dir, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from bridge.errors import BridgeError
from bridge.front.compose import VERSION_BASE, Composition, as_hydra_reads, composed, prepared
from bridge.front.errors import COMPOSITION_ERRORS, told
from bridge.front.search import Search
from bridge.front.source import register

if TYPE_CHECKING:
    import argparse

    from omegaconf import DictConfig

    from bridge.training.config import ConfigContainer

__all__ = ["Job", "main"]

Job = Callable[["ConfigContainer", Path], None]
"""What a script does with a run and its folder."""

FULL_ERROR = "HYDRA_FULL_ERROR"
CRASH = "Run folder: "

log = logging.getLogger(__name__)


def main(job: Job, *, config_path: Path, config_name: str = "config") -> None:
    """Run `job` as the command line says, and end the process with an exit code where that fails.

    Args:
        job: Called once per run with its config and its folder.
        config_path: Folder of the primary config.
        config_name: The primary config, without ``.yaml``.
    """
    sys.argv[1:] = as_hydra_reads(sys.argv[1:])
    arguments = get_args_parser().parse_args()
    script = Path(sys.argv[0]).resolve()
    search = Search(
        main=compute_search_path_dir(str(script), None, arguments.config_path or str(config_path)) or str(config_path),
        extra=Path(arguments.config_dir) if arguments.config_dir else None,
        config_name=arguments.config_name or config_name,
    )
    if os.environ.get(FULL_ERROR) == "1":
        _run(job, arguments, search)
        return
    try:
        with _errors_raised():
            _run(job, arguments, search)
    except BridgeError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)


def _run(job: Job, arguments: argparse.Namespace, search: Search) -> None:
    """Check what was asked for, then let Hydra do it."""
    if arguments.shell_completion or arguments.experimental_rerun:
        register()
    else:
        _check(arguments, search)
    start = hydra.main(config_path=search.main, config_name=search.config_name, version_base=VERSION_BASE)
    refused: list[BridgeError] = []
    try:
        start(_task(job, refused))()
    except COMPOSITION_ERRORS as error:
        if any(note.startswith(CRASH) for note in getattr(error, "__notes__", ())):
            raise
        raise told(error, arguments.overrides) from error
    if refused:
        raise refused[0]


def _check(arguments: argparse.Namespace, search: Search) -> None:
    """Refuse what the run would refuse, without Megatron where nothing is run; only prepare what is listed."""
    sweep = arguments.multirun or any(word.lower() == "hydra.mode=multirun" for word in arguments.overrides)
    if arguments.help or arguments.hydra_help or arguments.info:
        prepared(search, arguments.overrides)
        return
    with composed(search, arguments.overrides, sweep=sweep) as composition:
        if sweep or arguments.cfg:
            composition.check()
        else:
            composition.container()


def _task(job: Job, refused: list[BridgeError]) -> Callable[[DictConfig], None]:
    """Return `job` as Hydra calls it; what a single job refuses is put into `refused`."""

    @functools.wraps(job)  # Hydra names the job after the script that defines it
    def task(config: DictConfig) -> None:
        settings: Any = HydraConfig.get()
        run_dir = Path(settings.runtime.output_dir)
        try:
            composition = Composition.of(config, settings, GlobalHydra.instance().config_loader())
            container = composition.container()
            job(container, Path(container.logging.run_dir or run_dir))
        except Exception as error:
            crashed = not isinstance(error, BridgeError)
            if crashed:
                error.add_note(f"{CRASH}{run_dir}")
            if settings.mode != RunMode.MULTIRUN and isinstance(
                error, BridgeError
            ):  # said after Hydra's end, without a line of its own
                refused.append(error)
                return
            if settings.mode == RunMode.MULTIRUN:  # Hydra shows the first failure only, and after the last job
                log.log(logging.ERROR, "This job failed. %s", error, exc_info=crashed)
            raise

    return task


@contextmanager
def _errors_raised() -> Iterator[None]:
    """Let errors through that Hydra would print and exit upon; its only switch for that is an environment variable."""
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before
