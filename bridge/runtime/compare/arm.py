"""`Arm`: one finished run of one recipe with one seed, and the facts that a comparison needs."""

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
from bridge.sync.field_routes import ROUTES

PRECISION_SECTIONS = ("mixed_precision", "precision_backend", "precision_schedule")
"""Sections of a config in which the arms of a comparison may differ."""
PRECISION_FIELDS = frozenset(
    f"{route.owner}.{route.attribute}" for route in ROUTES if route.attribute
)
"""The fields into which the sync writes a precision, such as "model.fp8". They may differ too."""
SEED_FIELDS = ("train.seed", "data.seed")
"""Fields of the seeds, in which arms of a recipe may differ."""
FIELDS_WITHOUT_EFFECT = (
    "logging",
    "silence",
    "checkpoint.save",
    "checkpoint.load",
    "data.cache_dir",
)
"""Settings that do not change the training: paths of files, and warnings that are silenced."""
FAILURE_FILE = "failed.json"
"""File that a sweep writes into the folder of a run that ended with an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A run of one recipe with one seed."""

    folder: Path
    """Folder of the run, or path of its log."""
    label: str
    """The recipe, and the fields that were stated on top of it."""
    precision: Mapping[str, Any]
    """Dotted name -> value of the fields of precision."""
    rest: Mapping[str, Any]
    """Dotted name -> value of the other fields, without `SEED_FIELDS` and
    `FIELDS_WITHOUT_EFFECT`: equal in twins.
    """
    seed: tuple[Any, ...]
    """Values of `SEED_FIELDS`."""
    warm_up: int
    """Steps of the learning rate's warm-up."""
    curve: LossCurve
    """Training loss."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Content of ``summary.json``, or the metrics of a log; empty if the run did not end."""
    sqnr_db: Mapping[str, float] = field(default_factory=dict)
    """Operand -> mean signal-to-quantisation-noise ratio of the last measured step, in dB."""
    failure: str | None = None
    """A sentence about why the run failed. None: the run succeeded, or did not end."""

    @property
    def is_complete(self) -> bool:
        """Whether the run came to its end, or to a loss that is not finite."""
        return bool(self.summary) or self.curve.find_first_lost() is not None

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step after the first. None: they are not known."""
        measured: float | None = self.summary.get("step_seconds")
        if measured is not None:
            return measured
        tokens_per_second = self.summary.get("tokens_per_second")
        if not tokens_per_second:
            return None
        samples = self.rest["train.global_batch_size"]
        seconds: float = samples * self.rest["model.seq_length"] / tokens_per_second
        return seconds


def read_arm(folder: Path) -> Arm | None:
    """Return the run in a folder, or None if it was refused before it began.

    Raises:
        RunConfigError: The files of the run cannot be read.
    """
    if not RunFolder.is_run(folder):
        return None
    try:
        return _make_arm(RunFolder(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is no folder of a run ({type(error).__name__}: {error})"
        remedy = "Delete it, and run again."
        raise RunConfigError.of("compare", rule, str(folder), remedy) from error


def _make_arm(folder: RunFolder) -> Arm:
    """Return the arm of a run's folder."""
    fields = flatten_fields(folder.config)
    summary = folder.summary or {}
    precision, rest = {}, {}
    for name, value in fields.items():
        if is_precision_field(name):
            precision[name] = value
        elif name not in SEED_FIELDS and not _is_under(name, FIELDS_WITHOUT_EFFECT):
            rest[name] = value
    recipe = summary.get("precision") or fields.get("mixed_precision._recipe_") or "no recipe"
    error = folder.read_json(FAILURE_FILE).get("error")
    return Arm(
        folder=folder.path,
        label=str(recipe),
        precision=precision,
        rest=rest,
        seed=tuple(map(fields.get, SEED_FIELDS)),
        warm_up=int(fields["train.lr_warmup_iters"]),
        curve=_read_curve(folder),
        summary=summary,
        sqnr_db=_compute_mean_sqnr(folder),
        failure=error or summary.get("failure"),
    )


def _read_curve(folder: RunFolder) -> LossCurve:
    """Return the training loss of a run. A loss that was not finite is NaN."""
    steps: list[int] = []
    losses: list[float] = []
    for record in folder.read_metrics("train"):
        steps.append(int(record["step"]))
        if record["loss"] is None:
            losses.append(math.nan)
        else:
            losses.append(float(record["loss"]))
    return LossCurve(steps=tuple(steps), losses=tuple(losses))


def _compute_mean_sqnr(folder: RunFolder) -> dict[str, float]:
    """Return operand -> mean of its finite ratios in the last measured step, in dB."""
    finite = []
    for row in select_last_step(folder.quantisation):
        if math.isfinite(row.sqnr_db):
            finite.append(row)
    means = {}
    for operand, rows in group_by_operand(finite).items():
        ratios = [row.sqnr_db for row in rows]
        means[operand] = fmean(ratios)
    return means


def is_precision_field(name: str) -> bool:
    """Return whether a precision decides the field with this dotted name."""
    return name in PRECISION_FIELDS or _is_under(name, PRECISION_SECTIONS)


def _is_under(name: str, paths: tuple[str, ...]) -> bool:
    """Return whether a dotted name is one of some paths, or below one of them."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def flatten_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted name -> value of the fields of a saved config."""
    flat: dict[str, Any] = {}
    for section, values in config.items():
        if not isinstance(values, dict):
            flat[section] = values
            continue
        for name, value in values.items():
            flat[f"{section}.{name}"] = value
    return flat
