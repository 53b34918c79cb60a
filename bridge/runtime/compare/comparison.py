"""`compare_arms`: groups finished runs into twins, and compares each recipe with the baseline.

Twins are runs that are equal in every field except the fields of precision and the seeds. The
baseline is the recipe of the first run.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from bridge.runtime.compare.arm import Arm
from bridge.runtime.compare.gap import DEFAULT_GATE, LOG_INTERVAL_SETTING, Gap, LossCurve, judge_gap

EXIT_OUTSIDE = 1
"""Exit code of a comparison with a recipe outside the gate."""
EXIT_CANNOT_TELL = 3
"""Exit code if no recipe is outside the gate, and a recipe cannot be judged."""


@dataclass(frozen=True, kw_only=True)
class RecipeRow:
    """All seeds of one recipe."""

    label: str
    """The recipe, with the fields of precision that distinguish it from rows of the same recipe."""
    arms: tuple[Arm, ...]
    """One arm per seed."""
    gap: Gap | None
    """The gap to the baseline. None: the baseline."""
    differs_in: tuple[str, ...]
    """Fields of precision whose values differ from the baseline's."""
    loss: float | None = None
    """Mean loss over seeds and judged steps. None: nothing was judged."""

    @property
    def curves(self) -> list[LossCurve]:
        """The training losses of the seeds that recorded one."""
        curves = []
        for arm in self.arms:
            if arm.curve.steps:
                curves.append(arm.curve)
        return curves

    @property
    def failures(self) -> list[str]:
        """A sentence per kind of failure, and per run that did not end."""
        sentences: dict[str, None] = {}
        for arm in self.arms:
            if arm.failure:
                sentences[arm.failure] = None
            elif not arm.is_complete:
                sentences[f"{arm.folder.name} did not end."] = None
        return list(sentences)

    @property
    def metrics(self) -> dict[str, Any]:
        """Name -> metric over all seeds. None: no seed has the metric.

        Most metrics are means. Skipped steps are summed, and the largest peak of memory is taken.
        """
        seconds = []
        for arm in self.arms:
            seconds.append(arm.step_seconds)
        skipped = self._collect_metric("skipped_steps")
        skipped_steps = None
        if skipped:
            skipped_steps = sum(skipped)
        return {
            "validation_loss": compute_mean(self._collect_metric("validation_loss")),
            "skipped_steps": skipped_steps,
            "step_seconds": compute_mean(seconds),
            "tokens_per_second": compute_mean(self._collect_metric("tokens_per_second")),
            "peak_memory_bytes": max(self._collect_metric("peak_memory_bytes"), default=None),
            "sqnr_db": self._compute_mean_sqnr(),
        }

    def _collect_metric(self, name: str) -> list[Any]:
        """Return the values of a metric, without the seeds that lack it."""
        values = []
        for arm in self.arms:
            value = arm.summary.get(name)
            if value is not None:
                values.append(value)
        return values

    def _compute_mean_sqnr(self) -> dict[str, float]:
        """Return operand -> mean ratio over the seeds, in dB."""
        ratios_of: dict[str, list[float]] = {}
        for arm in self.arms:
            for operand, ratio in arm.sqnr_db.items():
                ratios_of.setdefault(operand, []).append(ratio)
        means = {}
        for operand, ratios in ratios_of.items():
            means[operand] = fmean(ratios)
        return means

    def sentence(self, baseline: str) -> str:
        """Return the verdict, its metrics and the failures as one paragraph.

        Args:
            baseline: Label of the baseline.
        """
        gap = self.gap
        if gap is None:
            return f"{self.label}: the baseline."
        verdict = f"{gap.verdict} {100 * gap.gate:g} %"
        if gap.verdict == "cannot tell":
            verdict = gap.verdict
        sentences = [f"{self.label}: {verdict}. {gap.reason}"]
        if gap.share is not None and gap.window is not None:
            first, last = gap.window
            sentences.append(
                f"Steps {first} to {last}: {_format_share(gap)} of the loss of {baseline}."
            )
        return " ".join([*sentences, *self.failures])


