"""`make_manifest_table` and `make_comparison_table`: a manifest, and its comparison, as tables."""

import re

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.convert.serving.comparison import ServingComparison
from bridge.convert.serving.formats import format_scheme
from bridge.convert.serving.manifest import Manifest, ManifestRow
from bridge.plan.precision_plan import format_ranges
from bridge.report.table import LAYER_COUNT_NOTE, make_table

_LAYER_PATTERN = re.compile(r"model\.layers\.\d+\.")


def make_manifest_table(manifest: Manifest) -> RenderableType:
    """Return the manifest as a table. Modules with equal role, format and names share a row."""
    groups: dict[tuple[str, str, str], list[ManifestRow]] = {}
    for row in manifest.rows:
        names = " ".join(_LAYER_PATTERN.sub("", name) for name in row.served) or "not known"
        title = format_scheme(row.scheme, manifest.mode)
        groups.setdefault((row.role, title, names), []).append(row)
    family = manifest.family or "family not known"
    served_column = f"served, in its layer, as ({family})"
    shown: list[dict[str, str]] = []
    for (role, title, names), rows in groups.items():
        count = sum(row.copies * max(1, len(row.served)) for row in rows)
        shown.append(
            {
                "module": role,
                "format": title,
                "layers": format_ranges([row.layer for row in rows]),
                "modules": str(count),
                served_column: names,
            }
        )
    table_title = manifest.precision + LAYER_COUNT_NOTE
    table = make_table(
        shown, title=table_title, numbers=("modules",), wraps=("format", served_column)
    )
    return Group(table, *map(Text, manifest.notes))


def make_comparison_table(
    comparison: ServingComparison, precision: str, path: str
) -> RenderableType:
    """Return the comparison as a table of kinds of modules, with a sentence for each difference.

    Args:
        precision: The label of the precision in training.
        path: The serving config.
    """
    rows: list[dict[str, str]] = []
    for row in comparison.rows:
        verdict = "same"
        if row.differs:
            verdict = "differs"
        rows.append(
            {
                "": verdict,
                "module": row.role,
                "training": row.training or comparison.mode,
                "serving": row.serving or "not quantised",
                "modules": str(row.modules),
                "read by": ", ".join(row.readers) or "all",
            }
        )
    title = f"training: {precision}\nserving: {path}"
    shown = make_table(rows, title=title, numbers=("modules",), wraps=("training", "serving"))
    sentences = [row.sentence(comparison.mode) for row in comparison.differences]
    sentences += comparison.refused
    if not sentences:
        sentences = ["Serving quantises what training quantises, in the same scheme."]
    return Group(shown, *map(Text, sentences))
