"""The hand-over of a trained model for people: its manifest, and a serving config against it."""

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
    """Return the manifest as something rich can print.

    Modules of one name, scheme and place stand together.
    """
    groups: dict[tuple[str, str, str], list[ManifestRow]] = {}
    for row in manifest.rows:
        names = " ".join(_LAYER.sub("", name) for name in row.served) or "not known"
        title = title_of(row.scheme, manifest.mode)
        groups.setdefault((row.role, title, names), []).append(row)
    served = f"served, in its layer, as ({manifest.family or 'family not known'})"
    shown = []
    for (role, title, names), rows in groups.items():
        modules = sum(row.copies * max(1, len(row.served)) for row in rows)
        layers = [row.layer for row in rows]
        shown.append(
            {
                "module": role,
                "format": title,
                "layers": compact(layers),
                "modules": str(modules),
                served: names,
            }
        )
    title = manifest.precision + NUMBERED
    grid = table(shown, title=title, numbers=("modules",), wraps=("format", served))
    return Group(grid, *map(Text, manifest.notes))


def comparison_table(found: ServingComparison, precision: str, path: str) -> RenderableType:
    """Return the comparison as something rich can print.

    It has every kind of module, then each difference as a sentence.
    """
    rows = []
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
