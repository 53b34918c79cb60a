"""`plan_sync`: the value of each attribute of the owners after a sync, with the verdict and the reason.

    rows = plan(config, [Owner("model", model).read(), Owner("ddp", ddp).read()])

The plan has a row for each route: the owner's value, the recipe's value, and the verdict. It is
pure: nothing is written. Four steps make it:

1. each row is decided by itself, by the rule of its route;
2. layers that are kept in high precision get counts that do not switch them off;
3. a setting that two owners hold gets one answer;
4. the last plan before a run resolves the settings that sharding decides.

Megatron Bridge's runtime resolves the fourth before a run, not in `setup` (0.6.2,
training/config.py, `_validate_and_apply_megatron_fsdp_configs`,
`_validate_and_sync_distributed_optimizer_settings`): the gradient buffer is not reused under
Megatron-FSDP, and a switch that is on in one of optimizer and DDP is on in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.precision.config import FIELDS, PrecisionConfig
from bridge.precision.fields import LAYER_COUNTS
from bridge.precision.mode import get_mode, get_scheme
from bridge.precision.statements import (
    get_field_value,
    get_source,
    is_reset_to_none,
    is_stated,
    list_field_names,
)
from bridge.rules.facts.off_switches import find_off_switches
from bridge.rules.inert import GRAD_BUFFER_REUSE
from bridge.rules.sync_row import SyncRow, Verdict
from bridge.sync.module_recipe import build_module_recipe
from bridge.sync.owner import OwnerValues, is_same_value
from bridge.sync.routes import CLASS_DEFAULT, OLDEST_VERSION, OWNER_CLASS_NAMES, ROUTES, Route
from bridge.target.fields import FUSED_ADAM_RECIPES, SHARED_SETTINGS

SCHEME_FIELDS = ("fp8_recipe", "fp4_recipe")
"""Fields that belong to the mode: an owner's own value of them never stays."""
NAN_CHECK_BY_OWNER = {"ddp": "check_for_nan_in_grad", "train": "check_for_nan_in_loss"}
"""Role -> its check that ends a run at the first NaN."""


def plan_sync(
    config: PrecisionConfig,
    owners: Sequence[OwnerValues],
    *,
    keep_owner_values: bool = False,
    is_last: bool = False,
) -> list[SyncRow]:
    """Return a row for each field of the precision in each owner.

    Args:
        config: The precision that is written.
        owners: The configs that it is written into.
        keep_owner_values: An owner's own value stays where it differs from a stated value.
        is_last: The run begins after this sync, so the settings that sharding decides are resolved.
    """
    rows: list[SyncRow] = []
    scheme = get_scheme_after_sync(config, owners)
    for owner in owners:
        for route in _collect_routes(owner, config):
            decision = _Decision(config=config, owner=owner, route=route)
            is_active = _is_active(config, route, scheme)
            rows.append(
                _make_row(decision, is_active=is_active, keep_owner_values=keep_owner_values)
            )
        rows.extend(_decide_nan_check(config, owner))
    rows = _align_paired_settings(_restore_default_counts(rows, owners))
    if not is_last:
        return rows
    by_role = {owner.role: owner for owner in owners}
    if is_under_megatron_fsdp(by_role):
        rows = _turn_off_buffer_reuse(rows, by_role)
    return [*rows, *make_sharding_rows(by_role)]


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
        return bool(get_field_value(config, route.field) != route.neutral)
    return False


def _turn_off_buffer_reuse(
    rows: Iterable[SyncRow], owners: Mapping[str, OwnerValues]
) -> list[SyncRow]:
    """Return the rows of a run under Megatron-FSDP, which does not reuse the gradient buffer."""
    resolved = []
    for row in rows:
        if row.attribute == GRAD_BUFFER_REUSE and row.new:
            verdict: Verdict = "neutralise"
            if row.old is False:
                verdict = "agree"
            neutralised = replace(
                row,
                new=False,
                verdict=verdict,
                by="ddp",
                why="Megatron-FSDP does not implement it",
                is_stated=False,
                replaces_own=owners[row.owner].is_own(GRAD_BUFFER_REUSE),
            )
            resolved.append(neutralised)
        else:
            resolved.append(row)
    return resolved


def _collect_routes(owner: OwnerValues, config: PrecisionConfig) -> list[Route]:
    """Return the routes of an owner: those of its role, and one for each other field that it has by name."""
    if owner.role in OWNER_CLASS_NAMES:
        routes = _get_owner_routes(owner)
    else:
        routes = _get_renamed_routes(owner)
    known = {route.attribute for route in routes}
    for field in list_field_names(config):
        if field not in known and owner.has(field) and owner.role != "train":
            routes.append(_find_same_named_route(field, owner))
    return routes


