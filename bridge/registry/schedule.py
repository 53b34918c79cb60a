"""`PrecisionSchedule`: the precision of each part of a run.

    precision_schedule:
      - until: 0.9           # a share of the steps, or the number of a step
      - recipe: bf16_mixed   # the rest of the run

The first phase trains in the run's `mixed_precision`. A later phase changes the fields of the
model config that Megatron reads in every forward pass. All other fields are fixed when the model is
built, and must have the same values in all phases. This is checked before the run: the sync of each
phase is planned, and the plans are compared.
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
from bridge.precision.coercion import to_plain_data
from bridge.precision.matchers import list_matchers
from bridge.precision.mode import format_label, get_scheme
from bridge.precision.owners import DdpOwner, ModelOwner, OptimizerOwner
from bridge.precision.precision_config import FIELD_DEFAULTS, FIELDS
from bridge.precision.statements import get_recipe_name, get_stated_values, is_stated
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config, is_auto
from bridge.rules.sync_row import SyncRow
from bridge.sync.owner import Owner, OwnerValues, is_same_value
from bridge.sync.sync_plan import plan_sync

LIVE_FIELDS = tuple(name for name, field in FIELDS.items() if field.is_live)
"""Fields of the model config that Megatron reads in every forward pass.

Source: megatron-core 0.16.1 transformer_block.py:717-758, fp8_utils.py:541-654, fp4_utils.py:85-140. The two settings
of FP8 attention are fixed: attention layers read them when they are built."""

_UNREAD_ATTRIBUTES = frozenset({("optimizer", "fp8_recipe")})
"""(owner name, attribute) that Megatron reads only when it makes the optimizer.

Its value matters only for weights stored in FP8. So it may differ between phases.
"""

_MODULES_ATTRIBUTE = ("model", "quant_recipe")
"""(owner name, attribute) of the attribute that holds `modules`."""
_MAX_LISTED = 3
"""The number of settings that a refusal lists. The others are counted."""
_PHASE_KEYS = ("until", "recipe")
_SCHEDULE_PATH = "precision_schedule"
_ValuesByAttribute = Mapping[tuple[str, str], Any]
"""(owner name, attribute) -> value."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive steps in the same precision."""

    number: int
    """The phase's number, from 1."""
    first: int
    """The first step, from 1."""
    last: int
    """The last step."""
    precision: MixedPrecisionConfig
    values: Mapping[str, Any]
    """Field of `LIVE_FIELDS` -> its value in this phase."""

    def __str__(self) -> str:
        steps = f"steps {self.first}-{self.last}"
        if self.first == self.last:
            steps = f"step {self.first}"
        return f"{steps}: {format_label(self.precision)}"


