"""The answer of a rehearsal: for people, and as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from bridge.errors import Finding
from bridge.precision.values import plain
from bridge.report.findings import STYLES
from bridge.report.table import cell, table
from bridge.target.versions import TITLES

if TYPE_CHECKING:
    from bridge.rehearse.rehearse import Launched, Rehearsal

LONGEST = 36
"""Characters of a value that are shown; JSON has all."""


def rehearsal_text(rehearsal: Rehearsal) -> RenderableType:
    """Return what was kept and shrunk, each launch, every finding, and what a rehearsal cannot know."""
    small = rehearsal.small
    versions = ", ".join(
        f"{TITLES[name]} {version}" for name, version in rehearsal.versions.items()
    )
    lines: list[RenderableType] = [
        Text(
            f"{rehearsal.label} for {rehearsal.target}, rehearsed with {rehearsal.backend}: {versions}"
        ),
        Text(f"  kept: {rehearsal.kept}", style="dim"),
        Text(f"  layers: {', '.join(small.layers)} of the run's {rehearsal.layers}", style="dim"),
    ]
    changes = [
        {
            "shrunk": one.field,
            "run": _value(one.before),
            "rehearsal": _value(one.after),
            "why": one.reason,
        }
        for one in small.changes
    ]
    lines.append(table(changes, wraps=("run", "why")))
    launches = [_launch(launch) for launch in rehearsal.launches]
    lines.append(table(launches, numbers={*launches[0]} - {"launch"}))
    lines += [
        Text(f"left out {one.path} = {plain(one.value)!r}: {one.rule}.")
        for one in rehearsal.left_out
    ]
    lines += [_finding(finding) for finding in rehearsal.findings]
    lines.append(Text("A rehearsal cannot know:"))
    lines += [Text(f"  - {sentence}") for sentence in rehearsal.unknown]
    lines.append(Text(rehearsal.verdict))
    return Group(*lines)


def rehearsal_dict(rehearsal: Rehearsal, *, strict: bool = False) -> dict[str, Any]:
    """Return the answer as plain data."""
    return {
        "precision": rehearsal.label,
        "target": rehearsal.target,
        "backend": rehearsal.backend,
        "versions": dict(rehearsal.versions),
        "kept": rehearsal.kept,
        "layers": list(rehearsal.small.layers),
        "shrunk": [
            {
                "field": one.field,
                "run": plain(one.before),
                "rehearsal": plain(one.after),
                "reason": one.reason,
            }
            for one in rehearsal.small.changes
        ],
        "launches": [
            {
                "layout": str(launch.round),
                "processes": launch.round.processes,
                "seconds": round(launch.seconds, 1),
            }
            | {
                name: getattr(launch, name)
                for name in ("planned", "equal", "loss", "resumed_loss", "parameters")
            }
            for launch in rehearsal.launches
        ],
        "left_out": [
            {"path": one.path, "value": plain(one.value), "reason": one.rule}
            for one in rehearsal.left_out
        ],
        "findings": [
            {
                "severity": one.severity,
                "path": one.path,
                "rule": one.rule,
                "value": plain(one.value),
            }
            for one in rehearsal.findings
        ],
        "unknown": list(rehearsal.unknown),
        "verdict": rehearsal.verdict,
        "exit_code": rehearsal.exit_code(strict=strict),
    }


def _launch(launch: Launched) -> dict[str, str]:
    return {
        "launch": str(launch.round),
        "processes": str(launch.round.processes),
        "plan = record": f"{launch.equal} of {launch.planned}"
        if launch.planned is not None
        else "-",
        "loss of the last step": cell(launch.loss),
        "after the resume": cell(launch.resumed_loss),
        "seconds": f"{launch.seconds:.0f}",
    }


def _value(value: object) -> str:
    text = "-" if value is None else str(plain(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _finding(finding: Finding) -> Text:
    got = f", got {plain(finding.value)}" if finding.value is not None else ""
    text = (
        f" {finding.path}: {finding.rule.rstrip('.')}{got.rstrip('.')}. {finding.remedy}".rstrip()
    )
    return Text.assemble((finding.severity, STYLES[finding.severity]), text)
