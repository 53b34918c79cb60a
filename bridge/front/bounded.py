"""The bounds of a config tree: of its YAML files, before Hydra reads them, and of its references, while they resolve.

OmegaConf writes every alias out, so that a file of a kilobyte can take hours. It resolves a reference (``${...}``) as
often as it is named, so that thirty lines of ``a: ${b}${b}`` would make a gigabyte.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from omegaconf.base import Container
from omegaconf.errors import InterpolationResolutionError

from bridge.errors import RunConfigError
from bridge.precision.strict_yaml import require_bounded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.plugins.config_source import ConfigResult

MAX_REFERENCES = 2_000
"""A run's config resolves fewer than a hundred."""
MAX_CHARACTERS = 2**20
"""Of one value."""


@contextmanager
def bounded_references() -> Iterator[None]:
    """Let OmegaConf refuse references that multiply, for the length of a ``with`` block."""
    resolve, numbers = Container.resolve_parse_tree, itertools.count(1)

    def bounded(self: Container, *arguments: Any, **named: Any) -> Any:
        found = resolve(self, *arguments, **named) if next(numbers) <= MAX_REFERENCES else None
        if found is None or (isinstance(found, str) and len(found) > MAX_CHARACTERS):
            raise InterpolationResolutionError("references that multiply are refused")
        return found

    Container.resolve_parse_tree = bounded  # type: ignore[method-assign]
    try:
        yield
    finally:
        Container.resolve_parse_tree = resolve  # type: ignore[method-assign]


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
