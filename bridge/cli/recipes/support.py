"""`precision-bridge recipes --support`: which recipe runs on which GPU, CUDA and TE."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge.cli.output import print_answer
from bridge.errors import RunConfigError
from bridge.registry.registry import REGISTRY

if TYPE_CHECKING:
    from bridge.preflight.recipe_choice import Support

PRODUCT_TITLES = {"te": "TE", "cuda": "CUDA"}
VERDICT_WORDS = {"native": "yes", "emulated": "emulated", "unknown": "?", "no": "no"}


def print_support(args: argparse.Namespace) -> None:
    """Print the matrix of recipes and GPUs, or a target's column with the reasons."""
    from bridge.preflight.recipe_choice import build_support_matrix, check_support
    from bridge.target.declaration import parse_target

    if args.json and args.markdown:
        raise RunConfigError("--json: not allowed together with --markdown, got both. Give one.")
    rows: list[dict[str, str]] = []
    content: Any
    if args.target:
        target = parse_target(args.target)
        recipes = {}
        for name in REGISTRY.names():
            supported = check_support(name, target)
            recipes[name] = _support_to_dict(supported)
            rows.append(
                {"recipe": name, str(target): _format_cell(supported), "why": supported.reason}
            )
        content = {"target": str(target), "recipes": recipes}
    else:
        whole = build_support_matrix(REGISTRY.names())
        content = {}
        for name, row in whole.items():
            content[name] = {
                column: _support_to_dict(supported) for column, supported in row.items()
            }
        rows = build_support_rows(whole)
    from bridge.report.table import format_markdown, make_table  # rich is heavy

    if args.markdown:
        print(format_markdown(rows))
        return
    print_answer(args, content, make_table(rows, wraps=("why",)))


def build_support_rows(whole: Mapping[str, Mapping[str, Support]]) -> list[dict[str, str]]:
    """Return the rows of the matrix: the recipe, and the words of a cell for each target."""
    rows = []
    for name, cells in whole.items():
        row = {"recipe": name}
        for column, supported in cells.items():
            row[column] = _format_cell(supported)
        rows.append(row)
    return rows


def _format_cell(supported: Support) -> str:
    """Return the words of a cell: yes, no, emulated, or the versions that it takes."""
    needs = " ".join(f"{PRODUCT_TITLES[product]} {least}" for product, least in supported.needs)
    if supported.verdict == "emulated" and needs:
        return f"emulated, {needs}"
    if supported.verdict == "unknown" and needs:
        return needs
    return VERDICT_WORDS[supported.verdict]


def _support_to_dict(supported: Support) -> dict[str, Any]:
    return {
        "verdict": supported.verdict,
        "reason": supported.reason,
        "needs": dict(supported.needs),
    }
