"""`precision-bridge recipes --support`: which recipe runs on which GPU, with which CUDA and Transformer Engine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge.cli.output import answer
from bridge.errors import RunConfigError
from bridge.registry.registry import REGISTRY

if TYPE_CHECKING:
    from bridge.preflight.auto import Support

TITLES = {"te": "TE", "cuda": "CUDA"}
WORDS = {"native": "yes", "emulated": "emulated", "unknown": "?", "no": "no"}


def show_support(chosen: argparse.Namespace) -> None:
    """Print the matrix of recipes and GPUs, or a target's column with the reasons."""
    from bridge.preflight.auto import matrix, support
    from bridge.target.target import parse_target

    if chosen.json and chosen.markdown:
        raise RunConfigError("--json: not allowed together with --markdown, got both. Give one.")
    if chosen.target:
        target = parse_target(chosen.target)
        found = {name: support(name, target) for name in REGISTRY.names()}
        content: Any = {
            "target": str(target),
            "recipes": {name: _plain(one) for name, one in found.items()},
        }
        rows = [
            {"recipe": name, str(target): _cell(one), "why": one.reason}
            for name, one in found.items()
        ]
    else:
        whole = matrix(REGISTRY.names())
        content = {
            name: {column: _plain(one) for column, one in row.items()}
            for name, row in whole.items()
        }
        rows = support_rows(whole)
    from bridge.report.table import markdown, table  # rich is heavy

    if chosen.markdown:
        print(markdown(rows))
        return
    answer(chosen, content, table(rows, wraps=("why",)))


def support_rows(whole: Mapping[str, Mapping[str, Support]]) -> list[dict[str, str]]:
    """Return the rows of the matrix: the recipe, and the words of a cell for each target."""
    return [
        {"recipe": name, **{column: _cell(one) for column, one in row.items()}}
        for name, row in whole.items()
    ]


def _cell(found: Support) -> str:
    """Return the words of a cell: yes, no, emulated, or the versions that it takes."""
    needs = " ".join(f"{TITLES[product]} {least}" for product, least in found.needs)
    if found.verdict == "emulated" and needs:
        return f"emulated, {needs}"
    return needs if found.verdict == "unknown" and needs else WORDS[found.verdict]


def _plain(found: Support) -> dict[str, Any]:
    return {"verdict": found.verdict, "reason": found.reason, "needs": dict(found.needs)}
