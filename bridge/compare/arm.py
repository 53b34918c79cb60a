"""One arm of a comparison: a finished run, read from its folder."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from bridge.audit.quantisation import by_operand, last_measured
from bridge.audit.run_folder import RunFolder
from bridge.compare.gap import Curve
from bridge.errors import RunConfigError
from bridge.sync.routes import ROUTES

PRECISION = ("mixed_precision", "precision_backend", "precision_schedule")
"""Sections in which the arms of a comparison may differ, apart from the fields that a precision is written to."""
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
        losses = tuple(math.nan if record["loss"] is None else float(record["loss"]) for record in train)
        finite = (row for row in last_measured(run.quantisation) if math.isfinite(row.sqnr_db))
        sqnr_db = {operand: fmean(row.sqnr_db for row in own) for operand, own in by_operand(finite).items()}
        label = str(summary.get("precision") or flat.get("mixed_precision._recipe_") or "no recipe")
        return Arm(
            folder=folder,
            label=label,
            precision={name: value for name, value in flat.items() if is_precision(name)},
            rest={name: value for name, value in flat.items() if is_rest(name)},
            seed=tuple(flat.get(name) for name in SEEDS),
            warm_up=int(flat["train.lr_warmup_iters"]),
            curve=Curve(steps=tuple(int(record["step"]) for record in train), losses=losses),
            summary=summary,
            sqnr_db=sqnr_db,
            failure=failed or summary.get("failure"),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is no folder of a run ({type(error).__name__}: {error})"
        raise RunConfigError.of("compare", rule, str(folder), "Delete it, and run again.") from error


def is_precision(name: str) -> bool:
    """Return whether a flat field is one of precision."""
    return name in ROUTED or _is_under(name, PRECISION)


def is_rest(name: str) -> bool:
    """Return whether a flat field has to be equal in twins."""
    return not is_precision(name) and name not in SEEDS and not _is_under(name, APART)


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
