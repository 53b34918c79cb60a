"""Objects written as data: LightningCLI's `class_path` with `init_args`, Hydra's `_target_` with its arguments.

Nothing is imported or made; the class is known by the last word of its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Instance", "instance", "is_trainer"]

TRAINER = re.compile(r"(pytorch_lightning|lightning|lightning_fabric)(\.\w+)*\.(Trainer|Fabric)")
OF_HYDRA = re.compile(r"_\w+_")


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A class and what it is called with."""

    target: str
    """As it is written: "lightning.pytorch.Trainer"."""
    arguments: Any
    """A mapping, unless the file has another value there."""
    under: str = ""
    """The key that the arguments stand under; empty: the same mapping as the class."""

    @property
    def name(self) -> str:
        """The last word of the class."""
        return self.target.rpartition(".")[2]


def instance(value: object) -> Instance | None:
    """Return what a mapping says to make, None where it names no class."""
    if not isinstance(value, Mapping):
        return None
    if isinstance(value.get("class_path"), str):
        arguments = value.get("init_args")
        return Instance(target=value["class_path"], arguments={} if arguments is None else arguments, under="init_args")
    if isinstance(value.get("_target_"), str):
        given = {key: inner for key, inner in value.items() if isinstance(key, str) and not OF_HYDRA.fullmatch(key)}
        return Instance(target=value["_target_"], arguments=given)
    return None


def is_trainer(value: object) -> bool:
    """Return whether a mapping says to make a Trainer or a Fabric of Lightning's own."""
    made = instance(value)
    return made is not None and TRAINER.fullmatch(made.target) is not None
