"""`plan` and `predict`: what a sync writes, and a run as the last sync before it leaves it.

Pure: nothing is written.

    prediction = predict(config, {"model": {"num_layers": 80}, "ddp": {}}, target=Target(mcore=Version("0.18")))
    prediction.values["model"]["bf16"], prediction.shape.kinds, prediction.parallel.tensor

A prediction is made once a command. Rules, plan, memory, alignment, rehearsal and the run's own
sync ask it, and nothing else foresees a sync.

The plan says for each route what the owner holds, what the recipe says, and the verdict. A setting
that two owners hold gets one answer. Megatron Bridge's runtime resolves two settings of sharding
before a run, not in `setup` (0.6.2, training/config.py,
`_validate_and_apply_megatron_fsdp_configs`, `_validate_and_sync_distributed_optimizer_settings`),
and so does the last plan before a run: the gradient buffer is not reused under Megatron-FSDP, and a
switch that is on in one of optimizer and DDP is on in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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

_BY_ROLE = {
    role: tuple(r for r in ROUTES if r.owner == role and r.attribute is not None) for role in OWNERS
}


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
    """Why the run has no plan, as a sentence, where a source of its layers or
    of their precision is not read.
    """
    uncounted: tuple[str, ...] = ()
    """Options of the run that may bear on its layout, its layers or its bytes and are not read."""
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
        made = _predicted(precision, sections, target)
        return replace(
            made, unplanned=self.unplanned, uncounted=self.uncounted, environment=self.environment
        )

    def refuse_unplanned(self) -> None:
        """Raise a RunConfigError where a source of the layers, or of their precision, is not read."""
        if self.unplanned is not None:
            note("model.num_layers")
            raise RunConfigError(self.unplanned)

    def changed(self, changes: Mapping[str, Any]) -> Prediction:
        """Return the run with other values of some settings, by section.field, in their one form."""
        sections = dict(self.sections)
        for path, value in changes.items():
            role, _, name = path.partition(".")
            sections[role] = sections[role].changed({name: value})
        return self._again(self.precision, sections, self.target)

    @kept_property
    def absent(self) -> Mapping[str, Mapping[str, str]]:
        """Section -> fields that are set and that this Megatron Core does not have -> the versions that have them."""
        return {
            role: self.sections[role].absent_from(role, self.target.mcore) for role in WRITTEN_INTO
        }

    @kept_property
    def model(self) -> Section:
        """The model that this Megatron Core builds: a field that it does not have counts as not set.

        Vocabulary and sequence length are the model's, or else those of the data.
        """
        section, data = (
            self.sections["model"].without("model", self.absent["model"]),
            self.sections["data"].values,
        )
        of_data = {
            name: data[name] for name in ("vocab_size", "seq_length") if section.given(name) is None
        }
        return section.changed(
            {name: value for name, value in of_data.items() if value is not None}
        )

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
        """The layout on the GPUs of the target, or on the next number that it fills; RunConfigError for none."""
        return self.layout.on_enough(self.target.count)

    def read(self, role: str) -> dict[str, Any]:
        """Return the values of a section after the sync, those of absent fields at their defaults."""
        if not self.absent[role]:
            return self.values[role]
        return {**self.values[role], **{name: DEFAULTS[role][name] for name in self.absent[role]}}


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
        precision: The precision that is written into the sections;
            None: they keep their own settings.
        given: Section -> Megatron's object, a mapping of its fields, or a `Section`; one that
            is absent has Megatron's defaults. An object that a sync has written to counts with
            the values that it had before.
        target: The GPUs and versions of the run; without a version of
            megatron-core every field is there.
        unplanned: Why the run has no plan, as a sentence; None: it has one.
        uncounted: Options of the run that may bear on its layout, its
            layers or its bytes and are not read.
        environment: Environment variables of the run; None: not known.
    """
    unknown = given.keys() - {*ROLES}
    if unknown:
        raise TypeError(
            f"a run has the sections {', '.join(ROLES)}, and not {', '.join(sorted(unknown))}"
        )
    sections = {
        role: _section(role, given.get(role), is_synced=precision is not None) for role in ROLES
    }
    made = _predicted(precision, sections, target or Target())
    return replace(made, unplanned=unplanned, uncounted=uncounted, environment=environment or {})


def _section(role: str, owner: Any, *, is_synced: bool) -> Section:
    if owner is None or isinstance(owner, Mapping | Section):
        return read_section(role, owner)
    held = seen_through(owner)
    return read_section(role, held, own_values(role, held) if is_synced else None)


