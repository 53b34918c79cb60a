"""`PrecisionSchedule`: the precision of each part of a run.

    precision_schedule:
      - until: 0.9           # a share of the steps, or the number of a step
      - recipe: bf16_mixed   # the rest of the run

The first phase trains in the run's own `mixed_precision`. A later phase changes the fields of the model config that
Megatron reads in every forward pass; everything that is fixed once the model is built has to be equal in all phases.
Whether it is, is decided before the run: each phase is planned by the synchroniser, and the plans are compared.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.errors import (
    Finding,
    PrecisionTypeError,
    RunConfigError,
    SyncCheckError,
    close_matches,
    did_you_mean,
)
from bridge.precision.config import FIELD_DEFAULTS, FIELDS
from bridge.precision.matchers import matchers_in
from bridge.precision.mode import label_of, scheme_of
from bridge.precision.owners import DdpOwner, ModelOwner, OptimizerOwner
from bridge.precision.statements import is_stated, recipe_name, stated_values
from bridge.precision.values import plain
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config, is_auto
from bridge.sync.owner import Owner, OwnerValues, same
from bridge.sync.plan import plan

SWITCHED = tuple(name for name, field in FIELDS.items() if field.is_live)
"""Fields of the model config that decide again in every forward pass.

Source: megatron-core 0.16.1 transformer_block.py:717-758, fp8_utils.py:541-654, fp4_utils.py:85-140. The two settings
of FP8 attention are fixed: attention layers read them when they are built."""

_UNREAD = frozenset({("optimizer", "fp8_recipe")})
"""Read when the optimizer is made, and about weights stored in FP8 only: (role, attribute)."""

_MODULES = ("model", "quant_recipe")
_LISTED = 3
_KEYS = ("until", "recipe")
_WHERE = "precision_schedule"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive steps in one precision."""

    number: int
    first: int
    last: int
    precision: MixedPrecisionConfig
    values: Mapping[str, Any]
    """Field of the model config, one of `SWITCHED` -> its value in this phase."""

    def __str__(self) -> str:
        steps = (
            f"step {self.first}" if self.first == self.last else f"steps {self.first}-{self.last}"
        )
        return f"{steps}: {label_of(self.precision)}"


class PrecisionSchedule:
    """The phases of a run, and the model config that they are written into.

    schedule = PrecisionSchedule(rows, "nvfp4", train_iters=1000, model=model, optimizer=optimizer, ddp=ddp)
    for step in range(1, 1001):
        schedule.apply(step)
        train_step(...)

    Args:
        rows: One mapping a phase, with `until` (not in the last one) and `recipe` (a name; in the first phase absent,
            or equal to the run's). A later phase may state further fields over its recipe.
        precision: The run's own precision, that of the first phase.
        train_iters: Steps of the whole run.
        model: The run's model config, with or without the precision of the first phase in it.
        optimizer: The optimizer config, or None.
        ddp: The DDP config, or None.

    Raises:
        RunConfigError: Rows that describe no schedule.
        UnknownRecipeError: No such recipe.
        PrecisionConfigError: The precision of a phase can never be right.
        SyncCheckError: A phase needs another value of a field that is fixed once the model is built.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        precision: str | MixedPrecisionConfig | None,
        *,
        train_iters: int,
        model: ModelOwner,
        optimizer: OptimizerOwner | None = None,
        ddp: DdpOwner | None = None,
    ) -> None:
        given = {"model": model, "optimizer": optimizer, "ddp": ddp}
        owners = [
            Owner(role, target).read() for role, target in given.items() if target is not None
        ]
        own = get_mixed_precision_config(precision) if precision is not None else None
        self.phases = planned_phases(rows, own, owners, train_iters=train_iters)
        self.rows = [dict(row) for row in rows]
        self._model = model
        self._entered: Phase | None = None

    def phase_at(self, step: int) -> Phase:
        """Return the phase of a step, the last one for steps beyond the end."""
        return next((phase for phase in self.phases if step <= phase.last), self.phases[-1])

    def models(self) -> list[Any]:
        """Return a copy of the model config for each phase."""
        copies = []
        for phase in self.phases:
            model = copy.copy(self._model)
            vars(model).update(phase.values)
            copies.append(model)
        return copies

    def bind(self, model: Any) -> None:
        """Write into this model config from now on: the copy that the model was built with, for example."""
        self._model, self._entered = model, None

    def apply(self, step: int) -> Phase | None:
        """Write the precision of a step into the model config; call it before the step.

        Args:
            step: Number of the step about to run, from 1 on.

        Returns:
            The phase that begins or is continued with this call, None where the last call left off in it.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 1:
            raise PrecisionTypeError.of(
                "step", "must be the number of a step, from 1 on", step, "Count from 1."
            )
        phase = self.phase_at(step)
        if phase is self._entered:
            return None
        for name, value in phase.values.items():
            setattr(self._model, name, value)
        self._entered = phase
        return phase

    def __str__(self) -> str:
        return "; ".join(map(str, self.phases))

    def __repr__(self) -> str:
        return f"<PrecisionSchedule {self}>"