def _get_owner_routes(owner: OwnerValues) -> list[Route]:
    routes = []
    for route in ROUTES:
        if route.owner == owner.role and route.attribute is not None:
            routes.append(route)
    return routes


def _get_renamed_routes(owner: OwnerValues) -> list[Route]:
    """Return the model's routes to attributes of another name, for an owner in no known role."""
    routes = []
    for route in ROUTES:
        is_renamed = route.attribute is not None and route.attribute != route.field
        if is_renamed and route.owner == "model" and owner.has(str(route.attribute)):
            routes.append(route)
    return routes


def _find_same_named_route(field: str, owner: OwnerValues) -> Route:
    """Return the route of a field to the attribute of the same name."""
    # A class without `fp8` that has `fp8_recipe` is an optimizer's, whatever its name.
    is_optimizers = field == "fp8_recipe" and not owner.has("fp8")
    for route in ROUTES:
        if field == route.field == route.attribute:
            if is_optimizers and route.owner != "optimizer":
                continue
            return route
    family = FIELDS[field].family
    return Route(field=field, owner=owner.role, attribute=field, family=family, rule="value")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decision:
    """One route applied to one owner: the owner's value, and the value of the precision."""

    config: PrecisionConfig
    owner: OwnerValues
    route: Route

    @property
    def attribute(self) -> str:
        """The name of the attribute in the owner."""
        return self.route.attribute or self.route.field

    @property
    def own(self) -> Any:
        """The value that the owner held before any sync."""
        return self.owner.own(self.attribute)

    @property
    def is_own(self) -> bool:
        """Whether the owner's value was set: it differs from Megatron's class default."""
        return self.owner.is_own(self.attribute)

    @property
    def is_stated(self) -> bool:
        """Whether the precision states the field."""
        return is_stated(self.config, self.route.field)

    @property
    def reading(self) -> Any:
        """The value of the precision as the owner takes it."""
        reading = get_field_value(self.config, self.route.field)
        if self.route.field != "modules":
            return reading
        if reading:
            return build_module_recipe(self.config, self.owner)
        return None

    def row(self, new: Any, verdict: Verdict, *, by: str, why: str) -> SyncRow:
        """Return the row of the attribute.

        Args:
            new: The value after the sync.
            verdict: As `SyncRow.verdict`.
            by: The source that decided.
            why: The reason.
        """
        return SyncRow(
            owner=self.owner.role,
            attribute=self.attribute,
            field=self.route.field,
            old=self.owner.value(self.attribute),
            new=new,
            verdict=verdict,
            by=by,
            why=why,
        )


def _make_row(decision: _Decision, *, is_active: bool, keep_owner_values: bool) -> SyncRow:
    """Return the row of an attribute, with a verdict about the owner's value."""
    owner, route = decision.owner, decision.route
    if not owner.has(decision.attribute):
        return _make_absent_row(decision)
    if is_active:
        row = _decide(decision, keep_owner_values=keep_owner_values)
    elif route.read_under is not None and _is_on(decision, route.read_under):
        row = _decide_fused_recipe(decision)
    else:
        row = _make_neutral_row(decision)
    verdict = row.verdict
    replaces_own = decision.is_own and not is_same_value(decision.own, row.new)
    if is_same_value(row.old, row.new):
        if verdict != "keep":
            verdict = "agree"
    elif replaces_own and (verdict == "set" or route.rule == "dtype"):
        verdict = "override"
    return replace(row, verdict=verdict, replaces_own=replaces_own)


def _make_absent_row(decision: _Decision) -> SyncRow:
    owner, route = decision.owner, decision.route
    why = f"{owner.class_name} has no such attribute"
    row = decision.row(None, "absent", by=get_source(decision.config, route.field), why=why)
    if owner.is_megatron and route.since != OLDEST_VERSION:
        return replace(row, since=route.since)
    return row


def _make_neutral_row(decision: _Decision) -> SyncRow:
    """Put an attribute out of action whose family or scheme is off."""
    route = decision.route
    neutral = route.neutral
    if neutral is CLASS_DEFAULT:
        reading = get_field_value(decision.config, route.field)
        neutral = decision.owner.defaults.get(decision.attribute, reading)
    if route.scheme:
        missing = f"{route.scheme} scaling"
    elif route.family == "low":
        missing = "FP8 or FP4"
    else:
        missing = (route.family or "").upper()
    return decision.row(neutral, "neutralise", by="mode", why=f"no {missing} in this run")


def _decide(decision: _Decision, *, keep_owner_values: bool) -> SyncRow:
    """Decide an attribute whose route acts."""
    config, route = decision.config, decision.route
    is_dtype = route.rule in ("dtype", "autocast dtype")
    if is_dtype and is_reset_to_none(config, route.field) and not decision.owner.is_megatron:
        return decision.row(None, "set", by="stated", why="stated as None")
    if not decision.is_stated:
        return _decide_unstated(decision)
    # A switch is the mode's: an owner's own value never stays.
    may_keep = keep_owner_values and route.rule != "switch" and route.field not in SCHEME_FIELDS
    return _decide_stated(decision, may_keep=may_keep)


