"""`precision-bridge sources DIR`: every source of precision in a project, and which one wins."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from bridge.interop.project import Source, Survey

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("sources", help="list every source of precision in a project, and which one wins")
    parser.add_argument("folder", help="folder of the project")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Print what each source says, whether they agree, and the winner."""
    from bridge.interop.project import survey

    found = survey(chosen.folder)
    if chosen.json:
        winner = found.winner
        told = {
            "sources": [dataclasses.asdict(source) for source in found.sources],
            "agree": found.agree,
            "winner": dataclasses.asdict(winner) if winner else None,
            "unread": found.unread,
        }
        print(json.dumps(told, indent=2))
        return
    print(*_lines(found), sep="\n")


def _lines(found: Survey) -> list[str]:
    from bridge.interop.project import ORDER

    if not found.sources:
        lines = ["No source of precision was found."]
    else:
        width = max(len(source.path) for source in found.sources)
        lines = [_line(source, width) for source in found.sources]
        lines += ["", *_verdict(found, dict(ORDER))]
    return [*lines, *(f"not read: {path}: {why}" for path, why in found.unread.items())]


def _line(source: Source, width: int) -> str:
    recipe = f" [{source.recipe}]" if source.recipe else ""
    place = f" ({source.run})" if source.run else ""
    return f"{source.path:<{width}}  {source.system:<16}  {source.precision or source.says}{recipe}{place}"


def _verdict(found: Survey, reasons: dict[str, str]) -> list[str]:
    ranked = found.ranked
    if not ranked:
        return ["None of them says what a run trains in."]
    if found.agree:
        return [f"All agree: {ranked[0].precision}."]
    told = ", ".join(dict.fromkeys(f"{source.path} says {source.precision}" for source in ranked))
    winner = found.winner
    if winner is None:
        return [f"They disagree: {told}.", f"No single winner: several sources of the kind '{ranked[0].kind}' differ."]
    return [f"They disagree: {told}.", f"{winner.path} wins ({winner.kind}): {reasons[winner.kind]}."]