class PrecisionSchedule:
    """The phases of a run, and the model config that they are written into.

    schedule = PrecisionSchedule(rows, "nvfp4", train_iters=1000, model=model, optimizer=optimizer, ddp=ddp)
    for step in range(1, 1001):
        schedule.apply(step)
        train_step(...)

    Args:
        rows: One mapping for each phase. It has `until`, except in the last phase, and `recipe`, a
            name. The first phase has no `recipe`, or the recipe of the run. A later phase may state
            further fields over its recipe.
        precision: The precision of the run, which the first phase uses.
        train_iters: The number of steps of the run.
        model: The model config of the run, before or after the sync of the first phase.
        optimizer: The optimizer config, or None.
        ddp: The DDP config, or None.

    Raises:
        RunConfigError: The rows describe no schedule.
        UnknownRecipeError: There is no such recipe.
        PrecisionConfigError: The precision of a phase is wrong in any run.
        SyncCheckError: A phase needs another value of a field that is fixed.
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
        configs = {"model": model, "optimizer": optimizer, "ddp": ddp}
        owner_values: list[OwnerValues] = []
        for owner_name, config in configs.items():
            if config is not None:
                owner_values.append(Owner(owner_name, config).read())
        first = None
        if precision is not None:
            first = get_mixed_precision_config(precision)
        self.phases = plan_phases(rows, first, owner_values, train_iters=train_iters)
        self.rows = [dict(row) for row in rows]
        self._model = model
        self._entered: Phase | None = None

    def phase_at(self, step: int) -> Phase:
        """Return the phase of a step. Steps after the end of the run belong to the last phase."""
        for phase in self.phases:
            if step <= phase.last:
                return phase
        return self.phases[-1]

    def models(self) -> list[ModelOwner]:
        """Return a copy of the model config for each phase."""
        copies: list[ModelOwner] = []
        for phase in self.phases:
            model = copy.copy(self._model)
            vars(model).update(phase.values)
            copies.append(model)
        return copies

    def bind(self, model: ModelOwner) -> None:
        """Make `apply` write into another model config, for example the copy that the model was built with."""
        self._model, self._entered = model, None

    def apply(self, step: int) -> Phase | None:
        """Write the precision of a step into the model config. Call it before the step.

        Args:
            step: The number of the next step, from 1.

        Returns:
            The phase of the step if its values were written. None: the last call was in the same
            phase.

        Raises:
            PrecisionTypeError: `step` is not the number of a step.
        """
        if not isinstance(step, int) or isinstance(step, bool) or step < 1:
            rule = "must be the number of a step, from 1 on"
            raise PrecisionTypeError.of("step", rule, step, "Count from 1.")
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


def _check_rows(rows: Any) -> list[dict[str, Any]]:
    """Return the rows of a schedule after checking them.

    Raises:
        RunConfigError: The rows describe no schedule.
    """
    if not isinstance(rows, list | tuple) or len(rows) < 2:
        remedy = "Write [{until: 0.9}, {recipe: bf16_mixed}]."
        raise RunConfigError.of(
            _SCHEDULE_PATH, "must be a list of at least two phases", rows, remedy
        )
    for number, row in enumerate(rows, start=1):
        path = f"{_SCHEDULE_PATH}, phase {number}"
        if not hasattr(row, "keys"):
            raise RunConfigError.of(
                path, "must be a mapping", row, f"Write {{{_PHASE_KEYS[0]}: 0.9}}."
            )
        _require_known_keys(row, path, is_first=number == 1)
        _require_until(row, path, is_last=number == len(rows))
        recipe = row.get("recipe")
        if number > 1 and recipe is None:
            rule = "a later phase needs a recipe"
            raise RunConfigError.of(f"{path}, recipe", rule, None, "Name one.")
        if is_auto(recipe):
            rule = "a phase needs the name of a recipe"
            raise RunConfigError.of(f"{path}, recipe", rule, "auto", "Name one.")
    return list(rows)


def _require_known_keys(row: Mapping[str, Any], path: str, *, is_first: bool) -> None:
    """Refuse a key that a phase does not have. Only later phases state fields of a precision."""
    known: tuple[str, ...] = (*_PHASE_KEYS, *FIELD_DEFAULTS)
    if is_first:
        known = _PHASE_KEYS
    for key in row:
        if key in known:
            continue
        hint = did_you_mean(close_matches(str(key), known))
        if key in FIELD_DEFAULTS:
            hint = f"The first phase is the run's own precision: state mixed_precision.{key}."
        elif not hint:
            hint = f"A phase has {' and '.join(_PHASE_KEYS)}."
        raise RunConfigError.of(path, "no such key of this phase", key, hint)


def _require_until(row: Mapping[str, Any], path: str, *, is_last: bool) -> None:
    """Refuse a phase without an end, and the last phase with an end."""
    until = row.get("until")
    if is_last and until is not None:
        rule = "the last phase lasts to the end of the run"
        raise RunConfigError.of(f"{path}, until", rule, until, "Drop it.")
    if not is_last and until is None:
        rule = "needs until, the end of the phase"
        raise RunConfigError.of(f"{path}, until", rule, until, "State it.")


def _compute_last_step(until: Any, path: str, *, after: int, train_iters: int) -> int:
    """Return the last step of a phase.

    Args:
        until: A share of the steps of the run, or the number of a step.
        path: The setting, for messages.
        after: The last step of the phase before.
        train_iters: The number of steps of the run.
    """
    is_share = isinstance(until, float) and 0 < until < 1
    if not is_share and (not isinstance(until, int) or isinstance(until, bool)):
        rule = "must be a share of the steps (0 to 1) or a step"
        raise RunConfigError.of(path, rule, until, "Write 0.9 or 900.")
    last = int(until)
    value_text = until
    if is_share:
        last = round(until * train_iters)
        value_text = f"{until!r}, which is step {last}"
    if not after < last < train_iters:
        rule = f"must end after step {after} and before step {train_iters}, the last one (train.train_iters)"
        raise RunConfigError(
            f"{path}: {rule}, got {value_text}. Choose another step, or drop a phase."
        )
    return last


def plan_phases(
    rows: Sequence[Mapping[str, Any]],
    run_precision: MixedPrecisionConfig | None,
    owner_values: Sequence[OwnerValues],
    *,
    train_iters: int,
) -> tuple[Phase, ...]:
    """Return the phases. The sync of each phase is planned and compared with the first phase.

    Args:
        rows: As for `PrecisionSchedule`.
        run_precision: The precision of the run, which the first phase uses.
        owner_values: The values of the configs of the run.
        train_iters: The number of steps of the run.

    Raises:
        RunConfigError: The rows describe no schedule.
        SyncCheckError: A phase needs another value of a field that is fixed.
    """
    if run_precision is None:
        remedy = "Name the recipe of the first phase with mixed_precision."
        raise RunConfigError.of(_SCHEDULE_PATH, "needs a recipe of the run", None, remedy)
    rows = _check_rows(rows)
    phases: list[Phase] = []
    built: _ValuesByAttribute = {}
    after = 0
    for number, row in enumerate(rows, start=1):
        precision = _make_phase_precision(row, run_precision, number)
        last = train_iters
        if number < len(rows):
            path = f"{_SCHEDULE_PATH}, phase {number}, until"
            last = _compute_last_step(row["until"], path, after=after, train_iters=train_iters)
        precision.finalize()
        planned = _plan_present_attributes(precision, owner_values)
        values = {(sync_row.owner, sync_row.attribute): sync_row.new for sync_row in planned}
        built = built or values
        if _leaves_modules_open(precision, built):
            values.pop(_MODULES_ATTRIBUTE, None)
        phase = Phase(
            number=number,
            first=after + 1,
            last=last,
            precision=precision,
            values=_select_live_fields(values),
        )
        phases.append(phase)
        routed_fields = {sync_row.field for sync_row in planned}
        _refuse_fields_without_config(run_precision, precision, routed_fields, number=number)
        _refuse_fixed_differences(built, values, phase)
        after = last
    return tuple(phases)


def _plan_present_attributes(
    precision: MixedPrecisionConfig, owner_values: Sequence[OwnerValues]
) -> list[SyncRow]:
    """Return the rows of a plan whose attribute the owner has."""
    rows: list[SyncRow] = []
    for row in plan_sync(precision, owner_values, is_last=True):
        if row.verdict != "absent":
            rows.append(row)
    return rows


def _select_live_fields(values: _ValuesByAttribute) -> dict[str, Any]:
    """Return field of `LIVE_FIELDS` -> value, for the fields that are planned."""
    return {name: values["model", name] for name in LIVE_FIELDS if ("model", name) in values}


def _leaves_modules_open(precision: MixedPrecisionConfig, built: _ValuesByAttribute) -> bool:
    """Return whether the modules of the built model have no effect in a phase.

    They have an effect only under FP8 or FP4, or if a matcher chooses a scheme also for runs without
    them.
    """
    if get_scheme(precision) or is_stated(precision, "modules"):
        return False
    for matcher in list_matchers(built.get(_MODULES_ATTRIBUTE)):
        if matcher.training is not None and matcher.training.chooses_in_high_precision:
            return False
    return True


def _make_phase_precision(
    row: Mapping[str, Any], run_precision: MixedPrecisionConfig, number: int
) -> MixedPrecisionConfig:
    """Return the run's precision for the first phase, or else a recipe with the stated fields."""
    name: Any = row.get("recipe")
    path = f"{_SCHEDULE_PATH}, phase {number}"
    if number == 1:
        if name is not None and get_mixed_precision_config(name) != run_precision:
            rule = f"the first phase trains in the run's own mixed_precision, {format_label(run_precision)}"
            remedy = f"Leave it out, or train with mixed_precision={name}."
            raise RunConfigError.of(f"{path}, recipe", rule, name, remedy)
        return run_precision
    stated_over = {key: value for key, value in row.items() if key not in _PHASE_KEYS}
    return get_mixed_precision_config(name).override(path, **stated_over)