def _decide_stated(decision: _Decision, *, may_keep: bool) -> SyncRow:
    own, reading = decision.own, decision.reading
    if may_keep and decision.is_own and not is_same_value(own, reading):
        why = f"its own value; the recipe says {reading!r}"
        return decision.row(own, "keep", by=decision.owner.role, why=why)
    source = get_source(decision.config, decision.route.field)
    row = decision.row(reading, "set", by=source, why="stated")
    return replace(row, is_stated=True)


def _decide_unstated(decision: _Decision) -> SyncRow:
    config, rule = decision.config, decision.route.rule
    own, role = decision.own, decision.owner.role
    mode = f"the mode is {get_mode(config)}"
    unstated = "the recipe does not state it"
    if rule == "dtype":
        return decision.row(get_mode(config), "derive", by="mode", why=mode)
    if rule == "autocast dtype":
        return _decide_autocast_dtype(decision)
    if rule == "switch":
        return decision.row(decision.reading, "set", by="mode", why=mode)
    if rule == "count" and decision.attribute in decision.owner.defaults:
        verdict: Verdict = "agree"
        if get_scheme(config):
            verdict = "keep"
        return decision.row(own, verdict, by=role, why=unstated)
    if rule == "stated" and not decision.is_own:
        return decision.row(own, "agree", by=role, why=unstated)
    if decision.is_own:
        why = "its own value, and the recipe does not state it"
        return decision.row(own, "keep", by=role, why=why)
    why = "not stated: the default of the config"
    return decision.row(decision.reading, "set", by="default", why=why)


def _is_on(decision: _Decision, switch: str) -> bool:
    """Return whether a switch of the owner is on after the sync."""
    if is_stated(decision.config, switch):
        return bool(get_field_value(decision.config, switch))
    return bool(decision.owner.value(switch))


def _decide_fused_recipe(decision: _Decision) -> SyncRow:
    """Decide `optimizer.fp8_recipe` in a run without FP8 whose precision-aware optimizer reads it.

    Under None and delayed the fused Adam holds the masters (of BF16 weights: 2 bytes of remainders
    a parameter). Under any other value Megatron holds them (FP32: 4 bytes). The owner's own value
    stays. Weights stored in FP4 can be updated from Megatron's masters alone, so that an owner
    without a value gets the one that the config reads.

    Source: megatron-core 0.16.1, 0.17.1, 0.18.2, 0.19.2 and Megatron-LM main of 2026-08-22,
    optimizer_config.py __post_init__, distrib_optimizer.py _build_model_and_main_param_groups.
    """
    own, role = decision.own, decision.owner.role
    reading = get_field_value(decision.config, "fp8_recipe")
    if own not in FUSED_ADAM_RECIPES:
        why = (
            "the precision-aware optimizer reads it: FP32 masters take 4 bytes a parameter, "
            "and None would change that"
        )
        return decision.row(own, "keep", by=role, why=why)
    stores_fp4 = decision.config.fp4 and get_field_value(decision.config, "fp4_param")
    if own is None and stores_fp4 and reading not in FUSED_ADAM_RECIPES:
        why = (
            "under None the first step fails on FP4 weights; "
            "Megatron's FP32 masters take 4 bytes a parameter"
        )
        return decision.row(reading, "derive", by="mode", why=why)
    why = "its own value, which the precision-aware optimizer reads"
    return decision.row(own, "agree", by=role, why=why)


def _decide_autocast_dtype(decision: _Decision) -> SyncRow:
    """Decide the dtype of autocast: the parameters' dtype, unless the owner's autocast has its own."""
    config, owner = decision.config, decision.owner
    is_on = config.autocast_enabled
    if not is_stated(config, "autocast_enabled") and owner.value("enable_autocast") is True:
        is_on = True
    if is_on and decision.is_own:
        why = "its own value, autocast is on"
        return decision.row(decision.own, "keep", by=owner.role, why=why)
    params_dtype = get_field_value(config, "params_dtype") or get_mode(config)
    return decision.row(params_dtype, "derive", by="mode", why="follows params_dtype")


