"""The hand-over of a trained model for people: its manifest, and a serving config held against it."""

import re

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.convert.serving.comparison import ServingComparison
from bridge.convert.serving.formats import title_of
from bridge.convert.serving.manifest import Manifest
from bridge.plan.precision_plan import compact
from bridge.report.table import NUMBERED, table

_LAYER = re.compile(r"model\.layers\.\d+\.")


def manifest_table(manifest: Manifest) -> RenderableType:
    """Return the manifest as something rich can print: modules of one name, scheme and place together."""
    found: dict[tuple[str, str, str], list[tuple[str, int]]] = {}
    for row in manifest.rows:
        names = " ".join(_LAYER.sub("", name) for name in row.served) or "not known"
        title = title_of(row.scheme, manifest.mode)
        found.setdefault((row.role, title, names), []).append(
            (row.layer, row.copies * max(1, len(row.served)))
        )
    served = f"served, in its layer, as ({manifest.family or 'family not known'})"
    rows = [
        {
            "module": role,
            "format": title,
            "layers": compact([layer for layer, _ in places]),
            "modules": str(sum(count for _, count in places)),
            served: names,
        }
        for (role, title, names), places in found.items()
    ]
    shown = table(
        rows, title=manifest.precision + NUMBERED, numbers=("modules",), wraps=("format", served)
    )
    return Group(shown, *(Text(note) for note in manifest.notes))


def comparison_table(found: ServingComparison, precision: str, path: str) -> RenderableType:
    """Return the comparison as something rich can print: every kind of module, then each difference as a sentence."""
    rows = [
        {
            "": "differs" if row.differs else "same",
            "module": row.role,
            "training": row.training or found.mode,
            "serving": row.serving or "not quantised",
            "modules": str(row.modules),
            "read by": ", ".join(row.readers) or "all",
        }
        for row in found.rows
    ]
    title = f"training: {precision}\nserving: {path}"
    shown = table(rows, title=title, numbers=("modules",), wraps=("training", "serving"))
    sentences = [Text(row.sentence(found.mode)) for row in found.differences]
    sentences += [Text(refused) for refused in found.refused]
    if not sentences:
        sentences = [Text("Serving quantises what training quantises, in the same scheme.")]
    return Group(shown, *sentences)
