"""`precision-bridge memory`: bytes on each rank, for any recipe, model and parallel layout."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bridge.cli.run_values import add_run_arguments, described

if TYPE_CHECKING:
    import argparse

    from bridge.cli.run_values import Described

__all__ = ["add_parser"]

RECOMPUTE = {
    "none": {"recompute": "none", "modules": ()},
    "selective (core_attn)": {"recompute": "selective", "modules": ("core_attn",)},
    "full": {"recompute": "full", "modules": ()},
}


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("memory", help="show what weights, gradients, states and activations take on a rank")
    add_run_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Print the memory of a rank of each pipeline stage."""
    from bridge.plan.memory import memory_report

    this = described(chosen)
    report = memory_report(this.plan, workload=this.workload, ddp=this.values.ddp, capability=this.capability)
    activations = _activations(this)
    if chosen.json:
        print(json.dumps({**report.to_dict(), "activations_by_recompute": activations}, indent=2))
        return
    from bridge.report.memory_table import memory_table
    from bridge.report.table import show  # rich is heavy

    show(memory_table(report, activations))


def _activations(this: Described) -> dict[str, tuple[int, ...]]:
    """Return the activations of each stage under each kind of recomputation."""
    if not this.workload.seq_length:
        return {}
    from bridge.plan.memory import memory_report

    found = {}
    for name, changes in RECOMPUTE.items():
        load = replace(this.workload, **changes)  # type: ignore[arg-type]
        report = memory_report(this.plan, workload=load, ddp=this.values.ddp)
        found[name] = tuple(rank.bytes_of["activations"] for rank in report.ranks)
    return found