def _decide_nan_check(config: PrecisionConfig, owner: OwnerValues) -> list[SyncRow]:
    """Return the row that lets the first overflows of a dynamic loss scale pass; nothing without a check.

    Megatron-LM's argument parser turns the checks off under FP16 with a dynamic scale. Configs
    built in Python meet a fatal NaN check at the first overflow (megatron-core 0.16.1
    param_and_grad_buffer.py, arguments.py).
    """
    attribute = NAN_CHECK_BY_OWNER.get(owner.role)
    if attribute is None or not owner.has(attribute):
        return []
    own, is_on = owner.own(attribute), owner.value(attribute)
    row = SyncRow(
        owner=owner.role,
        attribute=attribute,
        field="loss_scale",
        old=is_on,
        new=own,
        verdict="keep",
        by=owner.role,
        why="its own value: the loss scale is not dynamic",
    )
    if config.fp16 and config.loss_scale is None:
        verdict: Verdict = "derive"
        if is_on is False:
            verdict = "agree"
        why = "a dynamic loss scale overflows by design, and this check would end the run"
        return [replace(row, new=False, verdict=verdict, by="mode", why=why)]
    if is_same_value(is_on, own):
        return []
    return [row]


def _restore_default_counts(rows: list[SyncRow], owners: Iterable[OwnerValues]) -> list[SyncRow]:
    """Return the rows with Megatron's default counts where layers are kept in BF16 and both counts are 0.

    The zeros would switch the kept layers off.
    """
    corrected = list(rows)
    for owner in owners:
        index_of: dict[str, int] = {}
        for index, row in enumerate(rows):
            if row.owner == owner.role:
                index_of[row.attribute] = index
        switch = index_of.get("first_last_layers_bf16")
        if switch is None or rows[switch].new is not True:
            continue
        counts = [index_of[name] for name in LAYER_COUNTS if name in index_of]
        if any(rows[index].new != 0 for index in counts):
            continue
        for index in counts:
            row = rows[index]
            default = owner.defaults.get(row.attribute)
            if row.verdict == "keep" and default:
                corrected[index] = replace(
                    row,
                    new=default,
                    verdict="override",
                    by="Megatron's default",
                    why="first_last_layers_bf16 is on, and 0 would switch it off",
                    replaces_own=False,
                )
    return corrected


def get_scheme_after_sync(config: PrecisionConfig, owners: Iterable[OwnerValues]) -> str | None:
    """Return the scaling scheme of the run after the sync; None where nothing is quantised.

    It is the stated scheme, else an owner's own, else the config's default.
    """
    field = "fp4_recipe"
    if config.fp8:
        field = "fp8_recipe"
    if get_scheme(config) is not None and not is_stated(config, field):
        for owner in owners:
            if owner.has(field) and owner.is_own(field) and owner.own(field) is not None:
                own = owner.own(field)
                return str(getattr(own, "value", own))
    return get_scheme(config)


def _align_paired_settings(rows: list[SyncRow]) -> list[SyncRow]:
    """Return the rows with one answer to each setting that two owners hold.

    Where the recipe has none, the value that one owner keeps is written into the other. Where both
    owners keep a value, both stay, and a rule finds the difference.
    """
    row_of = {(row.owner, row.attribute): row for row in rows}
    answered = dict(row_of)
    for pair in SHARED_SETTINGS:
        for place, other in ((pair.first, pair.second), (pair.second, pair.first)):
            kept = row_of.get(place)
            row = row_of.get(other)
            if (
                kept is None
                or row is None
                or kept.verdict != "keep"
                or is_same_value(kept.new, row.new)
            ):
                continue
            # A row that is set from the config's default is open.
            if row.by == "default" and row.verdict != "absent":
                answered[other] = _follow_other_owner(row, kept)
    return list(answered.values())


def _follow_other_owner(row: SyncRow, kept: SyncRow) -> SyncRow:
    """Return the row of a setting with the value that another owner keeps."""
    verdict: Verdict = "derive"
    if is_same_value(row.old, kept.new):
        verdict = "agree"
    why = f"as {kept.path}, which has a value of its own that the recipe does not state"
    return replace(row, new=kept.new, verdict=verdict, by=kept.owner, why=why, replaces_own=False)


def is_under_megatron_fsdp(owners: Mapping[str, OwnerValues]) -> bool:
    """Return whether Megatron-FSDP shards the run."""
    ddp = owners.get("ddp")
    return ddp is not None and ddp.value("use_megatron_fsdp") is True


def make_sharding_rows(owners: Mapping[str, OwnerValues]) -> list[SyncRow]:
    """Return a row for each switch that is off in optimizer or DDP and has to be on.

    A switch has to be on where the other config has it on, and where Megatron-FSDP needs it.
    """
    if not {"optimizer", "ddp"} <= owners.keys():
        return []
    rows = []
    for role, name, why in find_off_switches(lambda role, name: owners[role].value(name)):
        by = "optimizer"
        if role == "optimizer" or is_under_megatron_fsdp(owners):
            by = "ddp"
        rows.append(SyncRow(owner=role, attribute=name, old=False, new=True, by=by, why=why))
    return rows
