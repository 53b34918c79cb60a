"""`precision-bridge compare --runs A B`: finished runs of this project, or other trainers' logs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.cli.described_logs import is_log, read_described_logs
from bridge.cli.output import make_unwritable_error, print_json, resolve_links
from bridge.errors import RunConfigError
from bridge.extras import require_extra

if TYPE_CHECKING:
    from bridge.runtime.compare.comparison import Comparison

EXAMPLE_REMEDY = "Write precision-bridge compare --runs bf16.log fp8.log."


def compare_runs(args: argparse.Namespace) -> int:
    """Print the verdict on the loss of each run, compared with the first.

    Returns:
        1 if a run is outside the gate, 3 if the loss of a run cannot be judged, else 0.
    """
    require_extra("train", "precision-bridge compare --runs")
    from bridge.report.comparison import comparison_to_dict, print_comparisons, write_comparisons
    from bridge.runtime.compare.comparison import get_exit_code

    comparisons = _compare_paths(list(map(Path, args.overrides)), args.gate)
    if args.output is not None:
        folder = Path(args.output)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_comparisons(folder, comparisons)
        except OSError as error:
            raise make_unwritable_error(folder, "--output", error) from None
    if args.json:
        print_json(list(map(comparison_to_dict, comparisons)))
    else:
        print_comparisons(comparisons)
    return get_exit_code(comparisons)


def _compare_paths(written_paths: Sequence[Path], gate: str | None) -> list[Comparison]:
    """Return the comparisons of run folders, or the comparison of logs.

    Args:
        written_paths: The paths of the command line. A run that is named twice counts once.
        gate: The option ``--gate``. None: the default gate.

    Raises:
        RunConfigError: There are fewer than two runs, or run folders together with logs.
    """
    from bridge.runtime.compare.gap import DEFAULT_GATE, parse_gate

    share = DEFAULT_GATE
    if gate is not None:
        share = parse_gate(gate)
    path_at: dict[Path, Path] = {}
    repeated = None
    for path in written_paths:
        location = resolve_links(path)
        if location in path_at:
            repeated = path
        path_at.setdefault(location, path)
    paths = list(path_at.values())
    logs = [path for path in paths if is_log(path)]
    if not logs:
        return _compare_folders(paths, share, repeated)
    if len(logs) < len(paths):
        rule = "compares runs of ours with each other, or logs with each other, got both"
        raise RunConfigError(f"--runs: {rule}. Give the runs of one kind.")
    return [_compare_logs(logs, share, repeated)]


def _compare_folders(paths: Sequence[Path], gate: float, repeated: Path | None) -> list[Comparison]:
    """Return the comparisons of run folders, a comparison for each set of twins."""
    from bridge.runtime.compare.arm import read_arm
    from bridge.runtime.compare.comparison import compare_arms

    arms = []
    for path in paths:
        arm = read_arm(path)
        if arm is not None:
            arms.append(arm)
    _require_two_runs(len(arms), repeated)
    return compare_arms(arms, gate=gate)


def _compare_logs(paths: Sequence[Path], gate: float, repeated: Path | None) -> Comparison:
    """Return the comparison of logs of other trainers."""
    from bridge.runtime.compare.log_comparison import compare_logs

    described = read_described_logs(paths)
    _require_two_runs(len(described), repeated)
    return compare_logs([log.to_logged_run() for log in described], gate=gate)


def _require_two_runs(count: int, repeated: Path | None) -> None:
    """Refuse a comparison of fewer than two runs.

    Args:
        count: The number of different runs.
        repeated: A path that names a run again; None: each path names another run.

    Raises:
        RunConfigError: There are fewer than two runs.
    """
    if count >= 2:
        return
    if repeated is not None:
        rule = "compares two runs or more, and the same one is given twice"
        raise RunConfigError.of("--runs", rule, str(repeated), EXAMPLE_REMEDY)
    raise RunConfigError.of("--runs", "compares two runs or more", count, EXAMPLE_REMEDY)
