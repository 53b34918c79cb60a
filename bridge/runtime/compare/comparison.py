"""The comparison of finished runs: each read from its folder, twins put together, recipes judged against the first."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from bridge.errors import RunConfigError
from bridge.precision.grouping import grouped
from bridge.runtime.audit.quantisation import by_operand, last_measured
from bridge.runtime.audit.run_folder import RunFolder
from bridge.runtime.compare.gap import GATE, Curve, Gap, judge
from bridge.sync.routes import ROUTES

PRECISION = ("mixed_precision", "precision_backend", "precision_schedule")
"""Sections in which the arms of a comparison may differ, apart from the fields that a precision is written to."""
ROUTED = frozenset(f"{route.owner}.{route.attribute}" for route in ROUTES if route.attribute)
"""The fields that a precision can be written to."""
SEEDS = ("train.seed", "data.seed")
APART = ("logging", "silence", "checkpoint.save", "checkpoint.load", "data.cache_dir")
"""Places of files, and answers of the check: no part of what is trained."""
OF_SUMMARY = ("validation_loss", "skipped_steps", "tokens_per_second", "peak_memory_bytes")
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
        speed, tokens = self.summary.get("tokens_per_second"), self.rest["train.global_batch_size"]
        return tokens * self.rest["model.seq_length"] / speed if speed else None


def read_arm(folder: Path) -> Arm | None:
    """Return the run in a folder, None where it was refused before it began."""
    if not RunFolder.is_one(folder):
        return None
    try:
        run = RunFolder(folder)
        flat = flat_fields(run.config)
        summary = run.summary or {}
        failed = run.json_of(FAILED).get("error")
        train = run.metrics("train")
        losses = tuple(
            math.nan if record["loss"] is None else float(record["loss"]) for record in train
        )
        finite = (row for row in last_measured(run.quantisation) if math.isfinite(row.sqnr_db))
        precision = {
            name: one for name, one in flat.items() if name in ROUTED or _is_under(name, PRECISION)
        }
        apart = {
            name for name in flat if name in precision or name in SEEDS or _is_under(name, APART)
        }
        return Arm(
            folder=folder,
            label=str(
                summary.get("precision") or flat.get("mixed_precision._recipe_") or "no recipe"
            ),
            precision=precision,
            rest={name: value for name, value in flat.items() if name not in apart},
            seed=tuple(flat.get(name) for name in SEEDS),
            warm_up=int(flat["train.lr_warmup_iters"]),
            curve=Curve(steps=tuple(int(record["step"]) for record in train), losses=losses),
            summary=summary,
            sqnr_db={
                operand: fmean(row.sqnr_db for row in own)
                for operand, own in by_operand(finite).items()
            },
            failure=failed or summary.get("failure"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is no folder of a run ({type(error).__name__}: {error})"
        raise RunConfigError.of(
            "compare", rule, str(folder), "Delete it, and run again."
        ) from error


def _is_under(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def flat_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a saved config by dotted name."""
    flat: dict[str, Any] = {}
    for section, values in config.items():
        if isinstance(values, dict):
            flat |= {f"{section}.{name}": value for name, value in values.items()}
        else:
            flat[section] = values
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
        found = (
            arm.failure or ("" if arm.is_whole else f"{arm.folder.name} did not end.")
            for arm in self.arms
        )
        return [failure for failure in dict.fromkeys(found) if failure]

    @property
    def figures(self) -> dict[str, Any]:
        """Figures of all seeds: means, the sum of the skipped steps, the largest peak; None: no seed has it."""
        known = {name: [arm.summary.get(name) for arm in self.arms] for name in OF_SUMMARY}
        peaks = [peak for peak in known["peak_memory_bytes"] if peak is not None]
        ratios = grouped(pair for arm in self.arms for pair in arm.sqnr_db.items())
        return {
            "validation_loss": mean_of(known["validation_loss"]),
            "skipped_steps": sum(steps or 0 for steps in known["skipped_steps"]),
            "step_seconds": mean_of(arm.step_seconds for arm in self.arms),
            "tokens_per_second": mean_of(known["tokens_per_second"]),
            "peak_memory_bytes": max(peaks, default=None),
            "sqnr_db": {operand: fmean(values) for operand, values in ratios.items()},
        }

    def sentence(self, baseline: str) -> str:
        """Return the verdict as one paragraph."""
        if self.gap is None:
            return f"{self.label}: the baseline."
        gap = self.gap
        kind = (
            "cannot tell" if gap.verdict == "cannot tell" else f"{gap.verdict} {100 * gap.gate:g} %"
        )
        text = f"{self.label}: {kind}. {gap.reason}"
        if gap.share is not None and gap.window is not None:
            first, last = gap.window
            figure = f"{100 * gap.share:+.2f} %"
            if gap.low is not None and gap.high is not None and not gap.bit_equal:
                figure += f" (90 % interval {100 * gap.low:+.2f} to {100 * gap.high:+.2f} %, {gap.seeds} seeds)"
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
    """Return a comparison for each set of twins among the runs, in the order of the first run of each.

    The recipe of the first run of all is the baseline, or the first recipe of a set that lacks it.
    """
    sets = grouped((_key(arm.rest), arm) for arm in arms)
    varied = _varied([twins[0].rest for twins in sets.values()])
    baseline = _key(arms[0].precision) if arms else ""
    where = ({name: twins[0].rest.get(name) for name in varied} for twins in sets.values())
    return [_comparison(*pair, baseline, gate) for pair in zip(sets.values(), where, strict=True)]


