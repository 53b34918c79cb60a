"""`Sentence`: why a setting cannot be converted exactly, in the words of a row.

    auto: {reason: implied default, detail: "{system} reads auto as off", remedy: Write false.}

A row may be its `detail` alone. Sentences stand whole in the YAML, so that a grep finds them; facts
of a file stand in braces.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from bridge.read.foreign.reports import DEFAULT_REMEDIES


class Sentence(NamedTuple):
    """Why a setting cannot be converted exactly."""

    reason: str
    """A key of `reports.REASONS`."""
    detail: str
    """The difference on the other side, as a clause without a full stop."""
    remedy: str

    @classmethod
    def from_row(cls, row: str | Mapping[str, Any], reason: str = "unsupported") -> Self:
        """Return the sentence of a row; `reason` is that of a row without one."""
        columns = get_columns(row)
        reason = columns.get("reason", reason)
        remedy = columns.get("remedy") or DEFAULT_REMEDIES[reason]
        return cls(reason, columns["detail"], remedy)

    def fill(self, facts: Mapping[str, object]) -> Self:
        """Return the sentence with the facts of a file in place of its braces."""
        return self._replace(detail=self.detail.format(**facts), remedy=self.remedy.format(**facts))


def get_columns(row: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row, which may be written as its `detail` alone."""
    if isinstance(row, str):
        return {"detail": row}
    return dict(row)
