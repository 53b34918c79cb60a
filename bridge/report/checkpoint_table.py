"""A checkpoint, or the difference of two checkpoints, as tables."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.report.table import make_facts_table, make_table
from bridge.runtime.checkpoint.contents import Contents, Difference
from bridge.runtime.checkpoint.precision_change import PrecisionChange

SHOWN_PACKAGES = ("precision-bridge", "megatron-core", "torch", "transformer-engine")
MAX_ROWS = 10
"""The most rows of a table of differences. Further rows are only counted."""
RESUME_HEADING = "resuming A in the precision of B"
STORED_WEIGHTS_NOTE = (
    "Weights in FP8 or FP4 are saved in the dtype of the mode. A resumed run quantises the FP32 "
    "master weights again, which gives the codes and scales that they had. From the saved weights "
    "alone, about one MXFP8 scale in twenty is another one, with other codes, for the same values."
)


def make_contents_table(contents: Contents) -> RenderableType:
    """Return the origin of a checkpoint, and its tensors by part and dtype, as tables."""
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
    if _stores_weights_in_low_precision(contents):
        shown.append(Text(STORED_WEIGHTS_NOTE))
    return Group(*shown)


def _stores_weights_in_low_precision(contents: Contents) -> bool:
    """Return whether the run kept its weights in FP8 or FP4."""
    # The settings of a manifest are text.
    switches = (contents.settings.get("model.fp8_param"), contents.settings.get("model.fp4_param"))
    return "True" in switches


def _list_facts(contents: Contents) -> list[tuple[str, str]]:
    """Return facts about the origin of a checkpoint, as names with values."""
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


def make_difference_table(
    first: Contents, second: Contents, difference: Difference
) -> RenderableType:
    """Return the settings, the precision and the tensors in which two checkpoints differ."""
    title = f"A: {first.path}\nB: {second.path}"
    if not difference:
        return Text(f"{title}\nNo setting and no tensor's dtype or shape differs.")
    parts: list[RenderableType] = [Text(title)]
    if not (first.settings and second.settings):
        parts.append(
            Text("One of them has no manifest with settings, so that tensors alone are compared.")
        )
    if difference.changes:
        parts.append(_make_changes_table(difference.changes))
    parts += _make_value_table(difference.settings, heading="setting")
    parts += _make_value_table(difference.tensors, heading="tensor")
    return Group(*parts)


def _make_value_table(
    differences: Sequence[Mapping[str, str]], *, heading: str
) -> list[RenderableType]:
    """Return the first differences as a table, and the number of further differences.

    Empty if there are no differences.
    """
    rows = []
    for difference in differences[:MAX_ROWS]:
        rows.append({heading: difference[heading], "A": difference["a"], "B": difference["b"]})
    parts: list[RenderableType] = []
    if rows:
        parts.append(make_table(rows, wraps=("A", "B")))
    if len(differences) > MAX_ROWS:
        parts.append(Text(f"and {len(differences) - MAX_ROWS} more"))
    return parts


def _make_changes_table(changes: Sequence[PrecisionChange]) -> RenderableType:
    """Return the changes of precision, each with its consequence for a run that resumes."""
    rows = []
    for change in changes:
        rows.append(
            {
                "precision": change.path,
                "A": change.before,
                "B": change.now,
                RESUME_HEADING: f"{change.outcome}: {change.meaning}",
            }
        )
    return make_table(rows, wraps=(RESUME_HEADING,))
