"""`precision-bridge recipes --support`: which recipe runs on which GPU, CUDA and TE."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.cli.output import print_answer
from bridge.errors import RunConfigError
from bridge.registry.registry import REGISTRY

if TYPE_CHECKING:
    from bridge.preflight.recipe_support import Support

SHORT_PRODUCT_NAMES = {"te": "TE", "cuda": "CUDA"}
VERDICT_WORDS = {"native": "yes", "emulated": "emulated", "unknown": "?", "no": "no"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _SupportAnswer:
    """The answer of the command."""

    rows: list[dict[str, str]]
    """The rows of the table: heading -> cell."""
    content: dict[str, Any]
    """The answer as plain data."""


def print_support(args: argparse.Namespace) -> None:
    """Print which recipe runs on which GPU, or on one target with the reasons.

    Raises:
        RunConfigError: The command line has both ``--json`` and ``--markdown``.
    """
    if args.json and args.markdown:
        raise RunConfigError("--json: not allowed together with --markdown, got both. Give one.")
    if args.target:
        answer = _answer_for_target(args.target)
    else:
        answer = _answer_for_all_gpus()
    from bridge.report.table import format_markdown, make_table  # rich is heavy

    if args.markdown:
        print(format_markdown(answer.rows))
        return
    print_answer(args, answer.content, make_table(answer.rows, wraps=("why",)))


def _answer_for_target(declaration: str) -> _SupportAnswer:
    """Return whether each recipe runs on one target, with the reason."""
    from bridge.preflight.recipe_support import check_support
    from bridge.target.declaration import parse_target

    target = parse_target(declaration)
    rows, recipes = [], {}
    for name in REGISTRY.names():
        support = check_support(name, target)
        recipes[name] = _support_to_dict(support)
        rows.append({"recipe": name, str(target): _format_cell(support), "why": support.reason})
    return _SupportAnswer(rows=rows, content={"target": str(target), "recipes": recipes})


def _answer_for_all_gpus() -> _SupportAnswer:
    """Return whether each recipe runs on each GPU."""
    from bridge.preflight.recipe_support import build_support_matrix

    matrix = build_support_matrix(REGISTRY.names())
    content = {}
    for name, support_by_target in matrix.items():
        cells = {}
        for target, support in support_by_target.items():
            cells[target] = _support_to_dict(support)
        content[name] = cells
    return _SupportAnswer(rows=build_support_rows(matrix), content=content)


def build_support_rows(matrix: Mapping[str, Mapping[str, Support]]) -> list[dict[str, str]]:
    """Return a row for each recipe, with a cell for each target."""
    rows = []
    for name, cells in matrix.items():
        row = {"recipe": name}
        for target, support in cells.items():
            row[target] = _format_cell(support)
        rows.append(row)
    return rows


def _format_cell(support: Support) -> str:
    """Return the text of a cell: yes, no, emulated, or the least versions."""
    needs = " ".join(f"{SHORT_PRODUCT_NAMES[product]} {least}" for product, least in support.needs)
    if support.verdict == "emulated" and needs:
        return f"emulated, {needs}"
    if support.verdict == "unknown" and needs:
        return needs
    return VERDICT_WORDS[support.verdict]


def _support_to_dict(support: Support) -> dict[str, Any]:
    """Return the support of a recipe as plain data."""
    return {
        "verdict": support.verdict,
        "reason": support.reason,
        "needs": dict(support.needs),
    }
