"""Checkpoints for people: the contents of one, and what differs between two."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.report.table import facts, table
from bridge.runtime.checkpoint.contents import Contents, Difference
from bridge.runtime.numerics.round_trip import RoundTrip

PACKAGES = ("precision-bridge", "megatron-core", "torch", "transformer-engine")
SHOWN = 10
"""Rows of a table of differences; the others are counted."""
STORED_AS = {
    "bf16": "quantised values in BF16",
    "masters": "weights in BF16",
    "blocks": "128x128 blocks, FP32 scales",
}
"""Form of a round trip -> words."""
STORED = (
    "Weights in FP8 or FP4 are saved in the dtype of the mode. A resumed run quantises the FP32 master weights again, "
    "which gives the codes and scales that they had. From the saved weights alone, about one MXFP8 scale in twenty is "
    "another one, with other codes, for the same values."
)


def contents_table(contents: Contents) -> RenderableType:
    """Return the contents of a checkpoint as something rich can print."""
    run, settings = contents.run, contents.settings
    packages = (
        f"{name} {settings[f'package {name}']}"
        for name in PACKAGES
        if f"package {name}" in settings
    )
    about = [
        ("step", str(run.get("iteration", "unknown"))),
        ("samples", str(run.get("consumed_samples", "unknown"))),
        ("precision", str(run.get("precision", "unknown"))),
        (
            "layout",
            ", ".join(f"{name}={size}" for name, size in (run.get("layout") or {}).items())
            or "unknown",
        ),
        ("written by", ", ".join(packages) or "unknown"),
        ("files", f"{contents.files}, {contents.bytes:,} bytes"),
        (
            "manifest",
            f"sha256 {contents.manifest_digest}"
            if contents.manifest_digest
            else "none: not by this project",
        ),
    ]
    rows = [
        {"part": one.part, "dtype": one.dtype, "tensors": f"{one.tensors:,}"}
        | {"values": f"{one.elements:,}", "bytes": f"{one.bytes:,}"}
        for one in contents.parts
    ]
    stored = any(settings.get(f"model.{name}") == "True" for name in ("fp8_param", "fp4_param"))
    shown = table(rows, numbers=("tensors", "values", "bytes"))
    return Group(facts(about, title=str(contents.path)), shown, *([Text(STORED)] if stored else []))


def difference_table(one: Contents, two: Contents, difference: Difference) -> RenderableType:
    """Return what differs between two checkpoints as something rich can print."""
    title = f"A: {one.path}\nB: {two.path}"
    if not difference:
        return Text(f"{title}\nNo setting and no tensor's dtype or shape differs.")
    parts: list[RenderableType] = [Text(title)]
    if not (one.settings and two.settings):
        parts.append(
            Text("One of them has no manifest with settings, so that tensors alone are compared.")
        )
    meaning = "resuming A in the precision of B"
    changes = [
        {
            "precision": row.path,
            "A": row.before,
            "B": row.now,
            meaning: f"{row.outcome}: {row.meaning}",
        }
        for row in difference.changes
    ]
    if changes:
        parts.append(table(changes, wraps=(meaning,)))
    for heading, rows in (("setting", difference.settings), ("tensor", difference.tensors)):
        if rows:
            named = [{heading: row[heading], "A": row["a"], "B": row["b"]} for row in rows[:SHOWN]]
            parts.append(table(named, wraps=("A", "B")))
        if len(rows) > SHOWN:
            parts.append(Text(f"and {len(rows) - SHOWN} more"))
    return Group(*parts)


def round_trip_table(
    source: str, found: Sequence[RoundTrip], left: Sequence[str]
) -> RenderableType:
    """Return the changes of weights through other forms as something rich can print, a row per scheme and form."""
    rows = [
        {
            "scheme": one.scheme,
            "stored as": STORED_AS[one.form],
            "codes changed": _share(one.codes_changed, one.codes),
            "scales changed": f"{one.scales_changed} of {one.scales}",
            "values changed": _share(one.values_changed, one.codes),
            "largest error": f"{one.largest_error:.2g}" if one.values_changed else "0",
        }
        for one in found
    ]
    numbers = ("codes changed", "scales changed", "values changed", "largest error")
    notes = [Text(f"Left out, too large for the memory: {', '.join(left)}.")] if left else []
    return Group(table(rows, title=source, numbers=numbers, wraps=("stored as",)), *notes)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if part else "0"
