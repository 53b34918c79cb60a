"""The precision of a run, from the layers that its config was composed of; `auto` is resolved here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge.errors import PrecisionTypeError
from bridge.front.origin import Layer
from bridge.precision.auto import is_auto
from bridge.preflight.run_check import resolve_precision, target_of
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.front.origin import Origins
    from bridge.front.problems import Problems
    from bridge.preflight.auto import Choice

__all__ = ["PRECISION", "resolved", "stated_precision"]

PRECISION = "mixed_precision"


def resolved(
    values: Mapping[str, Any], choice: str | None, recipe: MixedPrecisionConfig | None, origins: Origins
) -> tuple[dict[str, Any], str | None, MixedPrecisionConfig | None, Origins, Choice | None]:
    """Return values, option, recipe and origins with `auto` resolved for the run's target, and the choice made for it.

    A recipe's name in the place of its fields is replaced by them. Fields that were stated together with
    ``mixed_precision=auto`` stand over those of the chosen recipe.

    Raises:
        RunConfigError: An unreadable target, an unknown request, or neither a GPU nor a target.
        UnknownRecipeError: No such recipe.
        BackendUnavailableError: FP8 was asked for, and no FP8 recipe runs there.
    """
    given = values.get(PRECISION)
    if isinstance(given, str):
        choice, given = given, {}
    target = target_of(values.get("target")) if values.get("target") or is_auto(choice) else None
    made = None
    if target is not None and is_auto(choice):
        choice, made = resolve_precision(choice, values.get("model") or {}, target)
    elif not isinstance(values.get(PRECISION), str):
        return dict(values), choice, recipe, origins, None
    recipe = REGISTRY.get(str(choice))
    fields = recipe.to_dict()
    layer = Layer(origin=f"recipe {recipe.recipe}", keys=tuple(f"{PRECISION}.{key}" for key in fields), is_recipe=True)
    whole = {**values, PRECISION: {**fields, **(given or {})}}
    return whole, choice, recipe, origins.without(PRECISION).under(layer), made


def stated_precision(
    given: Any, choice: str | None, recipe: MixedPrecisionConfig | None, problems: Problems
) -> MixedPrecisionConfig | None:
    """Return the precision with each statement's origin; None where no option is chosen and nothing is stated.

    Args:
        given: The fields that the composition left.
        choice: The chosen option of the group: a recipe's name, or a YAML file's.
        recipe: The recipe as the registry made it, for its class and name; None: a YAML file's, or none.
        problems: Collects fields that do not exist and values that do not fit; knows the origins.
    """
    if not given and choice is None:
        return None
    config = type(recipe)() if recipe is not None else MixedPrecisionConfig()
    if not isinstance(given, dict):
        problems.add(PRECISION, "must be a recipe's name or a mapping of fields", given)
        return None
    origins = problems.origins
    by_origin: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        path = f"{PRECISION}.{name}"
        if name not in config.field_names():
            problems.unknown(path, value, "no such field", config.field_names())
            continue
        try:
            by_origin.setdefault(origins.of(path), {}).update(type(config).from_dict({name: value}).to_dict())
        except PrecisionTypeError as error:
            problems.add(path, error.rule, value, error.remedy)
    ordered = sorted(by_origin, key=origins.rank)
    for origin in (origin for origin in ordered if origin in origins.of_recipe):
        config.state(origin, **by_origin[origin])
    if choice is not None:
        config.made_by(recipe.recipe if recipe is not None and recipe.recipe else choice)
    for origin in (origin for origin in ordered if origin not in origins.of_recipe):
        config.state(origin, **by_origin[origin])
    return config
