"""A run of Megatron-LM as this project's sections: a launch script, or a file of arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.errors import RunConfigError
from bridge.interop.conversion import LOSSES, runs_of
from bridge.interop.launch.alternatives import launches
from bridge.interop.megatron_lm.arguments import argument_groups
from bridge.interop.megatron_lm.importer import SYSTEM
from bridge.interop.megatron_lm.sections import sections_of
from bridge.interop.reading.document import Document

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from bridge.front.loader import RunValues

SIZES = ("num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """The first run that a file of Megatron-LM starts."""

    sections: Mapping[str, Any]
    """Its sections, the precision among them."""
    environment: Mapping[str, str]
    """Variables of Transformer Engine's that the file sets."""
    label: str
    """The run in the file: "line 41, pretrain_gpt.py"."""
    runs: int
    """Runs that the file starts."""
    unread: tuple[str, ...]
    """Fields whose values are decided only when the script runs."""
    losses: tuple[str, ...]
    """Settings of its precision that have no exact counterpart, as sentences."""

    def unknown(self, run: RunValues) -> tuple[str, ...]:
        """Return what the file does not say of a run of these sections, as sentences.

        Raises:
            RunConfigError: The file and the overrides leave a size of the model open.
        """
        absent = [f"model.{name}" for name in SIZES if run.model.get(name) is None]
        if absent:
            rule = f"the file does not state {', '.join(absent)}, or only when it runs"
            raise RunConfigError.of("--config", rule, run.name, f"Add {' '.join(f'{one}=VALUE' for one in absent)}.")
        left = [name for name in self.unread if not any(name in run.section(part) for part in ("model", "train"))]
        found = []
        if left:
            found.append(f"{', '.join(left)}: decided when the script runs; Megatron's defaults ran here.")
        if self.runs > 1:
            found.append(f"The other runs of the file: it starts {self.runs}, and {self.label} was rehearsed.")
        return (*found, *self.losses)


def is_of_megatron_lm(path: Path) -> bool:
    """Return whether a file is a launch script or holds arguments of Megatron-LM."""
    document = Document.load(path)
    return document.kind == "shell" or (document.kind == "yaml" and bool(argument_groups(document.mapping)))


def read_megatron_lm(path: Path) -> Script:
    """Return the first run that a file of Megatron-LM starts."""
    document = Document.load(path)
    runs = [one for one in runs_of(document) if one.system.name == SYSTEM.name]
    if not runs:
        raise RunConfigError.of("--config", "must start a run of Megatron-LM", str(path), "Give its launch script.")
    made = sections_of(launches(document.text, document.path)[0] if document.kind == "shell" else document.mapping)
    imported = runs[0].imported.assume_default()
    return Script(
        sections={**made.sections, "mixed_precision": imported.config.to_dict()},
        environment=made.environment,
        label=imported.label,
        runs=len(runs),
        unread=tuple(made.unread),
        losses=tuple(f"{one.field}: {one.detail}." for one in runs[0].imported.unmapped if one.reason in LOSSES),
    )
