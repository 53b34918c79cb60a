"""The end of a sweep: its runs compared, recipe by recipe."""

from collections.abc import Sequence
from pathlib import Path

from bridge.compare.arm import read_arm
from bridge.compare.comparison import Comparison, compare
from bridge.compare.gap import GATE
from bridge.front.main import is_first_process
from bridge.report.comparison import show_comparisons, write_comparisons


def report_sweep(folder: Path, runs: Sequence[Path], *, gate: float = GATE) -> list[Comparison]:
    """Print what each set of twins of a sweep says about its recipes, write it to the folder, and return it."""
    if not is_first_process():
        return []
    arms = [found for found in map(read_arm, runs) if found is not None]
    if len(arms) < 2:
        return []
    comparisons = compare(arms, gate=gate)
    write_comparisons(folder, comparisons)
    show_comparisons(comparisons)
    return comparisons
