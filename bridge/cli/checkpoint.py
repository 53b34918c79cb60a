"""`precision-bridge checkpoint inspect|diff|verify|certify`: a checkpoint's files, without code."""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bridge.cli.output import print_answer, print_json
from bridge.cli.parser import add_json_option
from bridge.runtime.checkpoint.contents import Contents, Difference, find_checkpoint
from bridge.runtime.checkpoint.manifest import Manifest, compute_manifest_digest
from bridge.runtime.checkpoint.pickles import find_pickle_fault


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the parsers of the parts."""
    parts = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    text = (
        "show which run wrote a checkpoint, in which precision, and its tensors by part and dtype"
    )
    inspect = _add_part(parts, "inspect", _inspect, text)
    _add_path(inspect, "PATH")
    text = (
        "show what differs between two checkpoints, "
        "and what it means to resume in the other's precision"
    )
    diff = _add_part(parts, "diff", _diff, text)
    _add_path(diff, "A")
    _add_path(diff, "B")
    text = (
        "compare every file with the manifest; exit code 0, 1 where one was changed, "
        "2 without a manifest"
    )
    verify = _add_part(parts, "verify", _verify, text)
    _add_path(verify, "PATH")
    verify.add_argument(
        "--digest",
        metavar="SHA256",
        help="the manifest's own digest, as the run that wrote it logged",
    )
    text = (
        "measure what BF16 storage or an export in blocks does to codes, scales and values "
        "of quantised weights"
    )
    certify = _add_part(parts, "certify", _certify, text)
    text = "a checkpoint, or a folder of checkpoints; without it, a normal matrix of 1024 x 1024"
    certify.add_argument("path", metavar="PATH", type=Path, nargs="?", help=text)


def run(args: argparse.Namespace) -> int | None:
    """Do the work of the part that was asked for, and return its exit code."""
    work: Callable[[argparse.Namespace], int | None] = args.part
    return work(args)


def _add_part(
    parts: Any, name: str, work: Callable[[argparse.Namespace], int | None], text: str
) -> argparse.ArgumentParser:
    """Add a part that can print JSON, and return its parser."""
    parser: argparse.ArgumentParser = parts.add_parser(name, help=text, description=f"{text}.")
    add_json_option(parser)
    parser.set_defaults(part=work)
    return parser


def _add_path(parser: argparse.ArgumentParser, name: str) -> None:
    text = "a checkpoint, or a folder of checkpoints, whose newest is taken"
    parser.add_argument(name.lower(), metavar=name, type=Path, help=text)


def _inspect(args: argparse.Namespace) -> None:
    from bridge.report.checkpoint_table import make_contents_table  # rich is heavy

    contents = Contents.read(find_checkpoint(args.path))
    print_answer(args, contents.to_dict(), make_contents_table(contents))


def _diff(args: argparse.Namespace) -> int:
    """Print what differs; return 1 where something does."""
    from bridge.report.checkpoint_table import make_difference_table

    first = Contents.read(find_checkpoint(args.a))
    second = Contents.read(find_checkpoint(args.b))
    difference = Difference.from_contents(first, second)
    content = {"a": str(first.path), "b": str(second.path), **difference.to_dict()}
    print_answer(args, content, make_difference_table(first, second, difference))
    return bool(difference)


def _certify(args: argparse.Namespace) -> None:
    """Print the changes of weights that are stored in another form and quantised again."""
    import torch  # heavy, and only for values

    from bridge.report.round_trip_table import make_round_trip_table
    from bridge.runtime.checkpoint.linear_weights import (
        find_linear_weights,
        list_too_large,
        load_matrices,
    )
    from bridge.runtime.numerics.round_trip import measure_round_trips

    left: list[str] = []
    if args.path is None:
        source = "a normal matrix of 1024 x 1024, standard deviation 0.02, seed 0"
        generator = torch.Generator().manual_seed(0)
        weights = iter([torch.randn(1024, 1024, generator=generator) * 0.02])
    else:
        checkpoint = find_checkpoint(args.path)
        tensors = find_linear_weights(checkpoint)
        left = list_too_large(tensors)
        read = {key: tensor for key, tensor in tensors.items() if key not in left}
        masters = sum(tensor.dtype == "float32" for tensor in read.values())
        source = f"{checkpoint}: {len(read)} tensors of linear layers, {masters} of them FP32"
        weights = load_matrices(checkpoint, read)
    rows = measure_round_trips(weights)
    content = {"source": source, "left_out": left, "round_trips": list(map(asdict, rows))}
    print_answer(args, content, make_round_trip_table(source, rows, left))


def _verify(args: argparse.Namespace) -> int:
    """Print whether a checkpoint is as it was written; return 1 if it is not."""
    checkpoint = find_checkpoint(args.path)
    manifest = Manifest.read(checkpoint)
    sha256 = compute_manifest_digest(checkpoint)
    fault = _find_fault(checkpoint, manifest, sha256, args.digest)
    if args.json:
        print_json(
            {
                "path": str(checkpoint),
                "sound": fault is None,
                "fault": fault,
                "manifest_sha256": sha256,
                "checksums": len(manifest.checksums),
                "files": len(manifest.sizes),
            }
        )
    elif fault is not None:
        print(f"{checkpoint}: {fault}.")
    else:
        compared = "sizes; it holds no checksums"
        if manifest.checksums:
            compared = "sizes and checksums"
        print(f"{checkpoint}: {len(manifest.sizes)} files are as the manifest says ({compared}).")
        line = f"manifest sha256 {sha256}"
        if args.digest:
            line = f"{line}, as given"
        print(line)
    return fault is not None


def _find_fault(
    checkpoint: Path, manifest: Manifest, sha256: str, stated_sha256: str | None
) -> str | None:
    """Return the first fault of a checkpoint's files; None if there is none."""
    if stated_sha256 is not None and stated_sha256.lower() != sha256:
        return "manifest.json is another one than the digest is of"
    fault = manifest.find_outline_fault(checkpoint)
    if not fault:
        fault = manifest.find_content_fault(checkpoint, manifest.checksums)
    if not fault:
        fault = find_pickle_fault(checkpoint)
    return fault
