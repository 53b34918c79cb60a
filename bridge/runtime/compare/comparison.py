"""The comparison of finished runs.

Each run is read from its folder. Twins are put together, and recipes are judged against the first.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bridge.errors import RunConfigError
from bridge.runtime.audit.quantisation import by_operand, last_measured
from bridge.runtime.audit.run_folder import RunFolder
from bridge.runtime.compare.gap import GATE, Curve, Gap, judge
from bridge.sync.routes import ROUTES

PRECISION = ("mixed_precision", "precision_backend", "precision_schedule")
"""Sections in which the arms of a comparison may differ.

The fields that a precision is written to may differ, too.
"""
ROUTED = frozenset(f"{route.owner}.{route.attribute}" for route in ROUTES if route.attribute)
"""The fields that a precision can be written to."""
SEEDS = ("train.seed", "data.seed")
APART = ("logging", "silence", "checkpoint.save", "checkpoint.load", "data.cache_dir")
"""Places of files, and answers of the check: no part of what is trained."""
FAILED = "failed.json"
"""Written by a comparison into the folder of a run that ended with an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A run of one recipe with one seed."""

    folder: Path
    label: str
    """The recipe and what was stated over it."""
    precision: Mapping[str, Any]
    """Flat fields of precision, as the run had them."""
    rest: Mapping[str, Any]
    """Every other field but the seeds and `APART`: equal in twins."""
    seed: tuple[Any, ...]
    """Values of `SEEDS`."""
    warm_up: int
    """Steps of the learning rate's warm-up."""
    curve: Curve
    """Training loss."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Content of ``summary.json``; empty where the run did not end."""
    sqnr_db: Mapping[str, float] = field(default_factory=dict)
    """Operand -> mean signal-to-quantisation-noise ratio of the last measured step."""
    failure: str | None = None
    """Why the run is no success; None for a success, and for a run that did not end."""

    @property
    def is_whole(self) -> bool:
        """Whether the run came to its end, or to a loss that is not finite."""
        return bool(self.summary) or self.curve.first_lost() is not None

    @property
    def step_seconds(self) -> float | None:
        """Mean time of a step after the first."""
        samples = self.rest["train.global_batch_size"]
        tokens_per_second = self.summary.get("tokens_per_second")
        if not tokens_per_second:
            return None
        seconds: float = samples * self.rest["model.seq_length"] / tokens_per_second
        return seconds