def _format_share(gap: Gap) -> str:
    """Return the share of a gap, with its interval if there is one."""
    share = f"{100 * (gap.share or 0.0):+.2f} %"
    if gap.low is None or gap.high is None or gap.bit_equal:
        return share
    return f"{share} (90 % interval {100 * gap.low:+.2f} to {100 * gap.high:+.2f} %, {gap.seeds} seeds)"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A set of twins, a row per recipe."""

    rows: tuple[RecipeRow, ...]
    """Rows of the recipes. The first row is the baseline."""
    gate: float
    """Share of the baseline's loss that a gap may reach."""
    equal_fields: int
    """Number of fields that have the same value in every run."""
    where: Mapping[str, Any]
    """Dotted name -> value of the fields that differ between the sweep's comparisons."""
    notes: tuple[str, ...] = ()
    """Sentences about the facts that the logs show; empty for runs of this project."""

    @property
    def baseline(self) -> RecipeRow:
        """The recipe with which the other recipes are compared."""
        return self.rows[0]

    @property
    def verdicts(self) -> set[str]:
        """The verdicts on all other recipes."""
        verdicts: set[str] = set()
        for row in self.rows:
            if row.gap is not None:
                verdicts.add(row.gap.verdict)
        return verdicts


def get_exit_code(comparisons: Iterable[Comparison]) -> int:
    """Return the exit code of a command that printed comparisons. 0: every gap is within."""
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

    The baseline is the recipe of the first of all runs. In a set without this recipe, the set's
    first recipe is the baseline.

    Args:
        arms: The runs.
        gate: Share of the baseline's loss that a gap may reach.
        interval_setting: Setting of the runs that decides how often a loss is recorded, for
            messages.
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
    baseline_key = _make_key(arms[0].precision)
    comparisons = []
    for twins, rest in zip(sets.values(), rests, strict=True):
        where = {name: rest.get(name) for name in varied}
        rows = _make_rows(twins, baseline_key, gate, interval_setting)
        comparisons.append(
            Comparison(rows=tuple(rows), gate=gate, equal_fields=len(rest), where=where)
        )
    return comparisons


def _make_rows(
    twins: list[Arm], baseline_key: str, gate: float, interval_setting: str
) -> list[RecipeRow]:
    """Return a row for each recipe among twins, the baseline's first.

    Args:
        twins: The runs.
        baseline_key: Key of the baseline's precision.
        gate: As for `compare_arms`.
        interval_setting: As for `compare_arms`.
    """
    arms_of_recipe: dict[str, list[Arm]] = {}
    for arm in twins:
        arms_of_recipe.setdefault(_make_key(arm.precision), []).append(arm)
    baseline = arms_of_recipe.pop(baseline_key, None)
    if baseline is None:
        baseline = arms_of_recipe.pop(_make_key(twins[0].precision))
    first_arms = [baseline[0]]
    for arms in arms_of_recipe.values():
        first_arms.append(arms[0])
    labels = _make_labels(first_arms)
    rows = []
    baseline_losses = []
    for label, arms in zip(labels[1:], arms_of_recipe.values(), strict=True):
        gap = _compute_gap(arms, baseline, gate, interval_setting)
        baseline_losses.append(gap.baseline_loss)
        differs_in = find_varied_names([baseline[0].precision, arms[0].precision])
        rows.append(
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
        arms=tuple(baseline),
        gap=None,
        differs_in=(),
        loss=compute_mean(baseline_losses),
    )
    return [baseline_row, *rows]


def _compute_gap(arms: list[Arm], baseline: list[Arm], gate: float, interval_setting: str) -> Gap:
    """Return the gap of a recipe, whose seeds are paired with the same seeds of the baseline.

    A recipe with a failed seed is outside of the gate.
    """
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
    """Return a label for each recipe. Equal labels get the fields of precision that differ.

    Args:
        arms: One arm per recipe.
    """
    labels = []
    for arm in arms:
        same_label = [other.precision for other in arms if other.label == arm.label]
        parts = [arm.label]
        for name in find_varied_names(same_label):
            parts.append(f"{name}={arm.precision.get(name)}")
        labels.append(", ".join(parts))
    return labels


def find_varied_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values differ between rows. A missing name counts as None."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    varied = []
    for name in names:
        if any(row.get(name) != rows[0].get(name) for row in rows):
            varied.append(name)
    return varied


def _make_key(fields: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal fields, as the key of a dictionary."""
    return json.dumps(dict(fields), sort_keys=True, default=str)


def compute_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None without such a value."""
    present = []
    for value in values:
        if value is not None:
            present.append(value)
    if not present:
        return None
    return fmean(present)
