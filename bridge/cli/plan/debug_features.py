"""`precision-bridge plan --write-debug-features FILE`: a features file for TE's debugger."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from bridge.cli.output import write_file
from bridge.cli.planned_answer import plan_of
from bridge.cli.run_arguments import read_run
from bridge.plan.debug_file import EVERY, PURPOSES, features_of


def write_features(chosen: argparse.Namespace) -> None:
    """Write the features file of a run's plan."""
    plan = plan_of(read_run(chosen))
    purpose = chosen.purpose or PURPOSES[0]
    content = features_of(plan, purpose, every=chosen.every or EVERY)
    path = Path(chosen.write_debug_features)
    text = yaml.safe_dump(content, sort_keys=False, width=1000)
    write_file(path, text, "--write-debug-features")
    print(f"{path}: {len(content)} entries ({purpose}).")
