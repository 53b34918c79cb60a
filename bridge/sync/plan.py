"""The plan: for each route, what the owner holds, what the recipe says, and the verdict. Pure: nothing is written.

A setting that two owners hold gets one answer. Megatron Bridge's runtime resolves two settings of sharding before a
run, not in `setup` (0.6.2, training/config.py, `_validate_and_apply_megatron_fsdp_configs` and
`_validate_and_sync_distributed_optimizer_settings`), and so does the last plan before a run: the gradient buffer is not
reused under Megatron-FSDP, and a switch that is on in one of optimizer and DDP is on in both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from bridge.precision.config import FIELDS, PrecisionConfig
from bridge.precision.fields import LAYER_COUNTS
from bridge.rules.fields import PAIRS, off_switches
from bridge.rules.inert import BUFFER
from bridge.sync.module_recipe import module_recipe
from bridge.sync.owner import OwnerValues, same
from bridge.sync.report import SyncRow
from bridge.sync.routes import CLASS_DEFAULT, FIRST, OWNERS, ROUTES, Route

SCHEME_FIELDS = ("fp8_recipe", "fp4_recipe")
"""Belong to the mode: kept, they would leave a run that is neither the owner's nor the recipe's."""


_BY_ROLE = {role: tuple(r for r in ROUTES if r.owner == role and r.attribute is not None) for role in OWNERS}


def plan(
    config: PrecisionConfig, owners: Sequence[OwnerValues], *, keep_own: bool = False, is_last: bool = False
) -> list[SyncRow]:
    """Return one row per precision field of every owner.

    With `keep_own` an owner's own value stays where it differs from a stated one; with `is_last` the settings that
    sharding decides are resolved too.
    """
    rows: list[SyncRow] = []
    scheme = scheme_of(config, owners)
    on = {None: True, "fp8": config.fp8 is not None, "fp4": config.fp4 is not None}
    on["low"] = on["fp8"] or on["fp4"]
    for owner in owners:
        for route in _routes_for(owner, config):
            is_active = on[route.family] and route.scheme in (None, scheme)
            if not config.is_stated(route.field):
                is_active |= route.rule == "stated"  # the owner's value is not touched
            elif route.is_harmless:
                is_active |= config.reading(route.field) != route.neutral
            rows.append(_row(config, owner, route, is_active=is_active, keep_own=keep_own))
        rows.extend(_nan_check(config, owner))
    rows = _one_answer(_counts_that_act(rows, owners))
    by_role = {owner.role: owner for owner in owners}
    return [*_without_reuse_under_fsdp(rows, by_role), *sharding_rows(by_role)] if is_last else rows


def _routes_for(owner: OwnerValues, config: PrecisionConfig) -> list[Route]:
    """Return the rows of the owner's role, and same-named fields that its class has beyond them."""
    routes = list(_BY_ROLE.get(owner.role, ()))
    if owner.role not in OWNERS:
        renamed = [r for r in ROUTES if r.attribute not in (None, r.field) and r.owner == "model"]
        routes = [route for route in renamed if route.attribute is not None and owner.has(route.attribute)]
    known = {route.attribute for route in routes}
    for field in config.field_names():
        if field not in known and owner.has(field) and owner.role != "train":
            routes.append(_same_named(field, owner))
    return routes


def _same_named(field: str, owner: OwnerValues) -> Route:
    # A class without `fp8` that has `fp8_recipe` is an optimizer's, whatever its name.
    role = "optimizer" if field == "fp8_recipe" and not owner.has("fp8") else None
    for route in ROUTES:
        if field == route.field == route.attribute and role in (None, route.owner):
            return route
    return Route(field=field, owner=owner.role, attribute=field, family=FIELDS[field].family, rule="value")


class Decision(NamedTuple):
    """The value of one attribute of an owner after the sync."""

    value: Any
    verdict: str
    by: str
    """The source that decided it."""
    why: str


