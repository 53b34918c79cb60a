"""`precision-bridge manifest --for SYSTEM`: the quantisation config of a serving system."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from bridge.cli.output import print_json, write_file

if TYPE_CHECKING:
    from bridge.convert.serving.manifest import Manifest


def print_export(manifest: Manifest, args: argparse.Namespace) -> None:
    """Print the config of a system, or write it to the file of ``--out``.

    Settings without an exact counterpart are printed on stderr, or are part of the JSON.
    """
    from bridge.convert.conversion import format_records
    from bridge.convert.serving.exporter import export
    from bridge.read.foreign.payload_text import as_json

    report = export(manifest, args.system)
    content: dict[str, Any] = {}
    if report.payload:
        content["quantization_config"] = report.payload
    if args.json:
        print_json({**content, "losses": format_records(report.unmapped, "export")})
        return
    if not content:
        sentence = (
            f"{manifest.precision} has every linear layer in {manifest.mode}: "
            "there is nothing to state."
        )
        print(sentence, file=sys.stderr)
    for record in report.unmapped:
        print(record, file=sys.stderr)
    if args.out is None:
        print(as_json(content), end="")
    else:
        write_file(args.out, as_json(content), "--out")
        print(f"wrote {args.out}")
