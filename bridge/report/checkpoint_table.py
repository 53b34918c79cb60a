"""Checkpoints for people: the contents of one, and what differs between two."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.report.table import make_facts_table, make_table
from bridge.runtime.checkpoint.contents import Contents, Difference
from bridge.runtime.checkpoint.precision_change import PrecisionChange
from bridge.runtime.numerics.round_trip import RoundTrip

SHOWN_PACKAGES = ("precision-bridge", "megatron-core", "torch", "transformer-engine")
MAX_ROWS = 10
"""Rows of a table of differences; the others are counted."""
FORM_TITLES = {
    "bf16": "quantised values in BF16",
    "masters": "weights in BF16",
    "blocks": "128x128 blocks, FP32 scales",
}
"""Form of a round trip -> words."""
STORED_WEIGHTS_NOTE = (
    "Weights in FP8 or FP4 are saved in the dtype of the mode. A resumed run quantises the FP32 "
    "master weights again, which gives the codes and scales that they had. From the saved weights "
    "alone, about one MXFP8 scale in twenty is another one, with other codes, for the same values."
)


def make_contents_table(contents: Contents) -> RenderableType:
    """Return the contents of a checkpoint as something rich can print."""
    settings = contents.settings
    rows = []
    for part in contents.parts:
        rows.append(
            {
                "part": part.part,
                "dtype": part.dtype,
                "tensors": f"{part.tensors:,}",
                "values": f"{part.elements:,}",
                "bytes": f"{part.bytes:,}",
            }
        )
    shown: list[RenderableType] = [
        make_facts_table(_list_facts(contents), title=str(contents.path)),
        make_table(rows, numbers=("tensors", "values", "bytes")),
    ]
    if any(settings.get(f"model.{name}") == "True" for name in ("fp8_param", "fp4_param")):
        shown.append(Text(STORED_WEIGHTS_NOTE))
    return Group(*shown)


def _list_facts(contents: Contents) -> list[tuple[str, str]]:
    """Return where a checkpoint comes from, as names with values."""
    run = contents.run
    packages = []
    for name in SHOWN_PACKAGES:
        version = contents.settings.get(f"package {name}")
        if version is not None:
            packages.append(f"{name} {version}")
    sizes = run.get("layout") or {}
    layout = ", ".join(f"{name}={size}" for name, size in sizes.items())
    manifest = "none: not by this project"
    if contents.manifest_digest:
        manifest = f"sha256 {contents.manifest_digest}"
    return [
        ("step", str(run.get("iteration", "unknown"))),
        ("samples", str(run.get("consumed_samples", "unknown"))),
        ("precision", str(run.get("precision", "unknown"))),
        ("layout", layout or "unknown"),
        ("written by", ", ".join(packages) or "unknown"),
        ("files", f"{contents.files}, {contents.bytes:,} bytes"),
        ("manifest", manifest),
    ]


def make_difference_table(one: Contents, two: Contents, difference: Difference) -> RenderableType:
    """Return what differs between two checkpoints as something rich can print."""
    title = f"A: {one.path}\nB: {two.path}"
    if not difference:
        return Text(f"{title}\nNo setting and no tensor's dtype or shape differs.")
    parts: list[RenderableType] = [Text(title)]
    if not (one.settings and two.settings):
        parts.append(
            Text("One of them has no manifest with settings, so that tensors alone are compared.")
        )
    if difference.changes:
        parts.append(_make_changes_table(difference.changes))
    for heading, rows in (("setting", difference.settings), ("tensor", difference.tensors)):
        named = []
        for row in rows[:MAX_ROWS]:
            named.append({heading: row[heading], "A": row["a"], "B": row["b"]})
        if named:
            parts.append(make_table(named, wraps=("A", "B")))
        if len(rows) > MAX_ROWS:
            parts.append(Text(f"and {len(rows) - MAX_ROWS} more"))
    return Group(*parts)


def _make_changes_table(changes: Sequence[PrecisionChange]) -> RenderableType:
    """Return the changes of precision, and what each means for a run that resumes."""
    meaning = "resuming A in the precision of B"
    rows = []
    for change in changes:
        rows.append(
            {
                "precision": change.path,
                "A": change.before,
                "B": change.now,
                meaning: f"{change.outcome}: {change.meaning}",
            }
        )
    return make_table(rows, wraps=(meaning,))


def make_round_trip_table(
    source: str, found: Sequence[RoundTrip], left: Sequence[str]
) -> RenderableType:
    """Return the changes of weights through other forms as a table, a row per scheme and form."""
    rows = []
    for trip in found:
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
    if left:
        shown.append(Text(f"Left out, too large for the memory: {', '.join(left)}."))
    return Group(*shown)


def _format_share(part: int, whole: int) -> str:
    if not part:
        return "0"
    return f"{part / whole:.2%}"
