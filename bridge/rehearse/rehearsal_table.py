"""The result of a rehearsal: as a table for people, and as plain data for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.errors import Finding
from bridge.precision.coercion import to_plain_data
from bridge.report.findings import SEVERITY_STYLES
from bridge.report.table import format_cell, make_table
from bridge.target.versions import PRODUCT_TITLES

if TYPE_CHECKING:
    from bridge.rehearse.rehearsal import LaunchResult, Rehearsal
    from bridge.rehearse.small_run import Change

MAX_VALUE_LENGTH = 36
"""The most characters of a value in the table. JSON has the whole value."""


def make_rehearsal_table(rehearsal: Rehearsal) -> RenderableType:
    """Return the result as text.

    It has the kept fields and layers, a table of the changed settings, a table of the launches, the
    left-out settings, the findings, the open questions and the verdict.
    """
    changes = list(map(_make_change_row, rehearsal.small_run.changes))
    launches = list(map(_make_launch_row, rehearsal.launches))
    lines: list[RenderableType] = [
        *_make_heading(rehearsal),
        make_table(changes, wraps=("run", "why")),
        make_table(launches, numbers={*launches[0]} - {"launch"}),
    ]
    for setting in rehearsal.left_out:
        value = to_plain_data(setting.value)
        lines.append(Text(f"left out {setting.path} = {value!r}: {setting.rule}."))
    lines += map(_format_finding, rehearsal.findings)
    lines.append(Text("A rehearsal cannot know:"))
    for sentence in rehearsal.unknown:
        lines.append(Text(f"  - {sentence}"))
    lines.append(Text(rehearsal.verdict))
    return Group(*lines)


def rehearsal_to_dict(rehearsal: Rehearsal, *, strict: bool = False) -> dict[str, Any]:
    """Return the result as plain data.

    Args:
        rehearsal: The result.
        strict: Whether warnings and left-out settings count in the exit code.
    """
    return {
        "precision": rehearsal.label,
        "target": rehearsal.target,
        "backend": rehearsal.backend,
        "versions": dict(rehearsal.versions),
        "kept": rehearsal.kept,
        "layers": list(rehearsal.small_run.layers),
        "shrunk": list(map(_change_to_dict, rehearsal.small_run.changes)),
        "launches": list(map(_launch_to_dict, rehearsal.launches)),
        "left_out": list(map(_left_out_to_dict, rehearsal.left_out)),
        "findings": list(map(_finding_to_dict, rehearsal.findings)),
        "unknown": list(rehearsal.unknown),
        "verdict": rehearsal.verdict,
        "exit_code": rehearsal.exit_code(strict=strict),
    }


def _make_heading(rehearsal: Rehearsal) -> list[Text]:
    """Return the lines above the tables: the run, the releases, the kept fields and layers."""
    versions = []
    for name, version in rehearsal.versions.items():
        versions.append(f"{PRODUCT_TITLES[name]} {version}")
    title = f"{rehearsal.label} for {rehearsal.target}, rehearsed with {rehearsal.backend}"
    layers = ", ".join(rehearsal.small_run.layers)
    return [
        Text(f"{title}: {', '.join(versions)}"),
        Text(f"  kept: {rehearsal.kept}", style="dim"),
        Text(f"  layers: {layers} of the run's {rehearsal.layers}", style="dim"),
    ]


def _make_change_row(change: Change) -> dict[str, str]:
    """Return the cells of a changed setting in the table."""
    return {
        "shrunk": change.field,
        "run": _format_value(change.before),
        "rehearsal": _format_value(change.after),
        "why": change.reason,
    }


def _change_to_dict(change: Change) -> dict[str, Any]:
    """Return a changed value as plain data."""
    return {
        "field": change.field,
        "run": to_plain_data(change.before),
        "rehearsal": to_plain_data(change.after),
        "reason": change.reason,
    }


def _launch_to_dict(launch: LaunchResult) -> dict[str, Any]:
    """Return a launch as plain data."""
    return {
        "layout": str(launch.layout),
        "processes": launch.layout.processes,
        "seconds": round(launch.seconds, 1),
        "planned": launch.planned,
        "equal": launch.equal,
        "loss": launch.loss,
        "resumed_loss": launch.resumed_loss,
        "parameters": launch.parameters,
    }


def _left_out_to_dict(setting: Finding) -> dict[str, Any]:
    """Return a setting that was left out as plain data."""
    return {"path": setting.path, "value": to_plain_data(setting.value), "reason": setting.rule}


def _finding_to_dict(finding: Finding) -> dict[str, Any]:
    """Return a finding as plain data."""
    return {
        "severity": finding.severity,
        "path": finding.path,
        "rule": finding.rule,
        "value": to_plain_data(finding.value),
    }


def _make_launch_row(launch: LaunchResult) -> dict[str, str]:
    """Return the cells of a launch in the table."""
    equal = "-"
    if launch.planned is not None:
        equal = f"{launch.equal} of {launch.planned}"
    return {
        "launch": str(launch.layout),
        "processes": str(launch.layout.processes),
        "plan = record": equal,
        "loss of the last step": format_cell(launch.loss),
        "after the resume": format_cell(launch.resumed_loss),
        "seconds": f"{launch.seconds:.0f}",
    }


def _format_value(value: object) -> str:
    """Return a value as the text of a cell, cut at `MAX_VALUE_LENGTH` characters."""
    if value is None:
        return "-"
    value_text = str(to_plain_data(value))
    if len(value_text) > MAX_VALUE_LENGTH:
        return f"{value_text[:MAX_VALUE_LENGTH]} ..."
    return value_text


def _format_finding(finding: Finding) -> Text:
    """Return a finding as a line with a coloured severity."""
    sentence = f" {finding.path}: {finding.rule.rstrip('.')}"
    if finding.value is not None:
        sentence += f", got {to_plain_data(finding.value)}".rstrip(".")
    sentence = f"{sentence}. {finding.remedy}".rstrip()
    return Text.assemble((finding.severity, SEVERITY_STYLES[finding.severity]), sentence)