def _row(config: PrecisionConfig, owner: OwnerValues, route: Route, *, is_active: bool, keep_own: bool) -> SyncRow:
    attribute = route.attribute or route.field
    old, since, replaces_own = owner.value(attribute), None, False
    if not owner.has(attribute):
        new = None
        verdict, by, why = "absent", config.source_of(route.field), f"{owner.class_name} has no such attribute"
        since = route.since if owner.is_megatron and route.since != FIRST else None
    else:
        if is_active:
            new, verdict, by, why = _decide(config, owner, route, attribute, keep_own=keep_own)
        else:
            new, verdict, by, why = _put_out_of_action(config, owner, route, attribute)
        is_same = same(old, new)
        if is_same and verdict != "keep":
            verdict = "agree"
        replaces_own = owner.is_own(attribute) and not same(owner.own(attribute), new)
        if replaces_own and not is_same and (verdict == "set" or route.rule == "dtype"):
            verdict = "override"
    return SyncRow(
        owner=owner.role,
        attribute=attribute,
        field=route.field,
        old=old,
        new=new,
        verdict=verdict,
        by=by,
        why=why,
        replaces_own=replaces_own,
        since=since,
    )


def _decide(config: PrecisionConfig, owner: OwnerValues, route: Route, attribute: str, *, keep_own: bool) -> Decision:
    """Return the decision about an attribute whose field acts in this run."""
    stated, source = config.is_stated(route.field), config.source_of(route.field)
    own = owner.own(attribute)
    reading = config.reading(route.field)
    if route.field == "modules":
        reading = module_recipe(config, owner) if reading else None
    mode = f"the mode is {config.mode}"
    if route.rule in ("dtype", "autocast dtype") and config.is_left_open(route.field) and not owner.is_megatron:
        return Decision(None, "set", "stated", "stated as None")
    if route.rule == "dtype" and not stated:
        return Decision(config.mode, "derive", "mode", mode)
    if route.rule == "autocast dtype" and not stated:
        return _autocast_dtype(config, owner)
    if route.rule == "switch":
        return Decision(reading, "set", source if stated else "mode", "stated" if stated else mode)
    if stated:
        is_kept = keep_own and route.field not in SCHEME_FIELDS and owner.is_own(attribute) and not same(own, reading)
        if is_kept:
            return Decision(own, "keep", owner.role, f"its own value; the recipe says {reading!r}")
        return Decision(reading, "set", source, "stated")
    if route.rule == "count" and attribute in owner.defaults:
        verdict = "keep" if config.scheme else "agree"
        return Decision(own, verdict, owner.role, "the recipe does not state it")
    if route.rule == "stated" and not owner.is_own(attribute):
        return Decision(own, "agree", owner.role, "the recipe does not state it")
    if owner.is_own(attribute):
        return Decision(own, "keep", owner.role, "its own value, and the recipe does not state it")
    return Decision(reading, "set", "default", "not stated: the default of the config")


def _put_out_of_action(config: PrecisionConfig, owner: OwnerValues, route: Route, attribute: str) -> Decision:
    """Return the decision about an attribute whose family or scheme is off in this run."""
    what = f"{route.scheme} scaling" if route.scheme else {"low": "FP8 or FP4"}.get(route.family or "", "")
    why = f"no {what or (route.family or '').upper()} in this run"
    neutral = route.neutral
    if neutral is CLASS_DEFAULT:
        neutral = owner.defaults.get(attribute, config.reading(route.field))
    return Decision(neutral, "neutralise", "mode", why)


def _autocast_dtype(config: PrecisionConfig, owner: OwnerValues) -> Decision:
    """Decide: params_dtype as it will be, unless autocast is on with a dtype of the owner's own."""
    is_on = config.autocast_enabled or (
        not config.is_stated("autocast_enabled") and owner.value("enable_autocast") is True
    )
    if is_on and owner.is_own("autocast_dtype"):
        return Decision(owner.own("autocast_dtype"), "keep", owner.role, "its own value, autocast is on")
    dtype = config.reading("params_dtype") or config.mode
    return Decision(dtype, "derive", "mode", "follows params_dtype")


def _nan_check(config: PrecisionConfig, owner: OwnerValues) -> list[SyncRow]:
    """Return the row that lets the first overflows of a dynamic loss scale pass.

    Megatron-LM's argument parser turns the checks off under FP16 with a dynamic scale; configs built in Python
    meet a fatal NaN check at the first overflow (megatron-core 0.16.1 param_and_grad_buffer.py, arguments.py).
    """
    attribute = {"ddp": "check_for_nan_in_grad", "train": "check_for_nan_in_loss"}.get(owner.role)
    if attribute is None or not owner.has(attribute):
        return []
    old, own = owner.value(attribute), owner.own(attribute)
    dynamic = config.fp16 and config.loss_scale is None
    if not dynamic and same(old, own):
        return []
    row = SyncRow(
        owner=owner.role,
        attribute=attribute,
        field="loss_scale",
        old=old,
        new=own,
        verdict="keep",
        by=owner.role,
        why="its own value: the loss scale is not dynamic",
    )
    if not dynamic:
        return [row]
    why = "a dynamic loss scale overflows by design, and this check would end the run"
    verdict = "agree" if old is False else "derive"
    return [replace(row, new=False, verdict=verdict, by="mode", why=why)]


