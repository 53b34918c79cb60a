"""A run of Megatron-LM as this project's sections: a launch script, or a file of arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.errors import RunConfigError
from bridge.front.loader import RunValues
from bridge.interop.conversion import runs_of
from bridge.interop.launch.alternatives import launches
from bridge.interop.megatron_lm.arguments import argument_groups
from bridge.interop.megatron_lm.importer import SYSTEM
from bridge.interop.megatron_lm.sections import sections_of
from bridge.interop.reading.document import Document

if TYPE_CHECKING:
    from pathlib import Path


def is_of_megatron_lm(path: Path) -> bool:
    """Return whether a file is a launch script or holds arguments of Megatron-LM."""
    document = Document.load(path)
    return document.kind == "shell" or (document.kind == "yaml" and bool(argument_groups(document.mapping)))


def read_megatron_lm(path: Path, *, target: str | None = None) -> tuple[RunValues, dict[str, str]]:
    """Return the first run that a file of Megatron-LM starts, and the variables of Transformer Engine's that it sets.

    Args:
        path: The file.
        target: Where it runs.

    Raises:
        PayloadError: It starts no run of Megatron-LM, or the mode of its precision is not stated.
        RunConfigError: A size of the model is decided only when the script runs.
    """
    document = Document.load(path)
    first = next((one for one in runs_of(document) if one.system.name == SYSTEM.name), None)
    if first is None:
        raise RunConfigError.of("--config", "must start a run of Megatron-LM", str(path), "Give its launch script.")
    given = launches(document.text, document.path)[0] if document.kind == "shell" else document.mapping
    made = sections_of(given)
    late = [name for name in ("num_layers", "hidden_size", "num_attention_heads") if name in made.unread]
    if late:
        rule = f"{', '.join(late)} must be stated in the file"
        raise RunConfigError.of("--config", rule, str(path), "Set the variables of the script in a copy of it.")
    imported = first.imported.assume_default()
    run = RunValues(precision=imported.config, sections={**made.sections, "target": target}, name=str(path))
    return run, made.environment
