"""`precision-bridge audit RUN [OTHER]`: the record of a run and its audit, or the difference of two records."""

import argparse
from dataclasses import asdict
from pathlib import Path

from bridge.cli.output import print_json
from bridge.cli.parser import add_json
from bridge.runtime.audit.compare import differences, format_gemms
from bridge.runtime.audit.record import FILE, Record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_json(parser)
    parser.add_argument(
        "folder", metavar="RUN", type=Path, help="the run's folder, or its record.json"
    )
    parser.add_argument("other", metavar="OTHER", type=Path, nargs="?", help="another run's")


def run(chosen: argparse.Namespace) -> int:
    """Print; the exit code is 1 where the run is not as planned, or the two differ."""
    records = [
        Record.read(path / FILE if path.is_dir() else path)
        for path in (chosen.folder, chosen.other)
        if path is not None
    ]
    record = records[0]
    found = list(map(str, differences(*records))) if chosen.other else list(record.audit)
    if chosen.json:
        print_json({"record": asdict(record), "findings": found})
        return bool(found)
    if chosen.other is None:
        print(f"Step {record.step}, {record.backend}, layers from 1: {format_gemms(record.gemms)}.")
    for sentence in found or [
        "Plan = record." if chosen.other is None else "The records are equal."
    ]:
        print(sentence)
    return bool(found)
