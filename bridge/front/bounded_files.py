"""The YAML files of a config tree, held to the bounds of `bridge.precision.strict_yaml` before Hydra reads them.

OmegaConf writes every alias out, so that a file of a kilobyte can take hours.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource

from bridge.errors import RunConfigError
from bridge.precision.strict_yaml import require_bounded

if TYPE_CHECKING:
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.plugins.config_source import ConfigResult


class BoundedFiles(FileConfigSource):
    """A folder of configs whose files are looked at before Hydra reads them."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a config; RunConfigError for a file too large or deep, with multiplying aliases or a foreign tag."""
        file = Path(self.path) / self._normalize_file_name(config_path)
        if file.is_file():
            require_bounded(file, error=RunConfigError)
        return super().load_config(config_path)


class BoundedRepository(ConfigRepository):
    """Hydra's repository of configs, with `BoundedFiles` for every folder."""

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        """Make the sources of a search path."""
        super().initialize_sources(config_search_path)
        self.sources = [
            BoundedFiles(source.provider, source.full_path())
            if source.scheme() == FileConfigSource.scheme()
            else source
            for source in self.sources
        ]
