"""`plan_sync`: the value of each attribute of the owners after a sync, with the verdict and the reason.

    rows = plan_sync(config, [Owner("model", model).read(), Owner("ddp", ddp).read()])

The plan has a row for each route: the owner's value, the value after the sync, and the verdict.
Planning writes nothing. It has four steps:

1. Each row is decided by itself, by the rule of its route.
2. If first and last layers stay in BF16 and both counts are 0, the counts get Megatron's defaults.
3. A setting that two owners have gets the same value in both.
4. The last plan before a run resolves the settings that sharding decides.

The fourth step follows Megatron Bridge, which takes it before a run and not in `setup`. The
gradient buffer is not reused under Megatron-FSDP. A switch that is on in the optimizer or in DDP is
turned on in both.

Source: Megatron Bridge 0.6.2, training/config.py, `_validate_and_apply_megatron_fsdp_configs` and
`_validate_and_sync_distributed_optimizer_settings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bridge.precision.mode import get_mode, get_scheme, is_family_on
from bridge.precision.precision_config import FIELDS, PrecisionConfig
from bridge.precision.stated_field import LAYER_COUNTS
from bridge.precision.statements import (
    get_field_value,
    get_source,
    is_reset_to_none,
    is_stated,
    list_field_names,
)
from bridge.rules.facts.off_switches import find_off_switches
from bridge.rules.inert_fields import GRAD_BUFFER_REUSE
from bridge.rules.sync_row import CONFIG_DEFAULT, MEGATRON_DEFAULT, MODE, Decider, SyncRow, Verdict
from bridge.sync.field_routes import CLASS_DEFAULT, OLDEST_VERSION, OWNER_CLASS_NAMES, ROUTES, Route
from bridge.sync.module_recipe import build_module_recipe
from bridge.sync.owner import OwnerValues, is_same_value
from bridge.target.fields import FUSED_ADAM_RECIPES, SHARED_SETTINGS

SCHEME_FIELDS = ("fp8_recipe", "fp4_recipe")
"""Fields of the scheme. The precision always decides them, also under `keep_owner_values`."""
NAN_CHECK_BY_OWNER = {"ddp": "check_for_nan_in_grad", "train": "check_for_nan_in_loss"}
"""Owner name -> its check that ends a run at the first NaN."""


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
        owners: The values of the configs that it is written into.
        keep_owner_values: Whether a value that was set in an owner stays if the precision states
            another value.
        is_last: Whether the run begins after this sync. If so, the settings that sharding decides
            are resolved.
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
    owners_by_name = {owner.name: owner for owner in owners}
    if is_under_megatron_fsdp(owners_by_name):
        rows = _turn_off_buffer_reuse(rows, owners_by_name)
    return [*rows, *make_sharding_rows(owners_by_name)]


def _is_active(config: PrecisionConfig, route: Route, scheme: str | None) -> bool:
    """Return whether the precision decides the value of a route.

    It does not if the route belongs to a family or a scheme that is off.
    """
    if is_family_on(config, route.family) and route.scheme in (None, scheme):
        return True
    if not is_stated(config, route.field):
        return route.rule == "stated"  # this rule leaves the owner's value as it is
    if route.is_harmless:
        return bool(get_field_value(config, route.field) != route.neutral)
    return False


def _turn_off_buffer_reuse(
    rows: Iterable[SyncRow], owners: Mapping[str, OwnerValues]
) -> list[SyncRow]:
    """Return the rows with the reuse of the gradient buffer off, as Megatron-FSDP needs it."""
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
                by=Decider("owner", "ddp"),
                why="Megatron-FSDP does not implement it",
                is_stated=False,
                replaces_set_value=owners[row.owner].is_set(GRAD_BUFFER_REUSE),
            )
            resolved.append(neutralised)
        else:
            resolved.append(row)
    return resolved


def _collect_routes(owner: OwnerValues, config: PrecisionConfig) -> list[Route]:
    """Return the routes of an owner.

    An owner that has further attributes with the names of fields gets a route for each of them.
    """
    if owner.name in OWNER_CLASS_NAMES:
        routes = _get_owner_routes(owner)
    else:
        routes = _get_renamed_routes(owner)
    attributes = {route.attribute for route in routes}
    for field in list_field_names(config):
        if field not in attributes and owner.has(field) and owner.name != "train":
            routes.append(_find_same_named_route(field, owner))
    return routes


def _get_owner_routes(owner: OwnerValues) -> list[Route]:
    routes = []
    for route in ROUTES:
        if route.owner == owner.name and route.attribute is not None:
            routes.append(route)
    return routes


def _get_renamed_routes(owner: OwnerValues) -> list[Route]:
    """Return the model's routes to attributes with another name than the field.

    They apply to an owner of an unknown class that has such an attribute.
    """
    routes = []
    for route in ROUTES:
        is_renamed = route.attribute is not None and route.attribute != route.field
        if is_renamed and route.owner == "model" and owner.has(str(route.attribute)):
            routes.append(route)
    return routes


def _find_same_named_route(field: str, owner: OwnerValues) -> Route:
    """Return the route of a field to the attribute of the same name."""
    # `fp8_recipe` has routes to the model and to the optimizer. An object that has `fp8_recipe`
    # but not `fp8` is an optimizer config, whatever the name of its class.
    needs_optimizer_route = field == "fp8_recipe" and not owner.has("fp8")
    for route in ROUTES:
        if field == route.field == route.attribute:
            if needs_optimizer_route and route.owner != "optimizer":
                continue
            return route
    family = FIELDS[field].family
    return Route(field=field, owner=owner.name, attribute=field, family=family, rule="value")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decision:
    """One route applied to one owner, with the owner's value and the value of the precision."""

    config: PrecisionConfig
    owner: OwnerValues
    route: Route

    @property
    def attribute(self) -> str:
        """The name of the attribute in the owner."""
        return self.route.attribute or self.route.field

    @property
    def value_before_sync(self) -> Any:
        """The value that the owner had before the first sync."""
        return self.owner.value_before_sync(self.attribute)

    @property
    def is_set(self) -> bool:
        """Whether somebody set the owner's value: it differs from Megatron's class default."""
        return self.owner.is_set(self.attribute)

    @property
    def by_owner(self) -> Decider:
        """The owner as the decider of a row."""
        return Decider("owner", self.owner.name)

    @property
    def is_stated(self) -> bool:
        """Whether the precision states the field."""
        return is_stated(self.config, self.route.field)

    @property
    def recipe_value(self) -> Any:
        """The value of the precision in the form that the owner's attribute has."""
        value = get_field_value(self.config, self.route.field)
        if self.route.field != "modules":
            return value
        if value:
            return build_module_recipe(self.config, self.owner)
        return None

    def row(self, new: Any, verdict: Verdict, *, by: Decider, why: str) -> SyncRow:
        """Return the row of the attribute.

        Args:
            new: The value after the sync.
            verdict: As `SyncRow.verdict`.
            by: The decider of the new value.
            why: The reason.
        """
        return SyncRow(
            owner=self.owner.name,
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
    is_changed = not is_same_value(decision.value_before_sync, row.new)
    replaces_set_value = decision.is_set and is_changed
    if is_same_value(row.old, row.new):
        if verdict != "keep":
            verdict = "agree"
    elif replaces_set_value and (verdict == "set" or route.rule == "dtype"):
        verdict = "override"
    if (verdict, replaces_set_value) == (row.verdict, row.replaces_set_value):
        return row
    return replace(row, verdict=verdict, replaces_set_value=replaces_set_value)


def _make_absent_row(decision: _Decision) -> SyncRow:
    owner, route = decision.owner, decision.route
    why = f"{owner.class_name} has no such attribute"
    source = Decider("source", get_source(decision.config, route.field))
    row = decision.row(None, "absent", by=source, why=why)
    if owner.is_megatron and route.since != OLDEST_VERSION:
        return replace(row, since=route.since)
    return row


def _make_neutral_row(decision: _Decision) -> SyncRow:
    """Return the row of an attribute whose family or scheme is off, with a value without effect."""
    route = decision.route
    neutral = route.neutral
    if neutral is CLASS_DEFAULT:
        recipe_value = get_field_value(decision.config, route.field)
        neutral = decision.owner.defaults.get(decision.attribute, recipe_value)
    if route.scheme:
        missing = f"{route.scheme} scaling"
    elif route.family == "low":
        missing = "FP8 or FP4"
    else:
        missing = (route.family or "").upper()
    return decision.row(neutral, "neutralise", by=MODE, why=f"no {missing} in this run")


def _decide(decision: _Decision, *, keep_owner_values: bool) -> SyncRow:
    """Return the row of an attribute whose value the precision decides."""
    config, route = decision.config, decision.route
    is_dtype = route.rule in ("dtype", "autocast dtype")
    if is_dtype and is_reset_to_none(config, route.field) and not decision.owner.is_megatron:
        return decision.row(None, "set", by=Decider("source", "stated"), why="stated as None")
    if not decision.is_stated:
        return _decide_unstated(decision)
    # The precision always decides the mode and the scheme.
    may_keep = keep_owner_values and route.rule != "switch" and route.field not in SCHEME_FIELDS
    return _decide_stated(decision, may_keep=may_keep)


def _decide_stated(decision: _Decision, *, may_keep: bool) -> SyncRow:
    value_before, recipe_value = decision.value_before_sync, decision.recipe_value
    if may_keep and decision.is_set and not is_same_value(value_before, recipe_value):
        why = f"its own value; the recipe says {recipe_value!r}"
        return decision.row(value_before, "keep", by=decision.by_owner, why=why)
    source = Decider("source", get_source(decision.config, decision.route.field))
    row = decision.row(recipe_value, "set", by=source, why="stated")
    return replace(row, is_stated=True)


def _decide_unstated(decision: _Decision) -> SyncRow:
    config, rule = decision.config, decision.route.rule
    value_before = decision.value_before_sync
    mode = f"the mode is {get_mode(config)}"
    unstated = "the recipe does not state it"
    if rule == "dtype":
        return decision.row(get_mode(config), "derive", by=MODE, why=mode)
    if rule == "autocast dtype":
        return _decide_autocast_dtype(decision)
    if rule == "switch":
        return decision.row(decision.recipe_value, "set", by=MODE, why=mode)
    if rule == "count" and decision.attribute in decision.owner.defaults:
        verdict: Verdict = "agree"
        if get_scheme(config):
            verdict = "keep"
        return decision.row(value_before, verdict, by=decision.by_owner, why=unstated)
    if rule == "stated" and not decision.is_set:
        return decision.row(value_before, "agree", by=decision.by_owner, why=unstated)
    if decision.is_set:
        why = "its own value, and the recipe does not state it"
        return decision.row(value_before, "keep", by=decision.by_owner, why=why)
    why = "not stated: the default of the config"
    return decision.row(decision.recipe_value, "set", by=CONFIG_DEFAULT, why=why)


def _is_on(decision: _Decision, switch: str) -> bool:
    """Return whether a switch of the owner is on after the sync."""
    if is_stated(decision.config, switch):
        return bool(get_field_value(decision.config, switch))
    return bool(decision.owner.value(switch))


def _decide_fused_recipe(decision: _Decision) -> SyncRow:
    """Decide `optimizer.fp8_recipe` in a run without FP8 if the precision-aware optimizer reads it.

    The value decides which code keeps the master weights. Under None and delayed the fused Adam
    keeps remainders of 2 bytes a parameter for BF16 weights. Under any other value Megatron keeps
    FP32 masters of 4 bytes a parameter. The owner's value stays, with one exception. Only
    Megatron's masters can update weights stored in FP4. So in a run with FP4 weights an owner
    without a value gets the value of the precision.

    Source: megatron-core 0.16.1, 0.17.1, 0.18.2, 0.19.2 and Megatron-LM main of 2026-08-22,
    optimizer_config.py __post_init__, distrib_optimizer.py _build_model_and_main_param_groups.
    """
    value_before = decision.value_before_sync
    recipe_value = get_field_value(decision.config, "fp8_recipe")
    if value_before not in FUSED_ADAM_RECIPES:
        why = (
            "the precision-aware optimizer reads it: FP32 masters take 4 bytes a parameter, "
            "and None would change that"
        )
        return decision.row(value_before, "keep", by=decision.by_owner, why=why)
    stores_fp4 = decision.config.fp4 and get_field_value(decision.config, "fp4_param")
    if value_before is None and stores_fp4 and recipe_value not in FUSED_ADAM_RECIPES:
        why = (
            "under None the first step fails on FP4 weights; "
            "Megatron's FP32 masters take 4 bytes a parameter"
        )
        return decision.row(recipe_value, "derive", by=MODE, why=why)
    why = "its own value, which the precision-aware optimizer reads"
    return decision.row(value_before, "agree", by=decision.by_owner, why=why)


def _decide_autocast_dtype(decision: _Decision) -> SyncRow:
    """Decide the dtype of autocast.

    It follows `params_dtype`, unless autocast is on and the owner has a dtype that somebody set.
    """
    config, owner = decision.config, decision.owner
    is_on = config.autocast_enabled
    if not is_stated(config, "autocast_enabled") and owner.value("enable_autocast") is True:
        is_on = True
    if is_on and decision.is_set:
        why = "its own value, autocast is on"
        return decision.row(
            decision.value_before_sync, "keep", by=Decider("owner", owner.name), why=why
        )
    params_dtype = get_field_value(config, "params_dtype") or get_mode(config)
    return decision.row(params_dtype, "derive", by=MODE, why="follows params_dtype")


def _decide_nan_check(config: PrecisionConfig, owner: OwnerValues) -> list[SyncRow]:
    """Return the row that turns the owner's NaN check off under a dynamic loss scale.

    The first steps under a dynamic scale overflow by design. Megatron-LM's argument parser
    therefore turns the checks off under FP16. Configs built in Python do not pass through the
    parser, and the check would end the run at the first overflow. A later sync to a precision
    without a dynamic scale restores the earlier value.

    Returns:
        A list with the row. It is empty if the owner has no such check, or if the check is not
        changed.

    Source: megatron-core 0.16.1, param_and_grad_buffer.py; Megatron-LM, training/arguments.py.
    """
    attribute = NAN_CHECK_BY_OWNER.get(owner.name)
    if attribute is None or not owner.has(attribute):
        return []
    value_before, is_on = owner.value_before_sync(attribute), owner.value(attribute)
    row = SyncRow(
        owner=owner.name,
        attribute=attribute,
        field="loss_scale",
        old=is_on,
        new=value_before,
        verdict="keep",
        by=Decider("owner", owner.name),
        why="its own value: the loss scale is not dynamic",
    )
    if config.fp16 and config.loss_scale is None:
        verdict: Verdict = "derive"
        if is_on is False:
            verdict = "agree"
        why = "a dynamic loss scale overflows by design, and this check would end the run"
        return [replace(row, new=False, verdict=verdict, by=MODE, why=why)]
    if is_same_value(is_on, value_before):
        return []
    return [row]


def _restore_default_counts(rows: list[SyncRow], owners: Iterable[OwnerValues]) -> list[SyncRow]:
    """Return the rows with Megatron's default counts of kept layers, if both counts are 0.

    `first_last_layers_bf16` has no effect if both counts are 0.
    """
    corrected = list(rows)
    for owner in owners:
        index_of: dict[str, int] = {}
        for index, row in enumerate(rows):
            if row.owner == owner.name:
                index_of[row.attribute] = index
        switch_index = index_of.get("first_last_layers_bf16")
        if switch_index is None or rows[switch_index].new is not True:
            continue
        count_indices = [index_of[name] for name in LAYER_COUNTS if name in index_of]
        if any(rows[index].new != 0 for index in count_indices):
            continue
        for index in count_indices:
            row = rows[index]
            default = owner.defaults.get(row.attribute)
            if row.verdict == "keep" and default:
                corrected[index] = replace(
                    row,
                    new=default,
                    verdict="override",
                    by=MEGATRON_DEFAULT,
                    why="first_last_layers_bf16 is on, and 0 would switch it off",
                    replaces_set_value=False,
                )
    return corrected


def get_scheme_after_sync(config: PrecisionConfig, owners: Iterable[OwnerValues]) -> str | None:
    """Return the scaling scheme of the run after the sync, or None if nothing is quantised.

    It is the stated scheme, or else a scheme that was set in an owner, or else the default.
    """
    field = "fp4_recipe"
    if config.fp8:
        field = "fp8_recipe"
    if get_scheme(config) is not None and not is_stated(config, field):
        for owner in owners:
            scheme = owner.value_before_sync(field)
            if owner.is_set(field) and scheme is not None:
                return str(getattr(scheme, "value", scheme))
    return get_scheme(config)


def _align_paired_settings(rows: list[SyncRow]) -> list[SyncRow]:
    """Return the rows with the same value in both owners of a setting.

    If the precision does not state the setting and one owner keeps its value, the value is written
    into the other owner. If both owners keep a value, both values stay, and a rule reports the
    difference.
    """
    row_by_path = {(row.owner, row.attribute): row for row in rows}
    aligned = dict(row_by_path)
    for pair in SHARED_SETTINGS:
        for kept_path, other_path in ((pair.first, pair.second), (pair.second, pair.first)):
            kept = row_by_path.get(kept_path)
            other = row_by_path.get(other_path)
            if kept is None or other is None or kept.verdict != "keep":
                continue
            if other.by.kind == "default" and not is_same_value(kept.new, other.new):
                aligned[other_path] = _follow_other_owner(other, kept)
    return list(aligned.values())


def _follow_other_owner(row: SyncRow, kept: SyncRow) -> SyncRow:
    """Return a row with the value that another owner keeps for the same setting."""
    verdict: Verdict = "derive"
    if is_same_value(row.old, kept.new):
        verdict = "agree"
    why = f"as {kept.path}, which has a value of its own that the recipe does not state"
    return replace(
        row,
        new=kept.new,
        verdict=verdict,
        by=Decider("owner", kept.owner),
        why=why,
        replaces_set_value=False,
    )


def is_under_megatron_fsdp(owners: Mapping[str, OwnerValues]) -> bool:
    """Return whether Megatron-FSDP shards the run."""
    ddp = owners.get("ddp")
    return ddp is not None and ddp.value("use_megatron_fsdp") is True


def make_sharding_rows(owners: Mapping[str, OwnerValues]) -> list[SyncRow]:
    """Return a row for each switch that is off in optimizer or DDP and has to be on.

    A switch has to be on if the other owner has it on, or if Megatron-FSDP needs it.
    """
    if not {"optimizer", "ddp"} <= owners.keys():
        return []
    rows = []
    for switch in find_off_switches(lambda owner, name: owners[owner].value(name)):
        decider = Decider("owner", "optimizer")
        if switch.is_for_fsdp:
            decider = Decider("owner", "ddp", setting="ddp.use_megatron_fsdp")
        elif switch.owner_name == "optimizer" or is_under_megatron_fsdp(owners):
            decider = Decider("owner", "ddp")
        row = SyncRow(
            owner=switch.owner_name,
            attribute=switch.attribute,
            old=False,
            new=True,
            by=decider,
            why=switch.why,
        )
        rows.append(row)
    return rows
