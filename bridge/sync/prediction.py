"""`plan` and `predict`: the values that a sync writes, and a run as the last sync leaves it.

    prediction = predict(
        config, {"model": {"num_layers": 80}, "ddp": {}}, target=Target(mcore=Version("0.18"))
    )
    prediction.values["model"]["bf16"], prediction.shape.kinds, prediction.parallel.tensor

Both are pure: nothing is written. A prediction is made once a command. Rules, plan, memory,
alignment, rehearsal and the run's own sync ask it, and nothing else foresees a sync.

The plan has a row for each route: the owner's value, the recipe's value, and the verdict. A setting
that two owners hold gets one answer. Megatron Bridge's runtime resolves two settings of sharding
before a run, not in `setup` (0.6.2, training/config.py,
`_validate_and_apply_megatron_fsdp_configs`, `_validate_and_sync_distributed_optimizer_settings`).
The last plan before a run resolves them too: the gradient buffer is not reused under Megatron-FSDP,
and a switch that is on in one of optimizer and DDP is on in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.errors import Finding, RunConfigError
from bridge.model.layout import Parallel, read_parallel
from bridge.model.reads import Values, kept_property, note
from bridge.model.section import ROLES, Section, read_section
from bridge.model.shape import ModelShape, read_shape
from bridge.precision.config import FIELDS, PrecisionConfig
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.mode import mode_of, scheme_of
from bridge.precision.statements import field_names, field_value, is_left_open, is_stated, source_of
from bridge.rules.facts.off_switches import off_switches
from bridge.rules.inert import BUFFER
from bridge.rules.sync_row import SyncRow
from bridge.sync.module_recipe import module_recipe
from bridge.sync.owner import OwnerValues, own_values, same, seen_through
from bridge.sync.routes import CLASS_DEFAULT, FIRST, OWNERS, ROUTES, Route
from bridge.target.fields import DEFAULTS, FUSED_RECIPES, PAIRS
from bridge.target.target import Target

WRITTEN_INTO = ("model", "optimizer", "ddp", "train")
"""The sections that a sync writes into."""
SCHEME_FIELDS = ("fp8_recipe", "fp4_recipe")
"""Belong to the mode: kept, they would leave a run that is neither the owner's nor the recipe's."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A run before it is built, as the last sync leaves it."""

    precision: PrecisionConfig | None
    """The precision that is written into the sections; None: they keep their own settings."""
    sections: Mapping[str, Section]
    """Every section of `ROLES` as it was given."""
    target: Target
    owners: tuple[OwnerValues, ...]
    """The values that the plan starts from."""
    rows: tuple[SyncRow, ...]
    """The plan of the sync."""
    values: Mapping[str, dict[str, Any]]
    """Section -> field -> value after the sync."""
    unplanned: str | None = None
    """Why the run has no plan, as a sentence: a source of its layers or precision is not read."""
    uncounted: tuple[str, ...] = ()
    """Options of the run that are not read, and may bear on its layout, its layers or its bytes."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables of the run, as far as they are known."""

    def under(self, precision: PrecisionConfig | None) -> Prediction:
        """Return the same run in another precision."""
        return self._again(precision, self.sections, self.target)

    def on(self, target: Target) -> Prediction:
        """Return the same run on another target."""
        return self._again(self.precision, self.sections, target)

    def _again(
        self, precision: PrecisionConfig | None, sections: Mapping[str, Section], target: Target
    ) -> Prediction:
        return replace(
            _predicted(precision, sections, target),
            unplanned=self.unplanned,
            uncounted=self.uncounted,
            environment=self.environment,
        )

    def refuse_unplanned(self) -> None:
        """Raise a RunConfigError where a source of the layers or their precision is not read."""
        if self.unplanned is not None:
            note("model.num_layers")
            raise RunConfigError(self.unplanned)

    def changed(self, changes: Mapping[str, Any]) -> Prediction:
        """Return the run with other values of some settings.

        Args:
            changes: section.field -> value in the form of a plan (`in_one_form`).
        """
        sections = dict(self.sections)
        for path, value in changes.items():
            role, _, name = path.partition(".")
            sections[role] = sections[role].changed({name: value})
        return self._again(self.precision, sections, self.target)

    @kept_property
    def absent(self) -> Mapping[str, Mapping[str, str]]:
        """Section -> fields that are set and that this Megatron Core does not have.

        Each field has the versions that have it.
        """
        absent = {}
        for role in WRITTEN_INTO:
            absent[role] = self.sections[role].absent_from(role, self.target.mcore)
        return absent

    @kept_property
    def model(self) -> Section:
        """The model that this Megatron Core builds: a field that it lacks counts as not set.

        Vocabulary and sequence length are the model's, or else those of the data.
        """
        section = self.sections["model"].without("model", self.absent["model"])
        data = self.sections["data"].values
        of_data = {}
        for name in ("vocab_size", "seq_length"):
            if section.given(name) is None:
                value = data[name]
                if value is not None:
                    of_data[name] = value
        return section.changed(of_data)

    @kept_property
    def shape_and_faults(self) -> tuple[ModelShape, tuple[Finding, ...]]:
        """The model, and every reason why there is none, or no plan of it."""
        return read_shape(self.model)

    @kept_property
    def layout_and_faults(self) -> tuple[Parallel, tuple[Finding, ...]]:
        """The layout on as few GPUs as it needs, and every reason why there is none."""
        return read_parallel(self.model)

    @property
    def shape(self) -> ModelShape:
        """The model; RunConfigError with every reason why there is none, or no plan of it."""
        self.refuse_unplanned()
        shape, faults = self.shape_and_faults
        if faults:
            raise RunConfigError("\n".join(map(str, faults)))
        return shape

    @property
    def layout(self) -> Parallel:
        """The layout on as few GPUs as it needs; RunConfigError where there is none."""
        layout, faults = self.layout_and_faults
        if faults:
            raise RunConfigError(str(faults[0]))
        return layout

    @kept_property
    def parallel(self) -> Parallel:
        """The layout on the GPUs of the target, or on the next number that it fills.

        RunConfigError where there is none.
        """
        return self.layout.on_enough(self.target.count)

    def read(self, role: str) -> dict[str, Any]:
        """Return a section's values after the sync, those of absent fields at their defaults."""
        if not self.absent[role]:
            return self.values[role]
        values = {**self.values[role]}
        for name in self.absent[role]:
            values[name] = DEFAULTS[role][name]
        return values