def _refuse_fields_without_config(
    run_precision: MixedPrecisionConfig,
    precision: MixedPrecisionConfig,
    routed_fields: set[str | None],
    *,
    number: int,
) -> None:
    """Refuse a phase that states another value of a field that none of the configs has.

    No plan contains such a field, so the plans cannot show the difference.
    """
    for name, value in get_stated_values(precision).items():
        first = getattr(run_precision, name)
        if name not in routed_fields and not is_same_value(value, first):
            rule = (
                f"states {name}={to_plain_data(value)} ({to_plain_data(first)} in phase 1), "
                "which no config given here has"
            )
            remedy = "Give model, optimizer and DDP config, or state the value of phase 1."
            raise RunConfigError.of(
                f"{_SCHEDULE_PATH}, phase {number}", rule, format_label(precision), remedy
            )


def _refuse_fixed_differences(
    built: _ValuesByAttribute, values: _ValuesByAttribute, phase: Phase
) -> None:
    """Refuse a phase that differs from the first phase in a field that is fixed.

    Args:
        built: The values that the model, the optimizer and DDP are built with.
        values: Their values in the phase.
    """
    differing = [path for path in values if not is_same_value(values[path], built.get(path))]
    if not differing:
        return
    label = format_label(phase.precision)
    stored = [family for family in ("fp8", "fp4") if built.get(("model", f"{family}_param"))]
    at_checkpoint = _format_checkpoint_remedy(phase)
    findings: list[Finding] = []
    for family in stored:
        field = f"mixed_precision.{family}_param_gather"
        rule = f"stores the weights in {family.upper()}, and phase {phase.number} ({label}) computes in another format"
        remedy = f"Keep BF16 weights with {field}=false. {at_checkpoint}"
        findings.append(Finding(path=field, rule=rule, value=True, remedy=remedy))
    fixed = _list_fixed_attributes(differing, stored)
    if fixed:
        needed = [_describe_needed_value(path, built, values) for path in fixed]
        listed = ", ".join(needed[:_MAX_LISTED])
        if len(needed) > _MAX_LISTED:
            listed = f"{listed} and {len(needed) - _MAX_LISTED} more"
        rule = f"needs {listed}, fixed once the model is built"
        remedy = f"State the values of phase 1. {at_checkpoint}"
        path = f"{_SCHEDULE_PATH}, phase {phase.number}"
        findings.append(Finding(path=path, rule=rule, value=label, remedy=remedy))
    if findings:
        raise SyncCheckError(
            f"{_SCHEDULE_PATH}: this switch is not possible within a run:", findings
        )


