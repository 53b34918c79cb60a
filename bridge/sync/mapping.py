"""`MappingOwner`: one of Megatron's configs as a dictionary, so that a plan needs neither its class nor torch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from bridge.rules.fields import DEFAULTS, FIELDS
from bridge.rules.versions import parse_version
from bridge.sync.owner import ABSENT, Owner
from bridge.sync.routes import OWNERS

if TYPE_CHECKING:
    from bridge.precision.config import PrecisionConfig
    from bridge.rules.versions import Version

__all__ = ["MappingOwner"]


class MappingOwner(Owner):
    """The values of one of Megatron's configs, dtypes as tokens.

    Args:
        role: model, optimizer, ddp or train.
        values: Field -> value, complete.
        version: Of megatron-core, which decides about the fields that are there; None: all of them.
    """

    is_deferred = False

    def __init__(self, role: str, values: dict[str, Any], version: Version | None = None) -> None:
        self.role = role
        self.target = values
        self.defaults = DEFAULTS[role]
        self.is_megatron = True
        self.class_name = OWNERS[role]
        self._missing = _missing(role, str(version) if version is not None else None)

    def has(self, attribute: str) -> bool:
        """Return whether this version of the class has the attribute."""
        return attribute in self.target and attribute not in self._missing

    def value(self, attribute: str) -> Any:
        """Return the value; it is the owner's own, since no sync writes to a mapping."""
        return self.target[attribute] if self.has(attribute) else ABSENT

    own = value

    def dtype(self, token: str) -> str:
        """Return the token itself."""
        return token

    def reading(self, config: PrecisionConfig, field: str) -> Any:
        """Return what a field reads as, a dtype as its token."""
        return config.reading(field)


@functools.cache
def _missing(role: str, version: str | None) -> frozenset[str]:
    """Return the fields that this version of the class does not have yet; by its text, since 0.17 equals 0.17.0."""
    held = parse_version(version) if version is not None else None
    rows = FIELDS[role].values()
    return frozenset(row.name for row in rows if row.has is not None and row.has.holds(held) is False)