def _counts_that_act(rows: list[SyncRow], owners: Iterable[OwnerValues]) -> list[SyncRow]:
    """Give layers kept in BF16 Megatron's own counts where the owner holds 0 and 0, which would switch them off."""
    for owner in owners:
        mine = {row.attribute: index for index, row in enumerate(rows) if row.owner == owner.role}
        flag = mine.get("first_last_layers_bf16")
        if (
            flag is None
            or rows[flag].new is not True
            or any(rows[mine[name]].new != 0 for name in LAYER_COUNTS if name in mine)
        ):
            continue
        for name in LAYER_COUNTS:
            row = rows[mine[name]] if name in mine else None
            default = owner.defaults.get(name)
            if row is not None and row.verdict == "keep" and default:
                why = "first_last_layers_bf16 is on, and 0 would switch it off"
                rows[mine[name]] = replace(
                    row, new=default, verdict="override", by="Megatron's default", why=why, replaces_own=False
                )
    return rows


def scheme_of(config: PrecisionConfig, owners: Iterable[OwnerValues]) -> str | None:
    """Return the scaling scheme the run will have: the stated one, else an owner's own, else the config's default."""
    field = "fp8_recipe" if config.fp8 else "fp4_recipe"
    if config.scheme is not None and not config.is_stated(field):
        for owner in owners:
            if owner.has(field) and owner.is_own(field) and owner.own(field) is not None:
                own = owner.own(field)
                return str(getattr(own, "value", own))
    return config.scheme


def _one_answer(rows: list[SyncRow]) -> list[SyncRow]:
    """Return the rows with one owner's own value given to the other owner of the setting, where the recipe has none.

    Where both owners have a value of their own, both stay: if they differ, `disagreements` names them.
    """
    answered = list(rows)
    at = {(row.owner, row.attribute): index for index, row in enumerate(rows)}
    for pair in PAIRS:
        for place, other in ((pair.one, pair.two), (pair.two, pair.one)):
            if place not in at or other not in at:
                continue
            kept, row = rows[at[place]], rows[at[other]]
            # A row that was set from the config's default is open.
            is_open = row.by == "default" and row.verdict != "absent"
            if kept.verdict != "keep" or not is_open or same(kept.new, row.new):
                continue
            why = f"as {place[0]}.{place[1]}, which has a value of its own that the recipe does not state"
            verdict = "agree" if same(row.old, kept.new) else "derive"
            answered[at[other]] = replace(row, new=kept.new, verdict=verdict, by=place[0], why=why, replaces_own=False)
    return answered


def under_fsdp(owners: Mapping[str, OwnerValues]) -> bool:
    """Return whether Megatron-FSDP shards the run."""
    ddp = owners.get("ddp")
    return ddp is not None and ddp.value("use_megatron_fsdp") is True


def _without_reuse_under_fsdp(rows: list[SyncRow], owners: Mapping[str, OwnerValues]) -> list[SyncRow]:
    """Return the rows with the reuse of the gradient buffer off under Megatron-FSDP, which has no such buffer."""
    if not under_fsdp(owners):
        return rows
    return [_off_under_fsdp(row, owners[row.owner]) if row.attribute == BUFFER and row.new else row for row in rows]


def _off_under_fsdp(row: SyncRow, owner: OwnerValues) -> SyncRow:
    verdict = "agree" if row.old is False else "neutralise"
    why = "Megatron-FSDP does not implement it"
    return replace(row, new=False, verdict=verdict, by="ddp", why=why, replaces_own=owner.is_own(BUFFER))


def sharding_rows(owners: Mapping[str, OwnerValues]) -> list[SyncRow]:
    """Return a row for each switch that is off in one of optimizer and DDP and on in the other, or needed by FSDP."""
    if not {"optimizer", "ddp"} <= owners.keys():
        return []
    return [
        SyncRow.derived(
            (role, name), (False, True), by="ddp" if role == "optimizer" or under_fsdp(owners) else "optimizer", why=why
        )
        for role, name, why in off_switches(lambda role, name: owners[role].value(name))
    ]