def _checked(rows: Any) -> list[dict[str, Any]]:
    if not isinstance(rows, list | tuple) or len(rows) < 2:
        remedy = "Write [{until: 0.9}, {recipe: bf16_mixed}]."
        raise RunConfigError.of(_WHERE, "must be a list of at least two phases", rows, remedy)
    for number, row in enumerate(rows, start=1):
        path = f"{_WHERE}, phase {number}"
        if not hasattr(row, "keys"):
            raise RunConfigError.of(path, "must be a mapping", row, f"Write {{{_KEYS[0]}: 0.9}}.")
        known = _KEYS if number == 1 else (*_KEYS, *FIELD_DEFAULTS)
        unknown = [key for key in row if key not in known]
        if unknown:
            hint = (
                did_you_mean(close_matches(str(unknown[0]), known))
                or f"A phase has {' and '.join(_KEYS)}."
            )
            if unknown[0] in FIELD_DEFAULTS:
                hint = f"The first phase is the run's own precision: state mixed_precision.{unknown[0]}."
            raise RunConfigError.of(path, "no such key of this phase", unknown[0], hint)
        is_last = number == len(rows)
        if is_last == (row.get("until") is not None):
            rule = (
                "the last phase lasts to the end of the run"
                if is_last
                else "needs until, the end of the phase"
            )
            raise RunConfigError.of(
                f"{path}, until", rule, row.get("until"), "Drop it." if is_last else "State it."
            )
        if number > 1 and row.get("recipe") is None:
            raise RunConfigError.of(
                f"{path}, recipe", "a later phase needs a recipe", None, "Name one."
            )
        if is_auto(row.get("recipe")):
            raise RunConfigError.of(
                f"{path}, recipe", "a phase needs the name of a recipe", "auto", "Name one."
            )
    return list(rows)


def _last_step(until: Any, path: str, *, after: int, train_iters: int) -> int:
    is_share = isinstance(until, float) and 0 < until < 1
    if not is_share and (not isinstance(until, int) or isinstance(until, bool)):
        raise RunConfigError.of(
            path, "must be a share of the steps (0 to 1) or a step", until, "Write 0.9 or 900."
        )
    last = round(until * train_iters) if is_share else int(until)
    if not after < last < train_iters:
        rule = f"must end after step {after} and before step {train_iters}, the last one (train.train_iters)"
        got = f"{until!r}, which is step {last}" if is_share else until
        raise RunConfigError(f"{path}: {rule}, got {got}. Choose another step, or drop a phase.")
    return last


def planned_phases(
    rows: Sequence[Mapping[str, Any]],
    own: MixedPrecisionConfig | None,
    owners: Sequence[OwnerValues],
    *,
    train_iters: int,
) -> tuple[Phase, ...]:
    """Return the phases, each planned onto the owners and held against the first, as `PrecisionSchedule` does."""
    if own is None:
        remedy = "Name the recipe of the first phase with mixed_precision."
        raise RunConfigError.of(_WHERE, "needs a recipe of the run", None, remedy)
    rows = _checked(rows)
    phases: list[Phase] = []
    built: dict[tuple[str, str], Any] = {}
    after = 0
    for number, row in enumerate(rows, start=1):
        precision, last = _precision(row, own, number), train_iters
        if number < len(rows):
            path = f"{_WHERE}, phase {number}, until"
            last = _last_step(row["until"], path, after=after, train_iters=train_iters)
        precision.finalize()
        planned = [one for one in plan(precision, owners, is_last=True) if one.verdict != "absent"]
        values = {(one.owner, one.attribute): one.new for one in planned}
        built = built or values
        chosen = [
            one.training for one in matchers_in(built.get(_MODULES)) if one.training is not None
        ]
        is_high = not any(one.chooses_in_high for one in chosen)
        if not scheme_of(precision) and not is_stated(precision, "modules") and is_high:
            values.pop(_MODULES, None)  # what it chooses acts under FP8 or FP4 alone
        switched = {name: values["model", name] for name in SWITCHED if ("model", name) in values}
        phases.append(
            Phase(number=number, first=after + 1, last=last, precision=precision, values=switched)
        )
        _refuse_what_no_config_holds(own, precision, {one.field for one in planned}, number=number)
        _refuse_what_is_fixed(built, values, phases[-1])
        after = last
    return tuple(phases)


