"""`precision-bridge support-matrix`: which recipe runs on which GPU, with which CUDA and Transformer Engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from bridge.preflight.support import Support

__all__ = ["add_parser", "matrix_markdown"]

TITLES = {"te": "TE", "cuda": "CUDA"}
WORDS = {"native": "yes", "emulated": "emulated", "unknown": "?", "no": "no"}


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("support-matrix", help="show which recipe runs on which GPU, with which CUDA and TE")
    parser.add_argument("--target", help="one target only (h100x8,te2.8,cuda12.9), with the reasons")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Print the matrix, or one target's column of it."""
    if chosen.target:
        _one_target(chosen)
        return
    rows = _rows()
    if chosen.json:
        plain = {name: {column: _plain(found) for column, found in row.items()} for name, row in rows.items()}
        print(json.dumps(plain, indent=2))
    elif chosen.markdown:
        print(matrix_markdown())
    else:
        _print(rows)


def matrix_markdown() -> str:
    """Return the matrix as a Markdown table, with a line for each kind of cell."""
    rows = _rows()
    columns = list(next(iter(rows.values())))
    lines = [f"| recipe | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
    lines.extend(f"| {name} | {' | '.join(_cell(found) for found in row.values())} |" for name, row in rows.items())
    return "\n".join(lines)


def _rows() -> dict[str, dict[str, Support]]:
    from bridge.preflight.support import matrix
    from bridge.registry.registry import REGISTRY

    return matrix(recipe.name for recipe in REGISTRY.recipes())


def _one_target(chosen: argparse.Namespace) -> None:
    from bridge.preflight.support import support
    from bridge.preflight.target import parse_target
    from bridge.registry.registry import REGISTRY

    target = parse_target(chosen.target)
    found = {recipe.name: support(recipe.name, target) for recipe in REGISTRY.recipes()}
    if chosen.json:
        plain = {"target": str(target), "recipes": {name: _plain(one) for name, one in found.items()}}
        print(json.dumps(plain, indent=2))
        return
    if chosen.markdown:
        print(f"| recipe | {target} | why |\n|---|---|---|")
        print("\n".join(f"| {name} | {_cell(one)} | {one.reason} |" for name, one in found.items()))
        return
    width = max(map(len, found))
    print(f"{'':<{width}}  {target}")
    for name, one in found.items():
        print(f"{name:<{width}}  {WORDS[one.verdict]:<8}  {one.reason}")


def _print(rows: dict[str, dict[str, Support]]) -> None:
    columns = list(next(iter(rows.values())))
    width = max(map(len, rows))
    table = [[_cell(found) for found in row.values()] for row in rows.values()]
    widths = [max(len(column), *(len(row[at]) for row in table)) for at, column in enumerate(columns)]
    print(" ".join([f"{'':<{width}}", *(f"{column:<{wide}}" for column, wide in zip(columns, widths, strict=True))]))
    for name, row in zip(rows, table, strict=True):
        cells = [f"{cell:<{wide}}" for cell, wide in zip(row, widths, strict=True)]
        print(" ".join([f"{name:<{width}}", *cells]).rstrip())


def _cell(found: Support) -> str:
    """Return what a cell says: yes, no, emulated, or the versions that it takes."""
    needs = " ".join(f"{TITLES[product]} {least}" for product, least in found.needs)
    if found.verdict == "unknown":
        return needs or WORDS["unknown"]
    if found.verdict == "emulated" and needs:
        return f"emulated, {needs}"
    return WORDS[found.verdict]


def _plain(found: Support) -> dict[str, Any]:
    return {"verdict": found.verdict, "reason": found.reason, "needs": dict(found.needs)}
