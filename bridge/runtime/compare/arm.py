"""`Arm`: a run of one recipe with one seed, read from its folder as a comparison needs it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from bridge.errors import RunConfigError
from bridge.runtime.audit.quantisation import group_by_operand, select_last_step
from bridge.runtime.audit.run_folder import RunFolder
from bridge.runtime.compare.gap import LossCurve
from bridge.sync.routes import ROUTES

PRECISION_SECTIONS = ("mixed_precision", "precision_backend", "precision_schedule")
"""Sections in which the arms of a comparison may differ.

The fields that a precision is written to may differ, too.
"""
PRECISION_FIELDS = frozenset(
    f"{route.owner}.{route.attribute}" for route in ROUTES if route.attribute
)
"""The fields that a precision can be written to: "model.fp8", for example."""
SEED_FIELDS = ("train.seed", "data.seed")
FIELDS_WITHOUT_EFFECT = (
    "logging",
    "silence",
    "checkpoint.save",
    "checkpoint.load",
    "data.cache_dir",
)
"""Settings that change nothing that is trained: places of files, and answers of the check."""
FAILURE_FILE = "failed.json"
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
    curve: LossCurve
    """Training loss."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Content of ``summary.json``, or the figures of a log; empty where the run did not end."""
    sqnr_db: Mapping[str, float] = field(default_factory=dict)
    """Operand -> mean signal-to-quantisation-noise ratio of the last measured step."""
    failure: str | None = None
    """Why the run is no success; None for a success, and for a run that did not end."""

    @property
    def is_complete(self) -> bool:
        """Whether the run came to its end, or to a loss that is not finite."""
        return bool(self.summary) or self.curve.find_first_lost() is not None

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
        return _make_arm(RunFolder(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is no folder of a run ({type(error).__name__}: {error})"
        remedy = "Delete it, and run again."
        raise RunConfigError.of("compare", rule, str(folder), remedy) from error


def _make_arm(run: RunFolder) -> Arm:
    """Return the arm of a run's folder."""
    flat = flatten_fields(run.config)
    summary = run.summary or {}
    failed = run.read_json(FAILURE_FILE).get("error")
    curve = _read_curve(run)
    sqnr_db = _compute_mean_sqnr(run)
    precision, rest = {}, {}
    for name, value in flat.items():
        if is_precision_field(name):
            precision[name] = value
        elif name not in SEED_FIELDS and not _is_under(name, FIELDS_WITHOUT_EFFECT):
            rest[name] = value
    recipe = summary.get("precision") or flat.get("mixed_precision._recipe_") or "no recipe"
    seed = tuple(map(flat.get, SEED_FIELDS))
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


def _read_curve(run: RunFolder) -> LossCurve:
    """Return the training loss of a run; a loss that was not finite is NaN."""
    steps: list[int] = []
    losses: list[float] = []
    for record in run.metrics("train"):
        steps.append(int(record["step"]))
        if record["loss"] is None:
            losses.append(math.nan)
        else:
            losses.append(float(record["loss"]))
    return LossCurve(steps=tuple(steps), losses=tuple(losses))


def _compute_mean_sqnr(run: RunFolder) -> dict[str, float]:
    """Return the mean ratio of each operand in the last measured step, of the finite ones."""
    finite = []
    for row in select_last_step(run.quantisation):
        if math.isfinite(row.sqnr_db):
            finite.append(row)
    means = {}
    for operand, rows in group_by_operand(finite).items():
        ratios = [row.sqnr_db for row in rows]
        means[operand] = fmean(ratios)
    return means


def is_precision_field(name: str) -> bool:
    """Return whether a field, by its dotted name, is one that a precision decides."""
    return name in PRECISION_FIELDS or _is_under(name, PRECISION_SECTIONS)


def _is_under(name: str, places: tuple[str, ...]) -> bool:
    """Return whether a field is one of some places, or lies below one of them."""
    return any(name == place or name.startswith(f"{place}.") for place in places)


def flatten_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a saved config by dotted name."""
    flat: dict[str, Any] = {}
    for section, values in config.items():
        if not isinstance(values, dict):
            flat[section] = values
            continue
        for name, value in values.items():
            flat[f"{section}.{name}"] = value
    return flat