def _precision(
    row: Mapping[str, Any], own: MixedPrecisionConfig, number: int
) -> MixedPrecisionConfig:
    """Return the precision of a phase: the run's own in the first, a recipe with the fields stated over it later."""
    name: Any = row.get("recipe")
    path = f"{_WHERE}, phase {number}"
    if number == 1:
        if name is not None and get_mixed_precision_config(name) != own:
            rule = f"the first phase trains in the run's own mixed_precision, {label_of(own)}"
            remedy = f"Leave it out, or train with mixed_precision={name}."
            raise RunConfigError.of(f"{path}, recipe", rule, name, remedy)
        return own
    return get_mixed_precision_config(name).override(
        path, **{key: row[key] for key in row if key not in _KEYS}
    )


def _refuse_what_no_config_holds(
    own: MixedPrecisionConfig,
    precision: MixedPrecisionConfig,
    held: set[str | None],
    *,
    number: int,
) -> None:
    """Refuse a phase with another value of a field that none of the configs given has: it could not be compared."""
    for name, value in stated_values(precision).items():
        first = getattr(own, name)
        if name not in held and not same(value, first):
            rule = f"states {name}={plain(value)} ({plain(first)} in phase 1), which no config given here has"
            remedy = "Give model, optimizer and DDP config, or state the value of phase 1."
            raise RunConfigError.of(f"{_WHERE}, phase {number}", rule, label_of(precision), remedy)


def _refuse_what_is_fixed(
    built: Mapping[tuple[str, str], Any], values: Mapping[tuple[str, str], Any], phase: Phase
) -> None:
    """Refuse a phase that differs from the first in a field that no later step reads.

    `built` are the values that the model, the optimizer and DDP are built with.
    """
    label, step = label_of(phase.precision), phase.first - 1
    differing = [place for place in values if not same(values[place], built.get(place))]
    if not differing:
        return
    stored = [family for family in ("fp8", "fp4") if built.get(("model", f"{family}_param"))]
    of_stored = (
        name for name, field in FIELDS.items() if field.family in stored and field.stores_weights
    )
    follows = {*SWITCHED, *of_stored}  # the second follow from weights stored in a family
    fixed = [place for place in differing if place not in _UNREAD and place[1] not in follows]
    at_checkpoint = (
        f", or switch at a checkpoint: end the first run at step {step} (train.train_iters={step} "
        f"checkpoint.save=FOLDER), then go on with mixed_precision={recipe_name(phase.precision) or 'RECIPE'} "
        "checkpoint.load=FOLDER."
    )
    findings = []
    for family in stored:
        field = f"mixed_precision.{family}_param_gather"
        rule = f"stores the weights in {family.upper()}, and phase {phase.number} ({label}) computes in another format"
        remedy = f"Keep BF16 weights with {field}=false{at_checkpoint}"
        findings.append(Finding(path=field, rule=rule, value=True, remedy=remedy))
    if fixed:
        needed = [
            "other modules than phase 1"
            if place == _MODULES
            else f"{'.'.join(place)}={plain(values[place])} ({plain(built.get(place))} in phase 1)"
            for place in fixed
        ]
        more = f" and {len(needed) - _LISTED} more" if len(needed) > _LISTED else ""
        rule = f"needs {', '.join(needed[:_LISTED])}{more}, fixed once the model is built"
        remedy = f"State the values of phase 1{at_checkpoint}"
        findings.append(
            Finding(path=f"{_WHERE}, phase {phase.number}", rule=rule, value=label, remedy=remedy)
        )
    if findings:
        raise SyncCheckError(f"{_WHERE}: this switch is not possible within a run:", findings)
