"""A manifest, and its comparison with a serving config, as tables for people."""

import re

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.convert.serving.comparison import ServingComparison
from bridge.convert.serving.formats import title_of
from bridge.convert.serving.manifest import Manifest, ManifestRow
from bridge.plan.precision_plan import compact
from bridge.report.table import NUMBERED, table

_LAYER = re.compile(r"model\.layers\.\d+\.")


def manifest_table(manifest: Manifest) -> RenderableType:
    """Return the manifest as a table; modules of the same name, format and served names are a row."""
    groups: dict[tuple[str, str, str], list[ManifestRow]] = {}
    for row in manifest.rows:
        names = " ".join(_LAYER.sub("", name) for name in row.served) or "not known"
        title = title_of(row.scheme, manifest.mode)
        groups.setdefault((row.role, title, names), []).append(row)
    family = manifest.family or "family not known"
    served = f"served, in its layer, as ({family})"
    shown: list[dict[str, str]] = []
    for (role, title, names), rows in groups.items():
        count = sum(row.copies * max(1, len(row.served)) for row in rows)
        columns = {"module": role, "format": title, "layers": compact([row.layer for row in rows])}
        shown.append({**columns, "modules": str(count), served: names})
    title = manifest.precision + NUMBERED
    grid = table(shown, title=title, numbers=("modules",), wraps=("format", served))
    return Group(grid, *map(Text, manifest.notes))


def comparison_table(found: ServingComparison, precision: str, path: str) -> RenderableType:
    """Return the comparison as a table of the kinds of modules, with a sentence for each difference."""
    rows: list[dict[str, str]] = []
    for row in found.rows:
        verdict = "same"
        if row.differs:
            verdict = "differs"
        rows.append(
            {
                "": verdict,
                "module": row.role,
                "training": row.training or found.mode,
                "serving": row.serving or "not quantised",
                "modules": str(row.modules),
                "read by": ", ".join(row.readers) or "all",
            }
        )
    title = f"training: {precision}\nserving: {path}"
    shown = table(rows, title=title, numbers=("modules",), wraps=("training", "serving"))
    sentences = [row.sentence(found.mode) for row in found.differences]
    sentences += found.refused
    if not sentences:
        sentences = ["Serving quantises what training quantises, in the same scheme."]
    return Group(shown, *map(Text, sentences))