def _predicted(
    precision: PrecisionConfig | None, sections: Mapping[str, Section], target: Target
) -> Prediction:
    values: dict[str, dict[str, Any]] = {
        role: Values(role, section.values) for role, section in sections.items()
    }
    owners = tuple(
        OwnerValues.of_section(role, sections[role], target.mcore) for role in WRITTEN_INTO
    )
    rows = tuple(plan(precision, owners, is_last=True)) if precision is not None else ()
    for row in rows:
        if row.verdict != "absent":
            values[row.owner][row.attribute] = row.new
    return Prediction(
        precision=precision,
        sections=sections,
        target=target,
        owners=owners,
        rows=rows,
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

    With `keep_own` an owner's own value stays where it differs from a stated one; with `is_last`
    the settings that sharding decides are resolved too.
    """
    rows: list[SyncRow] = []
    scheme = scheme_after_sync(config, owners)
    on = {None: True, "fp8": config.fp8 is not None, "fp4": config.fp4 is not None}
    on["low"] = on["fp8"] or on["fp4"]
    for owner in owners:
        for route in _routes_for(owner, config):
            is_active = on[route.family] and route.scheme in (None, scheme)
            if not is_stated(config, route.field):
                is_active |= route.rule == "stated"  # the owner's value is not touched
            elif route.is_harmless:
                is_active |= field_value(config, route.field) != route.neutral
            rows.append(_row(config, owner, route, is_active=is_active, keep_own=keep_own))
        rows.extend(_nan_check(config, owner))
    rows = _one_answer(_counts_that_act(rows, owners))
    by_role = {owner.role: owner for owner in owners}
    if not is_last:
        return rows
    for index, row in enumerate(rows):
        if under_fsdp(by_role) and row.attribute == BUFFER and row.new:
            verdict, is_own = (
                "agree" if row.old is False else "neutralise",
                by_role[row.owner].is_own(BUFFER),
            )
            why = "Megatron-FSDP does not implement it"
            rows[index] = replace(
                row, new=False, verdict=verdict, by="ddp", why=why, replaces_own=is_own
            )
    return [*rows, *sharding_rows(by_role)]


def _routes_for(owner: OwnerValues, config: PrecisionConfig) -> list[Route]:
    routes = list(_BY_ROLE.get(owner.role, ()))
    if owner.role not in OWNERS:
        renamed = [r for r in ROUTES if r.attribute not in (None, r.field) and r.owner == "model"]
        routes = [
            route for route in renamed if route.attribute is not None and owner.has(route.attribute)
        ]
    known = {route.attribute for route in routes}
    for field in field_names(config):
        if field not in known and owner.has(field) and owner.role != "train":
            routes.append(_same_named(field, owner))
    return routes


def _same_named(field: str, owner: OwnerValues) -> Route:
    # A class without `fp8` that has `fp8_recipe` is an optimizer's, whatever its name.
    role = "optimizer" if field == "fp8_recipe" and not owner.has("fp8") else None
    for route in ROUTES:
        if field == route.field == route.attribute and role in (None, route.owner):
            return route
    return Route(
        field=field, owner=owner.role, attribute=field, family=FIELDS[field].family, rule="value"
    )


Maker = Callable[[Any, str, str, str], SyncRow]
"""Makes the row of one attribute of an owner: of its new value, the verdict,
the source that decides, and why.
"""


def _maker(owner: OwnerValues, attribute: str, field: str) -> Maker:
    made = partial(
        SyncRow, owner=owner.role, attribute=attribute, field=field, old=owner.value(attribute)
    )
    return lambda new, verdict, by, why: made(new=new, verdict=verdict, by=by, why=why)


def _row(
    config: PrecisionConfig, owner: OwnerValues, route: Route, *, is_active: bool, keep_own: bool
) -> SyncRow:
    attribute = route.attribute or route.field
    made = _maker(owner, attribute, route.field)
    if not owner.has(attribute):
        row = made(
            None,
            "absent",
            source_of(config, route.field),
            f"{owner.class_name} has no such attribute",
        )
        return replace(
            row, since=route.since if owner.is_megatron and route.since != FIRST else None
        )
    if is_active:
        row = _decide(config, owner, route, made, keep_own=keep_own)
    elif route.read_under is not None and _is_on(config, owner, route.read_under):
        row = _fused_recipe(config, owner, made)
    else:
        what, neutral = (
            "FP8 or FP4" if route.family == "low" else (route.family or "").upper(),
            route.neutral,
        )
        if neutral is CLASS_DEFAULT:
            neutral = owner.defaults.get(attribute, field_value(config, route.field))
        why = f"no {f'{route.scheme} scaling' if route.scheme else what} in this run"
        row = made(neutral, "neutralise", "mode", why)
    verdict, replaces_own = (
        row.verdict,
        owner.is_own(attribute) and not same(owner.own(attribute), row.new),
    )
    if same(row.old, row.new):
        verdict = "keep" if verdict == "keep" else "agree"
    elif replaces_own and (verdict == "set" or route.rule == "dtype"):
        verdict = "override"
    return replace(row, verdict=verdict, replaces_own=replaces_own)


def _decide(
    config: PrecisionConfig, owner: OwnerValues, route: Route, made: Maker, *, keep_own: bool
) -> SyncRow:
    attribute = route.attribute or route.field
    stated, source = is_stated(config, route.field), source_of(config, route.field)
    own = owner.own(attribute)
    reading = field_value(config, route.field)
    if route.field == "modules":
        reading = module_recipe(config, owner) if reading else None
    mode = f"the mode is {mode_of(config)}"
    if (
        route.rule in ("dtype", "autocast dtype")
        and is_left_open(config, route.field)
        and not owner.is_megatron
    ):
        return made(None, "set", "stated", "stated as None")
    if route.rule == "dtype" and not stated:
        return made(mode_of(config), "derive", "mode", mode)
    if route.rule == "autocast dtype" and not stated:
        return _autocast_dtype(config, owner, made)
    if route.rule == "switch":
        return made(reading, "set", source if stated else "mode", "stated" if stated else mode)
    if stated:
        is_kept = (
            keep_own
            and route.field not in SCHEME_FIELDS
            and owner.is_own(attribute)
            and not same(own, reading)
        )
        if is_kept:
            return made(own, "keep", owner.role, f"its own value; the recipe says {reading!r}")
        return made(reading, "set", source, "stated")
    if route.rule == "count" and attribute in owner.defaults:
        return made(
            own,
            "keep" if scheme_of(config) else "agree",
            owner.role,
            "the recipe does not state it",
        )
    if route.rule == "stated" and not owner.is_own(attribute):
        return made(own, "agree", owner.role, "the recipe does not state it")
    if owner.is_own(attribute):
        return made(own, "keep", owner.role, "its own value, and the recipe does not state it")
    return made(reading, "set", "default", "not stated: the default of the config")


def _is_on(config: PrecisionConfig, owner: OwnerValues, switch: str) -> bool:
    """Return whether a switch of an owner is on after the sync."""
    return bool(field_value(config, switch) if is_stated(config, switch) else owner.value(switch))


def _fused_recipe(config: PrecisionConfig, owner: OwnerValues, made: Maker) -> SyncRow:
    """Decide `optimizer.fp8_recipe` in a run without FP8 whose precision-aware optimizer reads it.

    Under None and delayed the fused Adam holds the masters (of BF16 weights: 2 bytes of remainders
    a parameter), under any other value Megatron holds them (FP32: 4 bytes). The owner's own value
    stays. Weights stored in FP4 can be updated from Megatron's masters alone, so that an owner
    without a value gets the one that the config reads.

    Source: megatron-core 0.16.1, 0.17.1, 0.18.2, 0.19.2 and Megatron-LM main of 2026-08-22,
    optimizer_config.py __post_init__, distrib_optimizer.py _build_model_and_main_param_groups.
    """
    own, reading = owner.own("fp8_recipe"), field_value(config, "fp8_recipe")
    if own not in FUSED_RECIPES:
        why = (
            "the precision-aware optimizer reads it: FP32 masters take 4 bytes a parameter, and None "
            "would change that"
        )
        return made(own, "keep", owner.role, why)
    if (
        own is None
        and config.fp4
        and field_value(config, "fp4_param")
        and reading not in FUSED_RECIPES
    ):
        why = "under None the first step fails on FP4 weights; Megatron's FP32 masters take 4 bytes a parameter"
        return made(reading, "derive", "mode", why)
    return made(
        own, "agree", owner.role, "its own value, which the precision-aware optimizer reads"
    )


def _autocast_dtype(config: PrecisionConfig, owner: OwnerValues, made: Maker) -> SyncRow:
    """Decide: params_dtype as it will be, unless autocast is on with a dtype of the owner's own."""
    is_open = not is_stated(config, "autocast_enabled")
    is_on = config.autocast_enabled or (is_open and owner.value("enable_autocast") is True)
    if is_on and owner.is_own("autocast_dtype"):
        return made(
            owner.own("autocast_dtype"), "keep", owner.role, "its own value, autocast is on"
        )
    return made(
        field_value(config, "params_dtype") or mode_of(config),
        "derive",
        "mode",
        "follows params_dtype",
    )


def _nan_check(config: PrecisionConfig, owner: OwnerValues) -> list[SyncRow]:
    """Return the row that lets the first overflows of a dynamic loss scale pass.

    Megatron-LM's argument parser turns the checks off under FP16 with a dynamic scale; configs
    built in Python meet a fatal NaN check at the first overflow (megatron-core 0.16.1
    param_and_grad_buffer.py, arguments.py).
    """
    attribute = {"ddp": "check_for_nan_in_grad", "train": "check_for_nan_in_loss"}.get(owner.role)
    if attribute is None or not owner.has(attribute):
        return []
    old, own, made = (
        owner.value(attribute),
        owner.own(attribute),
        _maker(owner, attribute, "loss_scale"),
    )
    if config.fp16 and config.loss_scale is None:
        why = "a dynamic loss scale overflows by design, and this check would end the run"
        return [made(False, "agree" if old is False else "derive", "mode", why)]
    if same(old, own):
        return []
    return [made(own, "keep", owner.role, "its own value: the loss scale is not dynamic")]


def _counts_that_act(rows: list[SyncRow], owners: Iterable[OwnerValues]) -> list[SyncRow]:
    """Give layers kept in BF16 Megatron's own counts where the owner holds 0 and 0, which would switch them off."""
    for owner in owners:
        mine = {row.attribute: index for index, row in enumerate(rows) if row.owner == owner.role}
        counts = [mine[name] for name in LAYER_COUNTS if name in mine]
        flag = mine.get("first_last_layers_bf16")
        if (
            flag is None
            or rows[flag].new is not True
            or any(rows[index].new != 0 for index in counts)
        ):
            continue
        for index in counts:
            row, default = rows[index], owner.defaults.get(rows[index].attribute)
            if row.verdict == "keep" and default:
                by, why = (
                    "Megatron's default",
                    "first_last_layers_bf16 is on, and 0 would switch it off",
                )
                rows[index] = replace(
                    row, new=default, verdict="override", by=by, why=why, replaces_own=False
                )
    return rows


def scheme_after_sync(config: PrecisionConfig, owners: Iterable[OwnerValues]) -> str | None:
    """Return the scaling scheme the run will have: the stated one, else an owner's own, else the config's default."""
    field = "fp8_recipe" if config.fp8 else "fp4_recipe"
    if scheme_of(config) is not None and not is_stated(config, field):
        for owner in owners:
            if owner.has(field) and owner.is_own(field) and owner.own(field) is not None:
                own = owner.own(field)
                return str(getattr(own, "value", own))
    return scheme_of(config)


def _one_answer(rows: list[SyncRow]) -> list[SyncRow]:
    """Return the rows with one owner's own value given to the other owner of the setting, where the recipe has none.

    Where both owners have a value of their own, both stay: if they
    differ, `disagreements` names them.
    """
    answered = {(row.owner, row.attribute): row for row in rows}
    given = dict(answered)
    for place, other in (
        places for pair in PAIRS for places in ((pair.one, pair.two), (pair.two, pair.one))
    ):
        kept, row = given.get(place), given.get(other)
        if kept is None or row is None or kept.verdict != "keep" or same(kept.new, row.new):
            continue
        if (
            row.by == "default" and row.verdict != "absent"
        ):  # set from the config's default, so that it is open
            why = f"as {place[0]}.{place[1]}, which has a value of its own that the recipe does not state"
            verdict = "agree" if same(row.old, kept.new) else "derive"
            answered[other] = replace(
                row, new=kept.new, verdict=verdict, by=place[0], why=why, replaces_own=False
            )
    return list(answered.values())


def under_fsdp(owners: Mapping[str, OwnerValues]) -> bool:
    """Return whether Megatron-FSDP shards the run."""
    ddp = owners.get("ddp")
    return ddp is not None and ddp.value("use_megatron_fsdp") is True


def sharding_rows(owners: Mapping[str, OwnerValues]) -> list[SyncRow]:
    """Return a row for each switch that is off in one of optimizer and DDP and on in the other, or needed by FSDP."""
    if not {"optimizer", "ddp"} <= owners.keys():
        return []
    rows = []
    for role, name, why in off_switches(lambda role, name: owners[role].value(name)):
        by = "ddp" if role == "optimizer" or under_fsdp(owners) else "optimizer"
        rows.append(SyncRow(owner=role, attribute=name, old=False, new=True, by=by, why=why))
    return rows
