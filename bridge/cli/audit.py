"""`precision-bridge audit RUN [OTHER]`: the record of a run, or the difference of two records."""

import argparse
from dataclasses import asdict
from pathlib import Path

from bridge.cli.output import print_json
from bridge.cli.parser import add_json_option
from bridge.runtime.audit.gemm_formats import format_gemms
from bridge.runtime.audit.record import RECORD_FILE, Record
from bridge.runtime.audit.record_comparison import compare_records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_json_option(parser)
    parser.add_argument(
        "folder", metavar="RUN", type=Path, help="the run's folder, or its record.json"
    )
    parser.add_argument("other", metavar="OTHER", type=Path, nargs="?", help="another run's")


def run(args: argparse.Namespace) -> int:
    """Print the record of a run, or the difference of two records.

    Returns:
        1 if the run is not as planned, or if the two records differ, else 0.
    """
    record = _read_record(args.folder)
    if args.other is None:
        sentences = list(record.audit)
        verdict = "Plan = record."
    else:
        sentences = list(map(str, compare_records(record, _read_record(args.other))))
        verdict = "The records are equal."
    if args.json:
        print_json({"record": asdict(record), "findings": sentences})
        return bool(sentences)
    if args.other is None:
        print(f"Step {record.step}, {record.backend}, layers from 1: {format_gemms(record.gemms)}.")
    for sentence in sentences or [verdict]:
        print(sentence)
    return bool(sentences)


def _read_record(path: Path) -> Record:
    """Return the record of a run's folder, or of a file."""
    if path.is_dir():
        path = path / RECORD_FILE
    return Record.read(path)
