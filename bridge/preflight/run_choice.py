"""`RunChoice`: which run of a file the caller asks for, and what it states about its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bridge.errors import RunConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunChoice:
    """The run that the caller chooses, of a file with several runs or with open variables."""

    number: int | None = None
    """The number of the run, from 1. None: the first."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables of a launch script, as its environment or command line would set them."""
    checkpoint: str | None = None
    """The folder, or the config.json, of the checkpoint that the run starts from.

    None: the checkpoint that the file names.
    """
    overrides: tuple[str, ...] = ()
    """Overrides of our command line, as written. A reader takes those of its framework's keys."""
    asks_megatron_bridge: bool = False
    """Whether Megatron Bridge itself makes the container of a recipe, in a process of its own."""
    documents: dict[Path, object] = field(default_factory=dict, repr=False, compare=False)
    """Path of a script -> its document, which the reader fills in. The choices of several runs of
    one file share the mapping, so that the file is followed once for all of them."""

    def refuse_checkpoint(self, path: Path) -> None:
        """Refuse a checkpoint for a file that states the sizes of its model itself.

        Args:
            path: The file.

        Raises:
            RunConfigError: The caller states a checkpoint.
        """
        if self.checkpoint is None:
            return
        rule = f"is the checkpoint that makes a model, and that of {path} follows from the file"
        remedy = "Drop it, or give a file of NeMo-RL, verl, ms-swift, ROLL or Megatron Bridge."
        raise RunConfigError.of("--context checkpoint", rule, self.checkpoint, remedy)

    def refuse_for(self, path: Path) -> None:
        """Refuse a run's number and variables for a file that has neither.

        Raises:
            RunConfigError: The caller states one of them, or asks Megatron Bridge.
        """
        remedy = "Drop it, or give a launch script."
        if self.number is not None:
            rule = f"chooses among the runs of a script, and {path} is none"
            raise RunConfigError.of("--launch", rule, self.number, remedy)
        if self.variables:
            rule = f"sets variables of a launch script, and {path} is none"
            raise RunConfigError.of("--context", rule, dict(self.variables), remedy)
        if self.asks_megatron_bridge:
            rule = f"calls a recipe of Megatron Bridge, and {path} is none"
            remedy = "Drop it, or give a recipe."
            raise RunConfigError.of("--ask-megatron-bridge", rule, True, remedy)
