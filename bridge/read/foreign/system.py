"""`System`: another system, as a pair of functions that read and write its configurations.

    import_(payload, **context) -> ImportReport    reads a configuration of the system as a recipe
    export(config, **context)   -> ExportReport    writes a recipe as a configuration of the system

The context has facts that no configuration file states: releases, the GPU, TF32, torch.compile, the
dtype of evaluation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.read.foreign.reports import ExportReport, ImportReport

if TYPE_CHECKING:
    from bridge.read.text.document import Document


@dataclass(frozen=True)
class ContextKey:
    """A fact that no file states: an argument of `import_` or `export`."""

    name: str
    """The name of the argument, and the key of --context."""
    meaning: str
    """The meaning, for help texts."""
    use: tuple[str, ...] = ("import",)
    """The functions with this argument: "import", "export"."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A foreign system. The module of a system ends with `SYSTEM = System(...)`."""

    name: str
    """The name in `--to NAME`: lower case, with hyphens."""
    title: str
    """The name in messages."""
    version: str
    """The release that its facts were taken from."""
    export: Callable[..., ExportReport]
    """Writes a precision as a configuration of the system."""
    import_: Callable[..., ImportReport]
    """Reads a configuration of the system as a precision."""
    write: Callable[[Any], str] = str
    """Returns the payload of an export as the text of a file."""
    read: "Callable[[Document], Any] | None" = None
    """Returns the payload for `import_` of a document; None: the payload is its parsed content."""
    context: tuple[ContextKey, ...] = ()
    """The facts that are arguments of `import_` and `export`."""
    import_all: Callable[..., tuple[ImportReport, ...]] | None = None
    """Like `import_`, for a payload with several runs. `import_` returns the first report."""
