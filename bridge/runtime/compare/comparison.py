"""The comparison of finished runs: twins are put together, and judged against the first recipe."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from bridge.runtime.compare.arm import Arm
from bridge.runtime.compare.gap import DEFAULT_GATE, LOG_INTERVAL_SETTING, Gap, LossCurve, judge_gap


@dataclass(frozen=True, kw_only=True)
class RecipeRow:
    """All seeds of one recipe."""

    label: str
    arms: tuple[Arm, ...]
    gap: Gap | None
    """None for the baseline."""
    differs_in: tuple[str, ...]
    """Fields of precision in which it differs from the baseline."""
    loss: float | None = None
    """Mean over seeds and judged steps; None where nothing was judged."""

    @property
    def curves(self) -> list[LossCurve]:
        """The training losses that have a record."""
        curves = []
        for arm in self.arms:
            if arm.curve.steps:
                curves.append(arm.curve)
        return curves

    @property
    def failures(self) -> list[str]:
        """Each failure once."""
        sentences: dict[str, None] = {}
        for arm in self.arms:
            if arm.failure:
                sentences[arm.failure] = None
            elif not arm.is_complete:
                sentences[f"{arm.folder.name} did not end."] = None
        return list(sentences)

    @property
    def figures(self) -> dict[str, Any]:
        """Figures of all seeds; None where no seed has the figure.

        They are means, the sum of the skipped steps, and the largest peak of memory.
        """
        seconds = []
        for arm in self.arms:
            seconds.append(arm.step_seconds)
        skipped = self._collect_figure("skipped_steps")
        skipped_steps = None
        if skipped:
            skipped_steps = sum(skipped)
        return {
            "validation_loss": compute_mean(self._collect_figure("validation_loss")),
            "skipped_steps": skipped_steps,
            "step_seconds": compute_mean(seconds),
            "tokens_per_second": compute_mean(self._collect_figure("tokens_per_second")),
            "peak_memory_bytes": max(self._collect_figure("peak_memory_bytes"), default=None),
            "sqnr_db": self._compute_mean_sqnr(),
        }

    def _collect_figure(self, name: str) -> list[Any]:
        """Return a figure of each seed that has it."""
        values = []
        for arm in self.arms:
            value = arm.summary.get(name)
            if value is not None:
                values.append(value)
        return values

    def _compute_mean_sqnr(self) -> dict[str, float]:
        """Return the mean ratio of each operand over the seeds."""
        ratios_of: dict[str, list[float]] = {}
        for arm in self.arms:
            for operand, ratio in arm.sqnr_db.items():
                ratios_of.setdefault(operand, []).append(ratio)
        means = {}
        for operand, ratios in ratios_of.items():
            means[operand] = fmean(ratios)
        return means

    def sentence(self, baseline: str) -> str:
        """Return the verdict as one paragraph."""
        gap = self.gap
        if gap is None:
            return f"{self.label}: the baseline."
        verdict: str = gap.verdict
        if verdict != "cannot tell":
            verdict = f"{verdict} {100 * gap.gate:g} %"
        text = f"{self.label}: {verdict}. {gap.reason}"
        if gap.share is not None and gap.window is not None:
            first, last = gap.window
            figure = f"{100 * gap.share:+.2f} %"
            if gap.low is not None and gap.high is not None and not gap.bit_equal:
                interval = f"{100 * gap.low:+.2f} to {100 * gap.high:+.2f} %"
                figure += f" (90 % interval {interval}, {gap.seeds} seeds)"
            text += f" Steps {first} to {last}: {figure} of the loss of {baseline}."
        return " ".join([text, *self.failures])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Twins: runs that are equal in every field but those of precision and the seeds."""

    rows: tuple[RecipeRow, ...]
    """The first is the baseline."""
    gate: float
    equal_fields: int
    """Fields that every run has with the same value."""
    where: Mapping[str, Any]
    """Fields in which this comparison differs from the other ones of the sweep."""
    notes: tuple[str, ...] = ()
    """What is known of runs that a log shows, as sentences; empty for twins of our own."""

    @property
    def baseline(self) -> RecipeRow:
        """The recipe that the others are compared with."""
        return self.rows[0]

    @property
    def verdicts(self) -> set[str]:
        """The verdicts on all other recipes."""
        verdicts: set[str] = set()
        for row in self.rows:
            if row.gap is not None:
                verdicts.add(row.gap.verdict)
        return verdicts


EXIT_OUTSIDE = 1
"""Exit code of a comparison with a recipe outside the gate."""
EXIT_CANNOT_TELL = 3
"""Exit code of a comparison with no recipe outside the gate, and one that cannot be judged."""


