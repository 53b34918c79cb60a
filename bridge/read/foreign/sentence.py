"""`Sentence`: a row of a table that explains why a setting cannot be converted exactly.

    auto: {reason: implied default, detail: "{system} reads auto as off", remedy: Write false.}

A row may also be only the text of `detail`. Each sentence is complete in the YAML file, so that a
search finds it. Facts of a file are in braces.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from bridge.read.foreign.reports import DEFAULT_REMEDIES


class Sentence(NamedTuple):
    """The reason why a setting cannot be converted exactly."""

    reason: str
    """A key of `DEFAULT_REMEDIES`."""
    detail: str
    """The difference, as a clause without a full stop."""
    remedy: str
    """The advice, as a sentence."""

    @classmethod
    def from_row(cls, row: str | Mapping[str, Any], reason: str = "unsupported") -> Self:
        """Return the sentence of a row.

        Args:
            row: The columns, or only the detail.
            reason: The reason of a row that has none.
        """
        columns = get_columns(row)
        reason = columns.get("reason", reason)
        remedy = columns.get("remedy") or DEFAULT_REMEDIES[reason]
        return cls(reason, columns["detail"], remedy)

    def fill(self, facts: Mapping[str, object]) -> Self:
        """Return the sentence with the facts of a file instead of its braces."""
        return self._replace(detail=self.detail.format(**facts), remedy=self.remedy.format(**facts))


def get_columns(row: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row, which may be written as its `detail`."""
    if isinstance(row, str):
        return {"detail": row}
    return dict(row)
