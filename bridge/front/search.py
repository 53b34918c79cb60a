"""`Search`: the folders that configs are looked up in, and Hydra started over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hydra import initialize_config_dir, initialize_config_module
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin

from bridge.errors import RunConfigError
from bridge.precision.strict_yaml import require_bounded

VERSION_BASE = "1.3"
"""The Hydra behaviour that configs are written for."""
DEFAULT_JOB_NAME = "train"
"""The job's name where no script is run: `${hydra:job.name}`."""
PACKAGE_PREFIX = "pkg://"


@dataclass(frozen=True)
class Search:
    """The folders that configs are looked up in, and the name of the primary one."""

    main: str
    """Folder of the primary config, or ``pkg://module``."""
    config_name: str = "config"
    extra: Path | str | None = None
    """Another folder, of a team's own groups."""

    @contextmanager
    def start_hydra_over_folders(self, job_name: str = DEFAULT_JOB_NAME) -> Iterator[ConfigLoader]:
        """Initialise Hydra over the folders in a ``with`` block, and yield its loader of configs.

        A Hydra application that calls this has its own Hydra back at the end.
        """
        if self.extra and not Path(self.extra).is_dir():
            raise RunConfigError.of(
                "--config-dir", "there is no such folder", str(self.extra), "Give an existing one."
            )
        Plugins.instance().register(FileGuard)
        Plugins.instance().register(TreeSearchPath)
        outer = GlobalHydra.instance().hydra
        GlobalHydra.instance().clear()
        TreeSearchPath.search = self
        try:
            with self._initialize_hydra(job_name):
                yield GlobalHydra.instance().config_loader()
        finally:
            TreeSearchPath.search = None
            GlobalHydra.instance().clear()
            if outer is not None:
                GlobalHydra.instance().initialize(outer)

    def _initialize_hydra(self, job_name: str) -> initialize_config_dir | initialize_config_module:
        if self.main.startswith(PACKAGE_PREFIX):
            module = self.main.removeprefix(PACKAGE_PREFIX).replace("/", ".")
            return initialize_config_module(module, job_name, version_base=VERSION_BASE)
        return initialize_config_dir(self.main, job_name, version_base=VERSION_BASE)


class TreeSearchPath(SearchPathPlugin):
    """Puts the folders of a `Search` on Hydra's search path, while it is started."""

    search: ClassVar[Search | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add a team's folder where ``--config-dir`` has it, and the guards of both folders."""
        search = self.search
        if search is None:
            return
        folders = [search.main]
        if search.extra:
            extra = str(Path(search.extra).resolve())
            search_path.append("command-line", f"file://{extra}")
            folders.append(extra)
        for folder in folders:
            if not folder.startswith(PACKAGE_PREFIX):
                search_path.prepend("guard", f"{FileGuard.scheme()}://{folder}")


class FileGuard(ConfigSource):
    """A source without configs, which looks at a folder's files before Hydra reads them.

    Hydra asks each source in turn whether it has a config. RunConfigError is the answer where the
    file of that name is too large or too deep, or has multiplying aliases or a foreign tag.
    """

    @staticmethod
    def scheme() -> str:
        """Return what stands before ``://``."""
        return "guard"

    def available(self) -> bool:
        """Return True."""
        return True

    def is_group(self, config_path: str) -> bool:  # noqa: ARG002  Hydra's signature, here and below
        """Return False."""
        return False

    def is_config(self, config_path: str) -> bool:
        """Return False for a file that Hydra may read, and for none."""
        file = Path(self.path) / f"{config_path.removesuffix('.yaml')}.yaml"
        if file.is_file():
            require_bounded(file, error=RunConfigError)
        return False

    def load_config(self, config_path: str) -> ConfigResult:
        """Raise ConfigLoadError."""
        raise ConfigLoadError(f"Config not found: {config_path}")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:  # noqa: ARG002
        """Return no name."""
        return []
