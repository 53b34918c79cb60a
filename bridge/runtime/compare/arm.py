"""`Arm`: a run of one recipe with one seed, read from its folder as a comparison needs it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from bridge.errors import RunConfigError
from bridge.runtime.audit.quantisation import by_operand, last_measured
from bridge.runtime.audit.run_folder import RunFolder
from bridge.runtime.compare.gap import Curve
from bridge.sync.routes import ROUTES

PRECISION = ("mixed_precision", "precision_backend", "precision_schedule")
"""Sections in which the arms of a comparison may differ.

The fields that a precision is written to may differ, too.
"""
PRECISION_FIELDS = frozenset(
    f"{route.owner}.{route.attribute}" for route in ROUTES if route.attribute
)
"""The fields that a precision can be written to: "model.fp8", for example."""
SEEDS = ("train.seed", "data.seed")
UNTRAINED = ("logging", "silence", "checkpoint.save", "checkpoint.load", "data.cache_dir")
"""Settings that change nothing that is trained: places of files, and answers of the check."""
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
    """Every other field but the seeds and `UNTRAINED`: equal in twins."""
    seed: tuple[Any, ...]
    """Values of `SEEDS`."""
    warm_up: int
    """Steps of the learning rate's warm-up."""
    curve: Curve
    """Training loss."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Content of ``summary.json``, or the figures of a log; empty where the run did not end."""
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
        """Mean time of a step after the first; None where it is not known."""
        stated: float | None = self.summary.get("step_seconds")
        if stated is not None:
            return stated
        tokens_per_second = self.summary.get("tokens_per_second")
        if not tokens_per_second:
            return None
        samples = self.rest["train.global_batch_size"]
        seconds: float = samples * self.rest["model.seq_length"] / tokens_per_second
        return seconds


def read_arm(folder: Path) -> Arm | None:
    """Return the run in a folder, None where it was refused before it began."""
    if not RunFolder.is_run(folder):
        return None
    try:
        return _arm_of(RunFolder(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is no folder of a run ({type(error).__name__}: {error})"
        remedy = "Delete it, and run again."
        raise RunConfigError.of("compare", rule, str(folder), remedy) from error


def _arm_of(run: RunFolder) -> Arm:
    """Return the arm of a run's folder."""
    flat = flat_fields(run.config)
    summary = run.summary or {}
    failed = run.json_of(FAILED).get("error")
    curve = _curve_of(run)
    sqnr_db = _sqnr_of(run)
    precision, rest = {}, {}
    for name, value in flat.items():
        if is_of_precision(name):
            precision[name] = value
        elif name not in SEEDS and not _is_under(name, UNTRAINED):
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
    """Return the training loss of a run; a loss that was not finite is NaN."""
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
    finite = []
    for row in last_measured(run.quantisation):
        if math.isfinite(row.sqnr_db):
            finite.append(row)
    means = {}
    for operand, rows in by_operand(finite).items():
        ratios = [row.sqnr_db for row in rows]
        means[operand] = fmean(ratios)
    return means


def is_of_precision(name: str) -> bool:
    """Return whether a field, by its dotted name, is one that a precision decides."""
    return name in PRECISION_FIELDS or _is_under(name, PRECISION)


def _is_under(name: str, places: tuple[str, ...]) -> bool:
    """Return whether a field is one of some places, or lies below one of them."""
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
