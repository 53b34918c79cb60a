"""`Program`: the program that starts a run, with the faults of its command line and of its file."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from bridge.errors import Finding


class ProgramKind(Enum):
    """The kind of a program, as far as rules distinguish it."""

    TRAIN_SCRIPT = auto()
    """scripts/train.py, whose build does not support every field."""
    MEGATRON_BRIDGE = auto()
    """Megatron Bridge, which wrote the file of the run."""
    OWN_CONFIGS = auto()
    """A program that makes Megatron Core's configs itself. No parser of Megatron-LM checks them."""
    OTHER = auto()
    """Megatron-LM, or an unknown program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedField:
    """A setting of a file that the framework's code does not forward to Megatron."""

    key: str
    """The key in the file, for example "policy.megatron_cfg.first_last_layers_bf16"."""
    path: str
    """The setting of Megatron that the key does not reach, for example
    "model.first_last_layers_bf16"."""
    value: Any
    framework: str
    code: str
    """The code of the framework in which the fact was read: repository, commit and date."""
    because: str
    """A clause about why the key does not reach the setting."""
    source: str
    """The file and the function in that code."""
    fixed_in: str = ""
    """The release or the change that forwards the setting. Empty: none is known."""
    instead: str = ""
    """The key that does reach the setting. Empty: none is known."""

    def to_dict(self) -> dict[str, Any]:
        """Return the field as plain data."""
        return {
            "key": self.key,
            "path": self.path,
            "value": self.value,
            "because": self.because,
            "source": self.source,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """The program that starts a run, and the faults of its command line and of its file."""

    kind: ProgramKind = ProgramKind.OTHER
    is_resumed: bool = False
    """Whether the run reads a checkpoint."""
    refused_arguments: Sequence[Finding] = ()
    """Arguments of the command line that its parser refuses."""
    faulty_options: Sequence[Finding] = ()
    """Options of the run's file that its framework drops, or gives to other modules than they name."""
    dropped_fields: Sequence[DroppedField] = ()
    """Fields of Megatron Core that the run's file states and its framework does not forward."""
    added_schemes: Sequence[str] = ()
    """Scaling schemes that the framework adds to Megatron Core's."""

    @property
    def is_train_script(self) -> bool:
        """Whether the program is scripts/train.py."""
        return self.kind is ProgramKind.TRAIN_SCRIPT

    @property
    def is_megatron_bridge(self) -> bool:
        """Whether the program is Megatron Bridge."""
        return self.kind is ProgramKind.MEGATRON_BRIDGE

    @property
    def has_argument_parser(self) -> bool:
        """Whether an argument parser of Megatron-LM may check the settings."""
        return self.kind not in (ProgramKind.MEGATRON_BRIDGE, ProgramKind.OWN_CONFIGS)
