"""The context of a sync for the rules: the owners as they will be, read on demand."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from bridge.precision.config import FIELD_DEFAULTS
from bridge.precision.dtypes import dtype_token, is_torch_dtype
from bridge.rules.context import PRECISION_OWNERS, RuleContext, reading_of
from bridge.rules.fields import DEFAULTS
from bridge.rules.rule import ask, by_gate
from bridge.rules.rulebook import BY_ID, RULES
from bridge.rules.target import Target
from bridge.rules.versions import installed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bridge.precision.config import PrecisionConfig
    from bridge.rules.rule import RuleFinding
    from bridge.sync.owner import Owner
    from bridge.sync.report import SyncRow

__all__ = ["is_refused", "sync_findings"]

_GATES = by_gate(rule for rule in RULES if rule.sync is not None)


class _OwnerView:
    """The values of an owner after the plan as attributes: dtypes as tokens, enums as their values.

    A field that a foreign object or an older Megatron does not have is None; an owner that is not given holds what the
    precision reads as, and Megatron's defaults.
    """

    def __init__(self, role: str, owner: Owner | None, rows: Sequence[SyncRow], reading: Mapping[str, Any]) -> None:
        self._role, self._owner, self._reading = role, owner, reading
        self._planned = {row.attribute: row for row in rows if row.owner == role and row.verdict != "absent"}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = self.__dict__[name] = self._find(name)
        return value

    def _find(self, name: str) -> Any:
        if name in self._planned:
            return _plain(self._planned[name].new, self._role, name)
        if self._owner is None:
            return self._reading[name] if name in self._reading else DEFAULTS[self._role].get(name)
        return _plain(self._owner.value(name), self._role, name) if self._owner.has(name) else None


def _plain(value: Any, role: str, name: str) -> Any:
    """Return a value as rules expect it; the class default for what is no plain value, as a mock's attributes are."""
    if value is None or isinstance(value, bool | int | float | tuple | list | dict):
        return value
    if is_torch_dtype(value):
        return dtype_token(value)
    value = getattr(value, "value", value)
    return str(value) if isinstance(value, str) else DEFAULTS[role].get(name, FIELD_DEFAULTS.get(name))


@functools.cache
def _installed() -> Target:
    return Target(mcore=installed("mcore"), te=installed("te"))


def sync_findings(
    config: PrecisionConfig | None,
    owners: Mapping[str, Owner],
    rows: Sequence[SyncRow],
    *,
    scheme: str | None = None,
    is_last: bool = False,
) -> list[RuleFinding]:
    """Return what the rules find in the owners as a plan leaves them.

    Args:
        config: The precision; None: the owners keep their own settings.
        owners: By role, not written to yet.
        rows: The plan.
        scheme: The scaling scheme of the run.
        is_last: The run begins after this sync.
    """
    reading = reading_of(config) if config is not None else {}
    views = {role: _OwnerView(role, owners.get(role), rows, reading) for role in PRECISION_OWNERS}
    given = frozenset(owners)
    context = RuleContext(
        config, views=views, given=given, rows=rows, scheme=scheme, target=_installed(), is_last=is_last
    )
    context.read_owners()
    return ask(_GATES, context)


def is_refused(finding: RuleFinding, *, is_last: bool) -> bool:
    """Return whether a sync does not go on after this finding."""
    refused = ("refused", "strict") if is_last else ("refused",)
    return finding.severity == "error" and BY_ID[finding.id].sync in refused