def read_arm(folder: Path) -> Arm | None:
    """Return the run in a folder, None where it was refused before it began."""
    if not RunFolder.is_one(folder):
        return None
    try:
        return _arm_of(RunFolder(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is no folder of a run ({type(error).__name__}: {error})"
        remedy = "Delete it, and run again."
        raise RunConfigError.of("compare", rule, str(folder), remedy) from error


def _arm_of(run: RunFolder) -> Arm:
    flat = flat_fields(run.config)
    summary = run.summary or {}
    failed = run.json_of(FAILED).get("error")
    curve = _curve_of(run)
    sqnr_db = _sqnr_of(run)
    precision, rest = {}, {}
    for name, value in flat.items():
        if name in ROUTED or _is_under(name, PRECISION):
            precision[name] = value
        elif name not in SEEDS and not _is_under(name, APART):
            rest[name] = value
    recipe = summary.get("precision") or flat.get("mixed_precision._recipe_") or "no recipe"
    seed = tuple(map(flat.get, SEEDS))
    return Arm(
        folder=run.path,
        label=str(recipe),
        precision=precision,
        rest=rest,
        seed=seed,
        warm_up=int(flat["train.lr_warmup_iters"]),
        curve=curve,
        summary=summary,
        sqnr_db=sqnr_db,
        failure=failed or summary.get("failure"),
    )


def _curve_of(run: RunFolder) -> Curve:
    steps: list[int] = []
    losses: list[float] = []
    for record in run.metrics("train"):
        steps.append(int(record["step"]))
        if record["loss"] is None:
            losses.append(math.nan)
        else:
            losses.append(float(record["loss"]))
    return Curve(steps=tuple(steps), losses=tuple(losses))


def _sqnr_of(run: RunFolder) -> dict[str, float]:
    """Return the mean ratio of each operand in the last measured step, of the finite ones."""
    finite = [row for row in last_measured(run.quantisation) if math.isfinite(row.sqnr_db)]
    means = {}
    for operand, rows in by_operand(finite).items():
        ratios = [row.sqnr_db for row in rows]
        means[operand] = fmean(ratios)
    return means


def _is_under(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def flat_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a saved config by dotted name."""
    flat: dict[str, Any] = {}
    for section, values in config.items():
        if not isinstance(values, dict):
            flat[section] = values
            continue
        for name, value in values.items():
            flat[f"{section}.{name}"] = value
    return flat


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
    def curves(self) -> list[Curve]:
        """The training losses that have a record."""
        return [arm.curve for arm in self.arms if arm.curve.steps]

    @property
    def failures(self) -> list[str]:
        """Each failure once."""
        sentences: dict[str, None] = {}
        for arm in self.arms:
            if arm.failure:
                sentences[arm.failure] = None
            elif not arm.is_whole:
                sentences[f"{arm.folder.name} did not end."] = None
        return list(sentences)

    @property
    def figures(self) -> dict[str, Any]:
        """Figures of all seeds; None where no seed has the figure.

        They are means, the sum of the skipped steps, and the largest peak of memory.
        """
        seconds = [arm.step_seconds for arm in self.arms]
        return {
            "validation_loss": mean_of(self._of_summaries("validation_loss")),
            "skipped_steps": sum(self._of_summaries("skipped_steps")),
            "step_seconds": mean_of(seconds),
            "tokens_per_second": mean_of(self._of_summaries("tokens_per_second")),
            "peak_memory_bytes": max(self._of_summaries("peak_memory_bytes"), default=None),
            "sqnr_db": self._sqnr_db(),
        }

    def _of_summaries(self, name: str) -> list[Any]:
        """Return a figure of each seed that has it."""
        values = []
        for arm in self.arms:
            value = arm.summary.get(name)
            if value is not None:
                values.append(value)
        return values

    def _sqnr_db(self) -> dict[str, float]:
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

    @property
    def baseline(self) -> RecipeRow:
        """The recipe that the others are compared with."""
        return self.rows[0]

    @property
    def verdicts(self) -> set[str]:
        """The verdicts on all other recipes."""
        return {row.gap.verdict for row in self.rows if row.gap is not None}


def compare(arms: Sequence[Arm], *, gate: float = GATE) -> list[Comparison]:
    """Return a comparison for each set of twins among the runs, in the order of their first runs.

    The recipe of the first run of all is the baseline, or the first recipe of a set that lacks it.
    """
    if not arms:
        return []
    sets: dict[str, list[Arm]] = {}
    for arm in arms:
        sets.setdefault(_key(arm.rest), []).append(arm)
    rests = [twins[0].rest for twins in sets.values()]
    varied = _varied(rests)
    baseline = _key(arms[0].precision)
    comparisons = []
    for twins, rest in zip(sets.values(), rests, strict=True):
        where = {name: rest.get(name) for name in varied}
        comparisons.append(_comparison(twins, where, baseline, gate))
    return comparisons


def _comparison(
    twins: list[Arm], where: Mapping[str, Any], baseline: str, gate: float
) -> Comparison:
    recipes: dict[str, list[Arm]] = {}
    for arm in twins:
        recipes.setdefault(_key(arm.precision), []).append(arm)
    first = recipes.get(baseline) or twins[:1]
    ordered = sorted(recipes.values(), key=lambda arms: arms[0].precision != first[0].precision)
    first_arms = [arms[0] for arms in ordered]
    labels = _labels(first_arms)
    rows = []
    baseline_losses = []
    for label, arms in zip(labels, ordered, strict=True):
        row = _row(label, arms, ordered[0], gate)
        rows.append(row)
        if row.gap is not None:
            baseline_losses.append(row.gap.baseline_loss)
    rows[0] = replace(rows[0], loss=mean_of(baseline_losses))
    return Comparison(rows=tuple(rows), gate=gate, equal_fields=len(twins[0].rest), where=where)


def _row(label: str, arms: list[Arm], baseline: list[Arm], gate: float) -> RecipeRow:
    gap = loss = None
    if arms is not baseline:
        gap = _gap(arms, baseline, gate)
        loss = gap.loss
    differs_in = _varied([baseline[0].precision, arms[0].precision])
    return RecipeRow(
        label=label, arms=tuple(arms), gap=gap, differs_in=tuple(differs_in), loss=loss
    )


def _gap(arms: list[Arm], baseline: list[Arm], gate: float) -> Gap:
    failed = [arm for arm in arms if arm.failure is not None]
    if failed:
        reason = f"The run failed in {len(failed)} of {len(arms)} seeds."
        return Gap(verdict="outside", reason=reason, seeds=len(arms), gate=gate)
    baseline_of_seed = {arm.seed: arm for arm in baseline if arm.is_whole}
    pairs = []
    for arm in arms:
        if arm.seed in baseline_of_seed and arm.is_whole:
            pairs.append((baseline_of_seed[arm.seed].curve, arm.curve))
    warm_up = max(arm.warm_up for arm in arms)
    return judge(pairs, warm_up=warm_up, gate=gate)


def _labels(arms: Sequence[Arm]) -> list[str]:
    """Return a label for each recipe; equal ones get the fields of precision that differ."""
    labels = []
    for arm in arms:
        alike = [other.precision for other in arms if other.label == arm.label]
        parts = [arm.label]
        for name in _varied(alike):
            parts.append(f"{name}={arm.precision.get(name)}")
        labels.append(", ".join(parts))
    return labels


def _varied(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values are not the same in all rows."""
    names: dict[str, None] = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    varied = []
    for name in names:
        if any(row.get(name) != rows[0].get(name) for row in rows):
            varied.append(name)
    return varied


def _key(fields: Mapping[str, Any]) -> str:
    return json.dumps(dict(fields), sort_keys=True, default=str)


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are there, None without any."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return fmean(known)
