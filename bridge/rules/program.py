"""`Program`: the program that starts a run, as far as rules ask about it, and the `DroppedField`s of the run's file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bridge.errors import Finding


@dataclass(frozen=True, kw_only=True, slots=True)
class DroppedField:
    """One setting of a file that the framework's code does not forward to Megatron."""

    key: str
    """The key in the file ("policy.megatron_cfg.first_last_layers_bf16")."""
    path: str
    """The setting of Megatron that it does not reach ("model.first_last_layers_bf16")."""
    value: Any
    framework: str
    code: str
    """The code of the framework that the fact was read in: repository, commit and date."""
    because: str
    source: str
    """File and function."""
    fixed_in: str = ""
    """What forwards it; empty: nothing that is known."""
    instead: str = ""
    """The key that reaches the setting; empty: none is known."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "key": self.key,
            "path": self.path,
            "value": self.value,
            "because": self.because,
            "source": self.source,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """The program that starts a run, and its command line."""

    is_own: bool = False
    """It is scripts/train.py, whose build does not honour every field."""
    is_megatron_bridge: bool = False
    """It is Megatron Bridge, which wrote the run's file."""
    has_no_argument_parser: bool = False
    """It makes Megatron Core's configs itself, so that no parser of Megatron-LM checks them."""
    is_resumed: bool = False
    """It reads a checkpoint."""
    refused: Sequence[Finding] = ()
    """Words of the command line that its parser refuses."""
    faulty_options: Sequence[Finding] = ()
    """Options of the run's file that its framework drops, or hands to other modules than their names say."""
    dropped_fields: Sequence[DroppedField] = ()
    """Fields of Megatron Core that the run's file states and its framework does not forward."""
