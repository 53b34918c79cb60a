"""`precision-bridge checkpoint inspect|diff|verify|certify`: the files of a checkpoint.

No pickled code of a checkpoint is executed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.cli.output import print_answer, print_json
from bridge.cli.parser import add_json_option
from bridge.runtime.checkpoint.contents import Contents, Difference, find_checkpoint
from bridge.runtime.checkpoint.manifest import Manifest, compute_manifest_digest
from bridge.runtime.checkpoint.pickles import find_pickle_fault

if TYPE_CHECKING:
    import torch

    Part = Callable[[argparse.Namespace], int | None]
    """Does the work of a part of the command, and returns the exit code. None: 0."""
    PartParsers = argparse._SubParsersAction[argparse.ArgumentParser]

GENERATED_SIZE = 1024
"""Rows and columns of the matrix that is measured without a checkpoint."""
GENERATED_DEVIATION = 0.02
"""The standard deviation of that matrix, as in a usual initialisation of weights."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the parsers of the parts."""
    parts = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    help_text = (
        "show which run wrote a checkpoint, in which precision, and its tensors by part and dtype"
    )
    inspect = _add_part(parts, "inspect", _inspect, help_text)
    _add_path(inspect, "PATH")
    help_text = (
        "show what differs between two checkpoints, "
        "and what it means to resume in the other's precision"
    )
    diff = _add_part(parts, "diff", _diff, help_text)
    _add_path(diff, "A")
    _add_path(diff, "B")
    help_text = (
        "compare every file with the manifest; exit code 0, 1 where one was changed, "
        "2 without a manifest"
    )
    verify = _add_part(parts, "verify", _verify, help_text)
    _add_path(verify, "PATH")
    verify.add_argument(
        "--digest",
        metavar="SHA256",
        help="the manifest's own digest, as the run that wrote it logged",
    )
    help_text = (
        "measure what BF16 storage or an export in blocks does to codes, scales and values "
        "of quantised weights"
    )
    certify = _add_part(parts, "certify", _certify, help_text)
    help_text = (
        "a checkpoint, or a folder of checkpoints; without it, a normal matrix of 1024 x 1024"
    )
    certify.add_argument("path", metavar="PATH", type=Path, nargs="?", help=help_text)


def run(args: argparse.Namespace) -> int | None:
    """Do the work of the part that was asked for, and return its exit code."""
    part: Part = args.part
    return part(args)


def _add_part(parts: PartParsers, name: str, part: Part, text: str) -> argparse.ArgumentParser:
    """Add a part of the command, and return its parser.

    Args:
        name: The name of the part.
        part: Does the work of the part.
        text: The work as an imperative clause.
    """
    parser = parts.add_parser(name, help=text, description=f"{text}.")
    add_json_option(parser)
    parser.set_defaults(part=part)
    return parser


def _add_path(parser: argparse.ArgumentParser, name: str) -> None:
    """Add an argument for a checkpoint."""
    help_text = "a checkpoint, or a folder of checkpoints, whose newest is taken"
    parser.add_argument(name.lower(), metavar=name, type=Path, help=help_text)


def _inspect(args: argparse.Namespace) -> None:
    """Print the contents of a checkpoint."""
    from bridge.report.checkpoint_table import make_contents_table  # rich is heavy

    contents = Contents.read(find_checkpoint(args.path))
    print_answer(args, contents.to_dict(), make_contents_table(contents))


def _diff(args: argparse.Namespace) -> int:
    """Print the differences between two checkpoints.

    Returns:
        1 if they differ, else 0.
    """
    from bridge.report.checkpoint_table import make_difference_table

    first = Contents.read(find_checkpoint(args.a))
    second = Contents.read(find_checkpoint(args.b))
    difference = Difference.from_contents(first, second)
    content = {"a": str(first.path), "b": str(second.path), **difference.to_dict()}
    print_answer(args, content, make_difference_table(first, second, difference))
    return int(bool(difference))


def _certify(args: argparse.Namespace) -> None:
    """Print the changes of weights that are stored in another form and quantised again."""
    from bridge.report.round_trip_table import make_round_trip_table
    from bridge.runtime.numerics.round_trip import measure_round_trips

    if args.path is None:
        weights = _generate_weights()
    else:
        weights = _find_weights(find_checkpoint(args.path))
    rows = measure_round_trips(iter(weights.matrices))
    content = {
        "source": weights.source,
        "left_out": weights.left_out,
        "round_trips": list(map(asdict, rows)),
    }
    print_answer(args, content, make_round_trip_table(weights.source, rows, weights.left_out))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Weights:
    """The weights that are stored in another form and quantised again."""

    source: str
    """A description for the title of the table."""
    matrices: Iterable[torch.Tensor]
    """One matrix at a time, since all weights of a checkpoint may not fit into memory."""
    left_out: list[str]
    """The tensors that are too large for the memory of this machine."""


def _generate_weights() -> _Weights:
    """Return a normal matrix, the weights that are measured without a checkpoint."""
    import torch  # heavy, and only for values

    size, deviation = GENERATED_SIZE, GENERATED_DEVIATION
    source = f"a normal matrix of {size} x {size}, standard deviation {deviation}, seed 0"
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(size, size, generator=generator) * deviation
    return _Weights(source=source, matrices=[matrix], left_out=[])


def _find_weights(checkpoint: Path) -> _Weights:
    """Return the weights of the linear layers of a checkpoint."""
    from bridge.runtime.checkpoint.linear_weights import (
        find_linear_weights,
        list_too_large,
        load_matrices,
    )

    tensors = find_linear_weights(checkpoint)
    left_out = list_too_large(tensors)
    measured = {key: tensor for key, tensor in tensors.items() if key not in left_out}
    masters = sum(tensor.dtype == "float32" for tensor in measured.values())
    source = f"{checkpoint}: {len(measured)} tensors of linear layers, {masters} of them FP32"
    matrices = load_matrices(checkpoint, measured)
    return _Weights(source=source, matrices=matrices, left_out=left_out)


def _verify(args: argparse.Namespace) -> int:
    """Print whether the files of a checkpoint are unchanged since they were written.

    Returns:
        1 if a file has changed, else 0.

    Raises:
        CheckpointError: The checkpoint has no manifest.
    """
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
    return int(fault is not None)


def _find_fault(
    checkpoint: Path, manifest: Manifest, sha256: str, stated_sha256: str | None
) -> str | None:
    """Return the first fault of a checkpoint's files; None if there is none."""
    if stated_sha256 is not None and stated_sha256.lower() != sha256:
        return "manifest.json is another one than the digest is of"
    fault = manifest.find_outline_fault(checkpoint)
    # Sizes are compared first, since the checksums need every byte of the files.
    if not fault:
        fault = manifest.find_content_fault(checkpoint, manifest.checksums)
    if not fault:
        fault = find_pickle_fault(checkpoint)
    return fault
