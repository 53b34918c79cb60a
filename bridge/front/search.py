"""`Search`: the folders in which Hydra looks for configs."""

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
"""The release of Hydra whose behaviour the configs expect."""
DEFAULT_JOB_NAME = "train"
"""The value of `${hydra:job.name}` if no script is run."""
PACKAGE_PREFIX = "pkg://"


@dataclass(frozen=True)
class Search:
    """The folders in which Hydra looks for configs, and the name of the primary config."""

    main: str
    """The folder of the primary config, or ``pkg://module``."""
    config_name: str = "config"
    extra: Path | str | None = None
    """A further folder with a team's groups. None: no further folder."""

    @contextmanager
    def start_hydra_over_folders(self, job_name: str = DEFAULT_JOB_NAME) -> Iterator[ConfigLoader]:
        """Initialise Hydra over the folders in a ``with`` block, and yield its loader of configs.

        If a Hydra application calls this, its Hydra is restored at the end.

        Args:
            job_name: The value of `${hydra:job.name}`.

        Raises:
            RunConfigError: There is no further folder of that name.
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
        """Return Hydra's context manager for the folder or the module of the primary config."""
        if self.main.startswith(PACKAGE_PREFIX):
            module = self.main.removeprefix(PACKAGE_PREFIX).replace("/", ".")
            return initialize_config_module(module, job_name, version_base=VERSION_BASE)
        return initialize_config_dir(self.main, job_name, version_base=VERSION_BASE)


class TreeSearchPath(SearchPathPlugin):
    """Adds the folders of the active `Search` to Hydra's search path.

    Hydra makes the plugin itself, so the search is an attribute of the class.
    """

    search: ClassVar[Search | None] = None
    """The active search. None: the search path is not changed."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the further folder as ``--config-dir`` would, and the guards of both folders.

        Hydra asks the sources in order, so each guard is put first.
        """
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
    """A source without configs, which checks the files of a folder before Hydra reads them.

    Hydra asks each source in turn whether it has a config. The guard raises RunConfigError if the
    file of that name is too large or too deep, or has aliases that multiply its size or an unknown
    tag.
    """

    @staticmethod
    def scheme() -> str:
        """Return the scheme of this source, the text before ``://`` in its path."""
        return "guard"

    def available(self) -> bool:
        """Return True."""
        return True

    def is_group(self, config_path: str) -> bool:  # noqa: ARG002  Hydra's signature, here and below
        """Return False."""
        return False

    def is_config(self, config_path: str) -> bool:
        """Return False, after the check of the file.

        Raises:
            RunConfigError: Hydra must not read the file.
        """
        file = Path(self.path) / f"{config_path.removesuffix('.yaml')}.yaml"
        if file.is_file():
            require_bounded(file, error=RunConfigError)
        return False

    def load_config(self, config_path: str) -> ConfigResult:
        """Raise ConfigLoadError, since the source has no config."""
        raise ConfigLoadError(f"Config not found: {config_path}")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:  # noqa: ARG002
        """Return an empty list, since the source has no config."""
        return []