def _list_fixed_attributes(
    differing: Sequence[tuple[str, str]], stored: Sequence[str]
) -> list[tuple[str, str]]:
    """Return the differing attributes that are fixed when the model is built.

    Fields that store weights in a family are left out if the model stores weights in it. Another
    finding reports them.
    """
    not_reported = {*LIVE_FIELDS}
    for name, field in FIELDS.items():
        if field.family in stored and field.stores_weights:
            not_reported.add(name)
    fixed: list[tuple[str, str]] = []
    for owner_name, attribute in differing:
        path = (owner_name, attribute)
        if path not in _UNREAD_ATTRIBUTES and attribute not in not_reported:
            fixed.append(path)
    return fixed


def _describe_needed_value(
    path: tuple[str, str], built: _ValuesByAttribute, values: _ValuesByAttribute
) -> str:
    """Return text with the value that a phase needs and the value of the first phase."""
    if path == _MODULES_ATTRIBUTE:
        return "other modules than phase 1"
    return f"{'.'.join(path)}={to_plain_data(values[path])} ({to_plain_data(built.get(path))} in phase 1)"


def _format_checkpoint_remedy(phase: Phase) -> str:
    """Return a sentence about how to switch at a checkpoint."""
    step = phase.first - 1
    recipe = get_recipe_name(phase.precision) or "RECIPE"
    return (
        f"Or switch at a checkpoint: end the first run at step {step} (train.train_iters={step} "
        f"checkpoint.save=FOLDER), then go on with mixed_precision={recipe} checkpoint.load=FOLDER."
    )
