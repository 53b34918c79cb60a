"""What the synchroniser would write, computed on plain values: no torch, no Megatron, a few microseconds.

The rows and the rules are those of `bridge.sync.routes.ROUTES`; a test holds the outcome against a real sync of
Megatron's own classes, for every recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.precision.config import FIELD_DEFAULTS
from bridge.precision.fields import LAYER_COUNTS
from bridge.rules.fields import DEFAULTS
from bridge.sync.routes import CLASS_DEFAULT, ROUTES

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["NAMES_OF", "Replaced", "mode_of", "settle"]


NAMES_OF = {
    f"{family}_{name}": (f"{family}_param_gather", f"{family}_param")
    for family in ("fp8", "fp4")
    for name in ("param", "param_gather")
}
"""Field with two names -> both, the one that is read where they differ first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replaced:
    """A value that somebody had given an owner and that the recipe replaces."""

    role: str
    attribute: str
    field: str
    own: Any
    """The owner's own value."""
    new: Any
    """The recipe's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A route, with everything looked up once."""

    role: str
    attribute: str
    field: str
    names: tuple[str, ...]
    """The names it can be stated by; the first that is stated is read."""
    rule: str
    family: str | None
    scheme: str | None
    neutral: Any
    reading: Any
    default: Any


_ROWS = tuple(
    _Row(
        role=route.owner,
        attribute=route.attribute,
        field=route.field,
        names=NAMES_OF.get(route.field, (route.field,)),
        rule=route.rule,
        family=route.family,
        scheme=route.scheme,
        neutral=DEFAULTS[route.owner][route.attribute] if route.neutral is CLASS_DEFAULT else route.neutral,
        reading=FIELD_DEFAULTS[route.field],
        default=DEFAULTS[route.owner][route.attribute],
    )
    for route in ROUTES
    if route.attribute is not None and route.owner in DEFAULTS
)
_ALWAYS = tuple(row for row in _ROWS if row.family is None)
_LOW = tuple(row for row in _ROWS if row.family is not None)
_NEUTRAL = tuple((row.role, row.attribute, row.neutral) for row in _LOW)


def mode_of(said: Mapping[str, Any]) -> str:
    """Return fp32, fp16 or bf16: what the weights train in."""
    return "bf16" if said.get("bf16") else "fp16" if said.get("fp16") else "fp32"


def settle(said: Mapping[str, Any], sections: Mapping[str, dict[str, Any]]) -> list[Replaced]:
    """Write into `sections` what a sync of a config that states `said` would write into the owners.

    Args:
        said: The stated fields, as `MixedPrecisionConfig.to_dict()` has them.
        sections: Role -> field -> the owner's value; changed in place.

    Returns:
        The values of owners that are replaced by another one that was stated.
    """
    mode = mode_of(said)
    model = sections["model"]
    if model["autocast_dtype"] == model["params_dtype"]:
        model["autocast_dtype"] = None  # what Megatron computed by itself is nobody's own
    replaced: list[Replaced] = []
    _write(_ALWAYS, said, sections, mode, replaced)
    fp8, fp4 = said.get("fp8"), said.get("fp4")
    if not fp8 and not fp4:
        for role, attribute, neutral in _NEUTRAL:
            sections[role][attribute] = neutral
    else:
        scheme = _scheme(said, sections, "fp8_recipe" if fp8 else "fp4_recipe")
        on = {"low": True, "fp8": bool(fp8), "fp4": bool(fp4)}
        active = []
        for row in _LOW:
            if on[row.family or ""] and row.scheme in (None, scheme):
                active.append(row)
            else:
                sections[row.role][row.attribute] = row.neutral
        followed = _followed(active, said, sections)
        _write(active, said, sections, mode, replaced)
        for (role, attribute), value in followed.items():
            sections[role][attribute] = value
        _let_counts_act(said, model)
    if mode == "fp16" and said.get("loss_scale") is None:  # the first overflows of a dynamic scale have to pass
        sections["ddp"]["check_for_nan_in_grad"] = False
        sections["train"]["check_for_nan_in_loss"] = False
    return replaced


def _scheme(said: Mapping[str, Any], sections: Mapping[str, dict[str, Any]], field: str) -> Any:
    """Return the scheme of the run: the stated one, else an owner's own, else the default."""
    own = (sections[row.role][row.attribute] for row in _LOW if row.field == field and _has_own(row, sections))
    return said[field] if field in said else next(own, FIELD_DEFAULTS[field])


def _has_own(row: _Row, sections: Mapping[str, dict[str, Any]]) -> bool:
    return bool(sections[row.role][row.attribute] != row.default)


def _followed(
    rows: list[_Row], said: Mapping[str, Any], sections: Mapping[str, dict[str, Any]]
) -> dict[tuple[str, str], Any]:
    """Return the values that one owner of an unstated setting takes from the other, which has its own."""
    found: dict[tuple[str, str], Any] = {}
    homes: dict[tuple[str, ...], list[_Row]] = {}
    for row in rows:
        if row.rule == "value" and not any(name in said for name in row.names):
            homes.setdefault(row.names, []).append(row)
    for shared in homes.values():
        own = [row for row in shared if _has_own(row, sections)]
        if len(own) == 1:
            value = sections[own[0].role][own[0].attribute]
            found.update({(row.role, row.attribute): value for row in shared if row is not own[0]})
    return found


def _write(
    rows: tuple[_Row, ...] | list[_Row],
    said: Mapping[str, Any],
    sections: Mapping[str, dict[str, Any]],
    mode: str,
    replaced: list[Replaced],
) -> None:
    for row in rows:
        values = sections[row.role]
        own = values[row.attribute]
        if row.names[0] in said:
            new = said[row.names[0]]
        elif row.names[-1] in said:
            new = said[row.names[-1]]
        elif row.rule == "switch":
            new = row.reading
        elif row.rule == "dtype":
            new = mode
        elif row.rule == "autocast dtype":
            new = _autocast_dtype(said, values, mode)
        elif row.rule == "count" or own != row.default:
            continue
        else:
            new = row.reading
        if own != new:
            if own != row.default and (row.rule != "autocast dtype" or row.field in said):
                replaced.append(Replaced(role=row.role, attribute=row.attribute, field=row.field, own=own, new=new))
            values[row.attribute] = new


def _autocast_dtype(said: Mapping[str, Any], model: Mapping[str, Any], mode: str) -> Any:
    own = model["autocast_dtype"]
    if model["enable_autocast"] and own not in (None, DEFAULTS["model"]["params_dtype"]):
        return own
    return said.get("params_dtype") or mode


def _let_counts_act(said: Mapping[str, Any], model: dict[str, Any]) -> None:
    """Give layers kept in BF16 Megatron's own counts where both are 0, which would switch them off."""
    if model["first_last_layers_bf16"] and not any(model[name] for name in LAYER_COUNTS):
        for name in LAYER_COUNTS:
            if name not in said:
                model[name] = DEFAULTS["model"][name]
