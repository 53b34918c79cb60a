"""`precision-bridge plan --write-debug-features FILE`: a file for TE's debugger."""

from __future__ import annotations

import argparse
from pathlib import Path

import yaml

from bridge.cli.output import refuse_input_files, write_file
from bridge.cli.run_answer import plan_run
from bridge.cli.run_arguments import RunArguments, read_run
from bridge.errors import RunConfigError
from bridge.plan.debug_features_file import DEFAULT_INTERVAL, PURPOSES, build_features

INTERVAL_REMEDY = f"Write --every {DEFAULT_INTERVAL}."


def write_features(args: argparse.Namespace) -> None:
    """Write the features file of a run's plan.

    Raises:
        RunConfigError: ``--every`` is less than 1, or the file is an input or cannot be written.
    """
    path = Path(args.write_debug_features)
    inputs = [*RunArguments.from_args(args).files]
    if args.debug_features is not None:
        inputs.append(args.debug_features)
    refuse_input_files(path, "--write-debug-features", inputs)
    every = DEFAULT_INTERVAL
    if args.every is not None:
        every = args.every
    if every < 1:
        raise RunConfigError.of(
            "--every", "must be a whole number of at least 1", every, INTERVAL_REMEDY
        )
    plan = plan_run(read_run(args))
    purpose = args.purpose or PURPOSES[0]
    content = build_features(plan, purpose, every=every)
    features_yaml = yaml.safe_dump(content, sort_keys=False, width=1000)
    write_file(path, features_yaml, "--write-debug-features")
    print(f"{path}: {len(content)} entries ({purpose}).")
