"""Transformer Engine's environment variables that change a recipe, one row each in variables.yaml.

Most of them become defaults of the recipe classes when `transformer_engine` is imported, so Megatron, which passes few
keywords, gets them into its recipes without a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

__all__ = ["NVTE_VARIABLES", "Variable"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """One row: an environment variable of Transformer Engine."""

    name: str
    effect: str
    """Effect of a value other than the default, as a clause."""
    schemes: tuple[str, ...] = ()
    """Schemes it concerns; empty for every low-precision scheme."""
    reads: str = "import"
    """import: when `transformer_engine` is imported. run: while the run goes on."""
    kind: str = "flag"
    """flag: only the text 1 switches it on. number: an integer, 0 is off. text: a word."""
    default: str | None = "0"
    """A value that means the same as unset; None where there is none."""
    choices: tuple[str, ...] = ()
    """Values that Transformer Engine accepts; empty where it does not check."""
    keyword: str | None = None
    """Keyword of the recipe class whose default it is."""
    contradicts: tuple[str, ...] = ()
    """Values that contradict the config: an error. Any other change is a warning."""
    refused_by: tuple[str, ...] = ()
    """Schemes whose recipe cannot be made while it is set."""
    attention: bool = False
    """Concerns FP8 attention alone, so only recipes with `fp8_dpa`."""
    changes_values: bool = True
    """False: it picks a kernel or permits something; the recipe stays what it was."""

    def parse(self, text: str) -> object:
        """Return a value as Transformer Engine reads it.

        Raises:
            ValueError: Transformer Engine would fail on it.
        """
        if self.kind == "flag":
            return text == "1"
        if self.kind == "number":
            return int(text)
        word = text.upper() if self.name.endswith("ERR_MODE") else text
        if self.choices and word not in self.choices:
            raise ValueError
        return word

    def is_active(self, text: str) -> bool | None:
        """Return whether a value does something else than leaving the variable unset; None: it is refused."""
        try:
            parsed = self.parse(text)
        except ValueError:
            return None
        return self.default is None or parsed != self.parse(self.default)

    def concerns(self, scheme: str, *, attention: bool) -> bool:
        """Return whether it can change a run under a scheme, with or without FP8 attention."""
        return (not self.schemes or scheme in self.schemes) and (attention or not self.attention)

    @property
    def accepted(self) -> str:
        """Values that Transformer Engine accepts, in words."""
        if self.kind == "number":
            return "a whole number"
        return f"one of {', '.join(filter(None, self.choices))}" if self.choices else "anything"


def _row(name: str, given: dict[str, Any]) -> Variable:
    """Return a row of variables.yaml; its lists become tuples."""
    keys: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return Variable(name=name, **keys)


_FILE = Path(__file__).with_suffix(".yaml")
NVTE_VARIABLES = MappingProxyType(
    {name: _row(name, given) for name, given in yaml.safe_load(_FILE.read_text(encoding="utf-8")).items()}
)
"""Variables by name, in the order of the file, which has their sources."""