def predict(
    precision: PrecisionConfig | None,
    given: Mapping[str, Any],
    *,
    target: Target | None = None,
    unplanned: str | None = None,
    uncounted: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Prediction:
    """Return a run as the last sync before it leaves it.

    Args:
        precision: The precision that is written into the sections; None: they keep their own
            settings.
        given: Section -> Megatron's object, a mapping of its fields, or a `Section`. One that is
            absent has Megatron's defaults. An object that a sync has written to counts with the
            values that it had before.
        target: The GPUs and versions of the run; without a version of megatron-core every field is
            there.
        unplanned: Why the run has no plan, as a sentence; None: it has one.
        uncounted: Options of the run that are not read, and may bear on its layout, its layers or
            its bytes.
        environment: Environment variables of the run; None: not known.
    """
    unknown = given.keys() - {*ROLES}
    if unknown:
        raise TypeError(
            f"a run has the sections {', '.join(ROLES)}, and not {', '.join(sorted(unknown))}"
        )
    is_synced = precision is not None
    sections = {role: _section(role, given.get(role), is_synced=is_synced) for role in ROLES}
    return replace(
        _predicted(precision, sections, target or Target()),
        unplanned=unplanned,
        uncounted=uncounted,
        environment=environment or {},
    )


def _section(role: str, owner: Any, *, is_synced: bool) -> Section:
    if owner is None or isinstance(owner, Mapping | Section):
        return read_section(role, owner)
    config = seen_through(owner)
    if is_synced:
        return read_section(role, config, own_values(role, config))
    return read_section(role, config, None)


def _predicted(
    precision: PrecisionConfig | None, sections: Mapping[str, Section], target: Target
) -> Prediction:
    values: dict[str, dict[str, Any]] = {}
    for role, section in sections.items():
        values[role] = Values(role, section.values)
    owners = []
    for role in WRITTEN_INTO:
        owners.append(OwnerValues.of_section(role, sections[role], target.mcore))
    rows: list[SyncRow] = []
    if precision is not None:
        rows = plan(precision, owners, is_last=True)
    for row in rows:
        if row.verdict != "absent":
            values[row.owner][row.attribute] = row.new
    return Prediction(
        precision=precision,
        sections=sections,
        target=target,
        owners=tuple(owners),
        rows=tuple(rows),
        values=values,
    )


def plan(
    config: PrecisionConfig,
    owners: Sequence[OwnerValues],
    *,
    keep_own: bool = False,
    is_last: bool = False,
) -> list[SyncRow]:
    """Return one row per precision field of every owner.

    Args:
        config: The precision that is written.
        owners: The configs that it is written into.
        keep_own: An owner's own value stays where it differs from a stated one.
        is_last: The run begins after this sync, so the settings that sharding decides are resolved.
    """
    rows: list[SyncRow] = []
    scheme = scheme_after_sync(config, owners)
    for owner in owners:
        for route in _routes_for(owner, config):
            is_active = _is_active(config, route, scheme)
            rows.append(_row(config, owner, route, is_active=is_active, keep_own=keep_own))
        rows.extend(_nan_check(config, owner))
    rows = _one_answer(_counts_that_act(rows, owners))
    if not is_last:
        return rows
    by_role = {owner.role: owner for owner in owners}
    if under_fsdp(by_role):
        rows = _without_reused_buffer(rows, by_role)
    return [*rows, *sharding_rows(by_role)]


def _is_active(config: PrecisionConfig, route: Route, scheme: str | None) -> bool:
    """Return whether the row of a route acts in a run of this precision and scaling scheme."""
    is_fp8 = config.fp8 is not None
    is_fp4 = config.fp4 is not None
    is_on = {None: True, "fp8": is_fp8, "fp4": is_fp4, "low": is_fp8 or is_fp4}
    if is_on[route.family] and route.scheme in (None, scheme):
        return True
    if not is_stated(config, route.field):
        return route.rule == "stated"  # the owner's value is not touched
    if route.is_harmless:
        return bool(field_value(config, route.field) != route.neutral)
    return False


def _without_reused_buffer(
    rows: Iterable[SyncRow], owners: Mapping[str, OwnerValues]
) -> list[SyncRow]:
    """Return the rows of a run under Megatron-FSDP, which does not reuse the gradient buffer."""
    resolved = []
    for row in rows:
        if row.attribute == BUFFER and row.new:
            verdict = "neutralise"
            if row.old is False:
                verdict = "agree"
            neutralised = replace(
                row,
                new=False,
                verdict=verdict,
                by="ddp",
                why="Megatron-FSDP does not implement it",
                replaces_own=owners[row.owner].is_own(BUFFER),
            )
            resolved.append(neutralised)
        else:
            resolved.append(row)
    return resolved


def _routes_for(owner: OwnerValues, config: PrecisionConfig) -> list[Route]:
    routes = _routes_of_role(owner) if owner.role in OWNERS else _renamed_routes(owner)
    known = {route.attribute for route in routes}
    for field in field_names(config):
        if field not in known and owner.has(field) and owner.role != "train":
            routes.append(_same_named(field, owner))
    return routes


def _routes_of_role(owner: OwnerValues) -> list[Route]:
    routes = []
    for route in ROUTES:
        if route.owner == owner.role and route.attribute is not None:
            routes.append(route)
    return routes


def _renamed_routes(owner: OwnerValues) -> list[Route]:
    """Return the model's routes to attributes of another name, for an owner in no known role."""
    routes = []
    for route in ROUTES:
        is_renamed = route.attribute is not None and route.attribute != route.field
        if is_renamed and route.owner == "model" and owner.has(str(route.attribute)):
            routes.append(route)
    return routes


def _same_named(field: str, owner: OwnerValues) -> Route:
    # A class without `fp8` that has `fp8_recipe` is an optimizer's, whatever its name.
    is_optimizers = field == "fp8_recipe" and not owner.has("fp8")
    for route in ROUTES:
        if field == route.field == route.attribute:
            if is_optimizers and route.owner != "optimizer":
                continue
            return route
    family = FIELDS[field].family
    return Route(field=field, owner=owner.role, attribute=field, family=family, rule="value")


Maker = Callable[[Any, str, str, str], SyncRow]
"""Makes the row of one attribute of an owner.

Its arguments are the new value, the verdict, the source that decides, and the reason.
"""


def _maker(owner: OwnerValues, attribute: str, field: str) -> Maker:
    def made(new: Any, verdict: str, by: str, why: str) -> SyncRow:
        return SyncRow(
            owner=owner.role,
            attribute=attribute,
            field=field,
            old=owner.value(attribute),
            new=new,
            verdict=verdict,
            by=by,
            why=why,
        )

    return made


def _row(
    config: PrecisionConfig, owner: OwnerValues, route: Route, *, is_active: bool, keep_own: bool
) -> SyncRow:
    attribute = route.attribute or route.field
    made = _maker(owner, attribute, route.field)
    if not owner.has(attribute):
        return _absent(config, owner, route, made)
    if is_active:
        row = _decide(config, owner, route, made, keep_own=keep_own)
    elif route.read_under is not None and _is_on(config, owner, route.read_under):
        row = _fused_recipe(config, owner, made)
    else:
        row = _neutralised(config, owner, route, made)
    verdict = row.verdict
    replaces_own = owner.is_own(attribute) and not same(owner.own(attribute), row.new)
    if same(row.old, row.new):
        if verdict != "keep":
            verdict = "agree"
    elif replaces_own and (verdict == "set" or route.rule == "dtype"):
        verdict = "override"
    return replace(row, verdict=verdict, replaces_own=replaces_own)


def _absent(config: PrecisionConfig, owner: OwnerValues, route: Route, made: Maker) -> SyncRow:
    why = f"{owner.class_name} has no such attribute"
    row = made(None, "absent", source_of(config, route.field), why)
    if owner.is_megatron and route.since != FIRST:
        return replace(row, since=route.since)
    return row


def _neutralised(config: PrecisionConfig, owner: OwnerValues, route: Route, made: Maker) -> SyncRow:
    neutral = route.neutral
    if neutral is CLASS_DEFAULT:
        attribute = route.attribute or route.field
        neutral = owner.defaults.get(attribute, field_value(config, route.field))
    if route.scheme:
        missing = f"{route.scheme} scaling"
    elif route.family == "low":
        missing = "FP8 or FP4"
    else:
        missing = (route.family or "").upper()
    return made(neutral, "neutralise", "mode", f"no {missing} in this run")


def _decide(
    config: PrecisionConfig, owner: OwnerValues, route: Route, made: Maker, *, keep_own: bool
) -> SyncRow:
    """Decide the row of a route that acts."""
    is_dtype = route.rule in ("dtype", "autocast dtype")
    if is_dtype and is_left_open(config, route.field) and not owner.is_megatron:
        return made(None, "set", "stated", "stated as None")
    if is_stated(config, route.field):
        # A switch is the mode's: an owner's own value never stays.
        may_keep = keep_own and route.rule != "switch" and route.field not in SCHEME_FIELDS
        return _decide_stated(config, owner, route, made, may_keep=may_keep)
    return _decide_unstated(config, owner, route, made)


def _reading(config: PrecisionConfig, owner: OwnerValues, route: Route) -> Any:
    """Return the value of the precision as the owner would take it."""
    reading = field_value(config, route.field)
    if route.field != "modules":
        return reading
    if reading:
        return module_recipe(config, owner)
    return None


def _decide_stated(
    config: PrecisionConfig, owner: OwnerValues, route: Route, made: Maker, *, may_keep: bool
) -> SyncRow:
    attribute = route.attribute or route.field
    own = owner.own(attribute)
    reading = _reading(config, owner, route)
    if may_keep and owner.is_own(attribute) and not same(own, reading):
        return made(own, "keep", owner.role, f"its own value; the recipe says {reading!r}")
    return made(reading, "set", source_of(config, route.field), "stated")


def _decide_unstated(
    config: PrecisionConfig, owner: OwnerValues, route: Route, made: Maker
) -> SyncRow:
    attribute = route.attribute or route.field
    own = owner.own(attribute)
    reading = _reading(config, owner, route)
    mode = f"the mode is {mode_of(config)}"
    if route.rule == "dtype":
        return made(mode_of(config), "derive", "mode", mode)
    if route.rule == "autocast dtype":
        return _autocast_dtype(config, owner, made)
    if route.rule == "switch":
        return made(reading, "set", "mode", mode)
    if route.rule == "count" and attribute in owner.defaults:
        verdict = "agree"
        if scheme_of(config):
            verdict = "keep"
        return made(own, verdict, owner.role, "the recipe does not state it")
    if route.rule == "stated" and not owner.is_own(attribute):
        return made(own, "agree", owner.role, "the recipe does not state it")
    if owner.is_own(attribute):
        return made(own, "keep", owner.role, "its own value, and the recipe does not state it")
    return made(reading, "set", "default", "not stated: the default of the config")


def _is_on(config: PrecisionConfig, owner: OwnerValues, switch: str) -> bool:
    """Return whether a switch of an owner is on after the sync."""
    if is_stated(config, switch):
        return bool(field_value(config, switch))
    return bool(owner.value(switch))


def _fused_recipe(config: PrecisionConfig, owner: OwnerValues, made: Maker) -> SyncRow:
    """Decide `optimizer.fp8_recipe` in a run without FP8 whose precision-aware optimizer reads it.

    Under None and delayed the fused Adam holds the masters (of BF16 weights: 2 bytes of remainders
    a parameter). Under any other value Megatron holds them (FP32: 4 bytes). The owner's own value
    stays. Weights stored in FP4 can be updated from Megatron's masters alone, so that an owner
    without a value gets the one that the config reads.

    Source: megatron-core 0.16.1, 0.17.1, 0.18.2, 0.19.2 and Megatron-LM main of 2026-08-22,
    optimizer_config.py __post_init__, distrib_optimizer.py _build_model_and_main_param_groups.
    """
    own = owner.own("fp8_recipe")
    reading = field_value(config, "fp8_recipe")
    if own not in FUSED_RECIPES:
        why = (
            "the precision-aware optimizer reads it: FP32 masters take 4 bytes a parameter, "
            "and None would change that"
        )
        return made(own, "keep", owner.role, why)
    stores_fp4 = config.fp4 and field_value(config, "fp4_param")
    if own is None and stores_fp4 and reading not in FUSED_RECIPES:
        why = (
            "under None the first step fails on FP4 weights; "
            "Megatron's FP32 masters take 4 bytes a parameter"
        )
        return made(reading, "derive", "mode", why)
    why = "its own value, which the precision-aware optimizer reads"
    return made(own, "agree", owner.role, why)


def _autocast_dtype(config: PrecisionConfig, owner: OwnerValues, made: Maker) -> SyncRow:
    """Decide: params_dtype as it will be, unless autocast is on with a dtype of the owner's own."""
    is_on = config.autocast_enabled
    if not is_stated(config, "autocast_enabled") and owner.value("enable_autocast") is True:
        is_on = True
    if is_on and owner.is_own("autocast_dtype"):
        own = owner.own("autocast_dtype")
        return made(own, "keep", owner.role, "its own value, autocast is on")
    params_dtype = field_value(config, "params_dtype") or mode_of(config)
    return made(params_dtype, "derive", "mode", "follows params_dtype")


NAN_CHECKS = {"ddp": "check_for_nan_in_grad", "train": "check_for_nan_in_loss"}
"""Role -> its check that ends a run at the first NaN."""


def _nan_check(config: PrecisionConfig, owner: OwnerValues) -> list[SyncRow]:
    """Return the row that lets the first overflows of a dynamic loss scale pass.

    Megatron-LM's argument parser turns the checks off under FP16 with a dynamic scale. Configs
    built in Python meet a fatal NaN check at the first overflow (megatron-core 0.16.1
    param_and_grad_buffer.py, arguments.py).
    """
    attribute = NAN_CHECKS.get(owner.role)
    if attribute is None or not owner.has(attribute):
        return []
    old = owner.value(attribute)
    own = owner.own(attribute)
    made = _maker(owner, attribute, "loss_scale")
    if config.fp16 and config.loss_scale is None:
        verdict = "derive"
        if old is False:
            verdict = "agree"
        why = "a dynamic loss scale overflows by design, and this check would end the run"
        return [made(False, verdict, "mode", why)]
    if same(old, own):
        return []
    return [made(own, "keep", owner.role, "its own value: the loss scale is not dynamic")]


def _counts_that_act(rows: list[SyncRow], owners: Iterable[OwnerValues]) -> list[SyncRow]:
    """Give layers kept in BF16 Megatron's own counts where the owner holds 0 and 0.

    The zeros would switch the layers off.
    """
    for owner in owners:
        index_of = {
            row.attribute: index for index, row in enumerate(rows) if row.owner == owner.role
        }
        flag = index_of.get("first_last_layers_bf16")
        if flag is None or rows[flag].new is not True:
            continue
        counts = [index_of[name] for name in LAYER_COUNTS if name in index_of]
        if any(rows[index].new != 0 for index in counts):
            continue
        for index in counts:
            row = rows[index]
            default = owner.defaults.get(row.attribute)
            if row.verdict == "keep" and default:
                rows[index] = replace(
                    row,
                    new=default,
                    verdict="override",
                    by="Megatron's default",
                    why="first_last_layers_bf16 is on, and 0 would switch it off",
                    replaces_own=False,
                )
    return rows


def scheme_after_sync(config: PrecisionConfig, owners: Iterable[OwnerValues]) -> str | None:
    """Return the scaling scheme the run will have.

    It is the stated one, else an owner's own, else the config's default.
    """
    field = "fp4_recipe"
    if config.fp8:
        field = "fp8_recipe"
    if scheme_of(config) is not None and not is_stated(config, field):
        for owner in owners:
            if owner.has(field) and owner.is_own(field) and owner.own(field) is not None:
                own = owner.own(field)
                return str(getattr(own, "value", own))
    return scheme_of(config)


def _one_answer(rows: list[SyncRow]) -> list[SyncRow]:
    """Return the rows with one answer to each setting that two owners hold.

    Where the recipe has none, one owner's own value is given to the other owner. Where both owners
    have a value of their own, both stay, and a rule finds the difference.
    """
    row_of = {(row.owner, row.attribute): row for row in rows}
    answered = dict(row_of)
    for pair in PAIRS:
        for place, other in ((pair.first, pair.second), (pair.second, pair.first)):
            kept = row_of.get(place)
            row = row_of.get(other)
            if kept is None or row is None or kept.verdict != "keep" or same(kept.new, row.new):
                continue
            # A row that is set from the config's default is open.
            if row.by != "default" or row.verdict == "absent":
                continue
            role, attribute = place
            why = (
                f"as {role}.{attribute}, "
                "which has a value of its own that the recipe does not state"
            )
            verdict = "derive"
            if same(row.old, kept.new):
                verdict = "agree"
            answered[other] = replace(
                row,
                new=kept.new,
                verdict=verdict,
                by=role,
                why=why,
                replaces_own=False,
            )
    return list(answered.values())


def under_fsdp(owners: Mapping[str, OwnerValues]) -> bool:
    """Return whether Megatron-FSDP shards the run."""
    ddp = owners.get("ddp")
    return ddp is not None and ddp.value("use_megatron_fsdp") is True


def sharding_rows(owners: Mapping[str, OwnerValues]) -> list[SyncRow]:
    """Return a row for each switch that is off in optimizer or DDP and has to be on.

    It has to be on where it is on in the other of the two, and where Megatron-FSDP needs it.
    """
    if not {"optimizer", "ddp"} <= owners.keys():
        return []
    rows = []
    for role, name, why in off_switches(lambda role, name: owners[role].value(name)):
        by = "optimizer"
        if role == "optimizer" or under_fsdp(owners):
            by = "ddp"
        rows.append(SyncRow(owner=role, attribute=name, old=False, new=True, by=by, why=why))
    return rows
