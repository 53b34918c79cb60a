"""`precision-bridge compare --runs A B`: finished runs of ours, or logs of other trainers."""

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

REMEDY = "Write precision-bridge compare --runs bf16.log fp8.log."


def compare_runs(args: argparse.Namespace) -> int:
    """Print the verdict on the loss of each run against that of the first.

    Return 1 where a run is outside the gate, 3 where of one nothing can be told.
    """
    require_extra("train", "precision-bridge compare --runs")
    from bridge.report.comparison import comparison_to_dict, print_comparisons, write_comparisons
    from bridge.runtime.compare.comparison import get_exit_code

    paths: dict[Path, Path] = {}  # the place -> the path as it was written first
    repeated = None
    for word in args.overrides:
        path = Path(word)
        place = resolve_links(path)
        if place in paths:
            repeated = path
        paths.setdefault(place, path)
    comparisons = _compare_paths([*paths.values()], args.gate, repeated)
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


def _compare_paths(
    paths: Sequence[Path], gate: str | None, repeated: Path | None
) -> list[Comparison]:
    """Return the comparisons of runs; `repeated` is a run that the command line names again."""
    from bridge.runtime.compare.arm import read_arm
    from bridge.runtime.compare.comparison import compare_arms
    from bridge.runtime.compare.gap import DEFAULT_GATE, parse_gate
    from bridge.runtime.compare.log_comparison import compare_logs

    share = DEFAULT_GATE
    if gate is not None:
        share = parse_gate(gate)
    logs = [path for path in paths if is_log(path)]
    if not logs:
        arms = []
        for path in paths:
            arm = read_arm(path)
            if arm is not None:
                arms.append(arm)
        _require_two_runs(len(arms), repeated)
        return compare_arms(arms, gate=share)
    if len(logs) < len(paths):
        rule = "compares runs of ours with each other, or logs with each other, got both"
        raise RunConfigError(f"--runs: {rule}. Give the runs of one kind.")
    described = read_described_logs(logs)
    _require_two_runs(len(described), repeated)
    compared = [log.compared() for log in described]
    return [compare_logs(compared, gate=share)]


def _require_two_runs(count: int, repeated: Path | None) -> None:
    if count >= 2:
        return
    if repeated is not None:
        rule = "compares two runs or more, and the same one is given twice"
        raise RunConfigError.of("--runs", rule, str(repeated), REMEDY)
    raise RunConfigError.of("--runs", "compares two runs or more", count, REMEDY)
