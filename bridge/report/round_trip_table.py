"""The changes of quantised weights that are stored in another form, as a table."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.report.table import make_table
from bridge.runtime.numerics.round_trip import RoundTrip

FORM_TITLES = {
    "bf16": "quantised values in BF16",
    "masters": "weights in BF16",
    "blocks": "128x128 blocks, FP32 scales",
}
"""The form in which weights are stored -> its name."""


def make_round_trip_table(
    source: str, round_trips: Sequence[RoundTrip], left_out: Sequence[str]
) -> RenderableType:
    """Return a row for each scaling scheme and form of storage.

    Args:
        source: The checkpoint, or the description of generated weights.
        round_trips: Changes of weights that are stored in a form and quantised again.
        left_out: Tensors that were too large for the memory of this machine.
    """
    rows = []
    for trip in round_trips:
        largest_error = "0"
        if trip.values_changed:
            largest_error = f"{trip.largest_error:.2g}"
        rows.append(
            {
                "scheme": trip.scheme,
                "stored as": FORM_TITLES[trip.form],
                "codes changed": _format_share(trip.codes_changed, trip.codes),
                "scales changed": f"{trip.scales_changed} of {trip.scales}",
                "values changed": _format_share(trip.values_changed, trip.codes),
                "largest error": largest_error,
            }
        )
    numbers = ("codes changed", "scales changed", "values changed", "largest error")
    shown = [make_table(rows, title=source, numbers=numbers, wraps=("stored as",))]
    if left_out:
        shown.append(Text(f"Left out, too large for the memory: {', '.join(left_out)}."))
    return Group(*shown)


def _format_share(part: int, total: int) -> str:
    """Return a share in percent; "0" only if nothing changed."""
    if not part:
        return "0"
    return f"{part / total:.2%}"
