"""`System`: another system, as a pair of functions that read its configurations and write them.

    import_(payload, **context) -> ImportReport    a configuration of the system, read as a recipe
    export(config, **context)   -> ExportReport    a recipe, written as a configuration of the system

The context holds facts that no configuration file can state: versions, the GPU, tf32,
torch.compile, the dtype of evaluation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bridge.read.foreign.reports import ExportReport, ImportReport


@dataclass(frozen=True)
class ContextKey:
    """One fact that `import_` or `export` takes and no file states."""

    name: str
    meaning: str
    use: tuple[str, ...] = ("import",)
    """The functions that take it: "import", "export"."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A foreign system. The module of a system ends with `SYSTEM = System(...)`."""

    name: str
    """As in `--to NAME`: lower case, hyphens."""
    title: str
    version: str
    """The release that its facts were taken from."""
    export: Callable[..., ExportReport]
    import_: Callable[..., ImportReport]
    write: Callable[[Any], str] = str
    """Returns the payload of an export as the text of a file."""
    read: Callable[[Any], Any] | None = None
    """Takes a `document.Document` and returns the payload for `import_`. None stands for the parsed content."""
    context: tuple[ContextKey, ...] = ()
    import_all: Callable[..., tuple[ImportReport, ...]] | None = None
    """As `import_`, for a payload that starts several runs: a report for each, the first being that of `import_`."""
