"""The systems that a trained model is handed to: the dialects that each reads, and where its values differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from bridge.interop.serving.formats import ROWS, SERVED


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSystem:
    """A system that serves a model, a row of `rows/serving.yaml`."""

    title: str
    fp8: list[str] = field(default_factory=list)
    """Schemes that are written in the fp8 dialect where the model has no other; others are compressed-tensors."""
    mixed: list[str] = field(default_factory=lambda: list(SERVED))
    """Schemes that it reads from config groups of compressed-tensors, the only form for several schemes."""
    keys: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Scheme -> further keys of its config."""
    differences: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Scheme -> detail and remedy of a difference of values from training."""


SYSTEMS: dict[str, ServingSystem] = {name: ServingSystem(**row) for name, row in ROWS["systems"].items()}
"""Name of a system, as in `--for NAME` -> the system."""