def get_exit_code(comparisons: Iterable[Comparison]) -> int:
    """Return the exit code of a command that printed comparisons; 0 where each gap is within."""
    verdicts: set[str] = set()
    for comparison in comparisons:
        verdicts.update(comparison.verdicts)
    if "outside" in verdicts:
        return EXIT_OUTSIDE
    if "cannot tell" in verdicts:
        return EXIT_CANNOT_TELL
    return 0


def compare_arms(
    arms: Sequence[Arm], *, gate: float = DEFAULT_GATE, interval_setting: str = LOG_INTERVAL_SETTING
) -> list[Comparison]:
    """Return a comparison for each set of twins among the runs, in the order of their first runs.

    The recipe of the first run of all is the baseline, or the first recipe of a set that lacks it.
    `interval_setting` is the setting of the runs that decides how often a loss is recorded.
    """
    if not arms:
        return []
    sets: dict[str, list[Arm]] = {}
    for arm in arms:
        sets.setdefault(_make_key(arm.rest), []).append(arm)
    rests = []
    for twins in sets.values():
        rests.append(twins[0].rest)
    varied = find_varied_names(rests)
    baseline = _make_key(arms[0].precision)
    comparisons = []
    for twins, rest in zip(sets.values(), rests, strict=True):
        where = {name: rest.get(name) for name in varied}
        rows = _make_rows(twins, baseline, gate, interval_setting)
        comparisons.append(
            Comparison(rows=tuple(rows), gate=gate, equal_fields=len(rest), where=where)
        )
    return comparisons


def _make_rows(
    twins: list[Arm], baseline: str, gate: float, interval_setting: str
) -> list[RecipeRow]:
    """Return a row for each recipe among twins, the baseline's first."""
    recipes: dict[str, list[Arm]] = {}
    for arm in twins:
        recipes.setdefault(_make_key(arm.precision), []).append(arm)
    first = recipes.pop(baseline, None)
    if first is None:
        first = recipes.pop(_make_key(twins[0].precision))
    examples = [first[0]]
    for arms in recipes.values():
        examples.append(arms[0])
    labels = _make_labels(examples)
    judged = []
    baseline_losses = []
    for label, arms in zip(labels[1:], recipes.values(), strict=True):
        gap = _compute_gap(arms, first, gate, interval_setting)
        baseline_losses.append(gap.baseline_loss)
        differs_in = find_varied_names([first[0].precision, arms[0].precision])
        judged.append(
            RecipeRow(
                label=label,
                arms=tuple(arms),
                gap=gap,
                differs_in=tuple(differs_in),
                loss=gap.loss,
            )
        )
    baseline_row = RecipeRow(
        label=labels[0],
        arms=tuple(first),
        gap=None,
        differs_in=(),
        loss=compute_mean(baseline_losses),
    )
    return [baseline_row, *judged]


def _compute_gap(arms: list[Arm], baseline: list[Arm], gate: float, interval_setting: str) -> Gap:
    """Return the gap of a recipe: each seed is paired with the same seed of the baseline."""
    failed = 0
    for arm in arms:
        if arm.failure is not None:
            failed += 1
    if failed:
        reason = f"The run failed in {failed} of {len(arms)} seeds."
        return Gap(verdict="outside", reason=reason, seeds=len(arms), gate=gate)
    baseline_of_seed = {arm.seed: arm for arm in baseline if arm.is_complete}
    pairs = []
    warm_up = 0
    for arm in arms:
        if arm.seed in baseline_of_seed and arm.is_complete:
            pairs.append((baseline_of_seed[arm.seed].curve, arm.curve))
        warm_up = max(warm_up, arm.warm_up)
    return judge_gap(pairs, warm_up=warm_up, gate=gate, interval_setting=interval_setting)


def _make_labels(arms: Sequence[Arm]) -> list[str]:
    """Return a label for each recipe; equal ones get the fields of precision that differ."""
    labels = []
    for arm in arms:
        alike = [other.precision for other in arms if other.label == arm.label]
        parts = [arm.label]
        for name in find_varied_names(alike):
            parts.append(f"{name}={arm.precision.get(name)}")
        labels.append(", ".join(parts))
    return labels


def find_varied_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values are not the same in all rows."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    varied = []
    for name in names:
        if any(row.get(name) != rows[0].get(name) for row in rows):
            varied.append(name)
    return varied


def _make_key(fields: Mapping[str, Any]) -> str:
    """Return equal texts for equal fields."""
    return json.dumps(dict(fields), sort_keys=True, default=str)


def compute_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are there, None without any."""
    known = []
    for value in values:
        if value is not None:
            known.append(value)
    if not known:
        return None
    return fmean(known)