def _comparison(
    twins: list[Arm], where: Mapping[str, Any], baseline: str, gate: float
) -> Comparison:
    recipes = grouped((_key(arm.precision), arm) for arm in twins)
    first = recipes.get(baseline) or twins[:1]
    ordered = sorted(recipes.values(), key=lambda arms: arms[0].precision != first[0].precision)
    labels = _labels([arms[0] for arms in ordered])
    rows = [
        _row(label, arms, ordered[0], gate) for label, arms in zip(labels, ordered, strict=True)
    ]
    rows[0] = replace(
        rows[0], loss=mean_of(row.gap.baseline_loss for row in rows if row.gap is not None)
    )
    return Comparison(rows=tuple(rows), gate=gate, equal_fields=len(twins[0].rest), where=where)


def _row(label: str, arms: list[Arm], baseline: list[Arm], gate: float) -> RecipeRow:
    seeds = {arm.seed: arm for arm in baseline if arm.is_whole}
    gap = None
    failed = [arm for arm in arms if arm.failure is not None]
    if arms is not baseline and failed:
        reason = f"The run failed in {len(failed)} of {len(arms)} seeds."
        gap = Gap(verdict="outside", reason=reason, seeds=len(arms), gate=gate)
    elif arms is not baseline:
        pairs = [
            (seeds[arm.seed].curve, arm.curve) for arm in arms if arm.seed in seeds and arm.is_whole
        ]
        gap = judge(pairs, warm_up=max(arm.warm_up for arm in arms), gate=gate)
    differs = _varied([baseline[0].precision, arms[0].precision])
    return RecipeRow(
        label=label,
        arms=tuple(arms),
        gap=gap,
        differs_in=tuple(differs),
        loss=gap.loss if gap else None,
    )


def _labels(arms: Sequence[Arm]) -> list[str]:
    """Return a label for each recipe; equal ones get the fields of precision that tell them apart."""
    labels = []
    for arm in arms:
        varied = _varied([one.precision for one in arms if one.label == arm.label])
        labels.append(
            ", ".join([arm.label, *(f"{name}={arm.precision.get(name)}" for name in varied)])
        )
    return labels


def _varied(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if any(row.get(name) != rows[0].get(name) for row in rows)]


def _key(fields: Mapping[str, Any]) -> str:
    return json.dumps(dict(fields), sort_keys=True, default=str)


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are there, None without any."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
