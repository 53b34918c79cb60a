"""The report on a conversion as text: the recipe, and the settings without an exact counterpart."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bridge.read.foreign.semantics import SEMANTICS
from bridge.registry.nearest_recipe import format_nearest_label

if TYPE_CHECKING:
    from bridge.cli.convert.converted_run import ConvertedRun
    from bridge.read.foreign.reports import ImportReport, Unmapped

SILENT_REASONS = ("implied default", "dead knob")
"""Reasons of records that change nothing by themselves. ``-v`` lists them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _RecordGroup:
    """Records that are printed below a common title."""

    reasons: tuple[str, ...]
    """The reasons of the records."""
    import_title: str
    """The title above records about the file that was read."""
    export_title: str
    """The title above records about the target system. The name of the system follows it."""


RECORD_GROUPS = (
    _RecordGroup(
        reasons=("unsupported", "semantics"),
        import_title="losses that change what a run computes",
        export_title="losses that change what it computes in",
    ),
    _RecordGroup(
        reasons=("approximated",),
        import_title="nearest settings taken",
        export_title="nearest settings taken in",
    ),
    _RecordGroup(
        reasons=SILENT_REASONS,
        import_title="defaults that decide, and settings without an effect",
        export_title="the same in",
    ),
)


def format_report(converted: ConvertedRun, args: argparse.Namespace) -> list[str]:
    """Return the report on one run: its recipe, its fields, and the records."""
    source, imported = converted.run.source, converted.run.imported
    lines = [
        _format_headline(imported),
        f"{source['path']}: {converted.run.system.title}; it {converted.run.evidence}.",
    ]
    if source["run"]:
        lines.append(f"run: {source['run']}")
    lines += _format_fields(imported, is_verbose=args.verbose)
    lines.append(f"semantics: {imported.semantics}: {SEMANTICS[imported.semantics]}")
    import_records = list(imported.unmapped)
    export_records: list[Unmapped] = []
    if converted.exported is not None:
        export_records = list(converted.exported.unmapped)
    for group in RECORD_GROUPS:
        if group.reasons == SILENT_REASONS and not args.verbose:
            continue
        lines += _format_group(import_records, group.reasons, group.import_title)
        lines += _format_group(export_records, group.reasons, f"{group.export_title} {args.to}")
    if not args.verbose:
        lines += _name_silent_fields([*import_records, *export_records])
    return lines


def _format_headline(imported: ImportReport) -> str:
    """Return the equivalent recipe, or the nearest recipe, or the source that decides the mode."""
    if imported.decided_by is not None:
        return f"mode: not stated; {imported.decided_by} decides"
    if imported.recipe is not None:
        return f"recipe: {imported.recipe}"
    return f"recipe: none means the same; the nearest is {format_nearest_label(imported.config)}"


def _format_fields(imported: ImportReport, *, is_verbose: bool) -> list[str]:
    """Return the stated fields: all under ``-v``, else only if they do not decide the mode."""
    stated = []
    for name, value in imported.config.to_dict().items():
        stated.append(f"{name}={value}")
    if is_verbose:
        return [f"  {field}" for field in stated or ["nothing is stated"]]
    if imported.decided_by is not None and stated:
        return [f"stated all the same: {', '.join(stated)}"]
    return []


def _format_group(records: Sequence[Unmapped], reasons: Sequence[str], title: str) -> list[str]:
    """Return the records of some reasons below their title; empty if there are none."""
    group = [record for record in records if record.reason in reasons]
    if not group:
        return []
    return [f"{title} ({len(group)}):", *(f"  {record}" for record in group)]


def _name_silent_fields(records: Sequence[Unmapped]) -> list[str]:
    """Return a line with the fields of records that change nothing; empty if there are none."""
    fields: dict[str, None] = {}
    for record in records:
        if record.reason in SILENT_REASONS:
            fields[record.field] = None
    if not fields:
        return []
    title = "defaults that decide, and settings without an effect (-v explains them)"
    return [f"{title}: {', '.join(fields)}"]


def format_strict_refusal(converted: Sequence[ConvertedRun], args: argparse.Namespace) -> str:
    """Return the line of ``--strict`` about settings whose precision is lost. Empty if none is."""
    lost: dict[str, None] = {}
    for converted_run in converted:
        for record in converted_run.losses():
            lost[f"{record.field}={record.value!r}"] = None
    if not lost:
        return ""
    target = ""
    if args.to is not None:
        target = f" for {args.to}"
    remedy = "Follow the remedies of the report, or convert without --strict."
    return f"{args.file}: precision is lost{target}: {', '.join(lost)}. {remedy}"
