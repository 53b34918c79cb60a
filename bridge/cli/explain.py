"""`precision-bridge explain FIELD [NAME]`: what a field does, where it lands, when it acts; or what a rule says."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from bridge.cli.explain_rule import explain_rule, is_rule
from bridge.errors import UnknownFieldError, close_matches, did_you_mean
from bridge.precision.field_docs import field_docs, field_types
from bridge.precision.schemes import SCHEMES
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import REGISTRY
from bridge.sync.routes import OWNERS, ROUTES, Route, routes_of

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser", "explanation"]

RULES = {
    "switch": "always written; what the recipe does not mention is off",
    "value": "written if stated; otherwise a value that the owner set itself is kept, and a default becomes {default}",
    "count": "written if stated; otherwise left as the owner has it",
    "dtype": "written if stated; otherwise derived from the mode (fp32, fp16 or bf16)",
    "autocast dtype": "written if stated; otherwise params_dtype, computed again after the sync",
    "none": "nothing is written",
}


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("explain", help="explain a field (meaning, homes, when it acts) or a rule (PB101)")
    parser.add_argument(
        "field",
        nargs="?",
        help="field, by its own name or Megatron's, or a rule's id; without it, all fields are listed",
    )
    parser.add_argument("name", nargs="?", help="recipe: what the field is there, and why")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    """Print the explanation, or the list of fields or rules."""
    if is_rule(chosen.field):
        explain_rule(chosen.field, as_json=chosen.json)
        return
    if chosen.field is None:
        docs = field_docs(MixedPrecisionConfig)
        if chosen.json:
            print(json.dumps(docs, indent=2))
        else:
            print("\n".join(f"{name:<33} {text}" for name, text in docs.items()))
        return
    found = explanation(chosen.field, chosen.name)
    print(json.dumps(found, indent=2) if chosen.json else _text(found))


def explanation(field: str, recipe: str | None = None) -> dict[str, Any]:
    """Return everything known about a field as plain data.

    Args:
        field: A field of `MixedPrecisionConfig`, or the name Megatron has for it (``enable_autocast``).
        recipe: Also say what it is in this recipe.

    Raises:
        UnknownFieldError: No such field; the nearest are named.
        UnknownRecipeError: No such recipe.
    """
    name = _field_name(field)
    default = getattr(MixedPrecisionConfig, name)
    found: dict[str, Any] = {
        "field": name,
        "type": field_types(MixedPrecisionConfig)[name],
        "default": default,
        "meaning": field_docs(MixedPrecisionConfig)[name],
        "homes": [_home(route, default) for route in routes_of(name)],
        "read_by_schemes": sorted({scheme.name for scheme in SCHEMES if name in scheme.settings}),
    }
    if recipe is not None:
        config = REGISTRY.get(recipe)
        found["in_recipe"] = {
            "recipe": config.recipe,
            "value": config.to_dict(full=True)[name],
            "stated": config.is_stated(name),
            "by": config.source_of(name),
        }
    return found


def _field_name(field: str) -> str:
    wanted = field.rpartition(".")[2]
    names = MixedPrecisionConfig.field_names()
    renamed = {route.attribute: route.field for route in ROUTES if route.attribute}
    if wanted in names:
        return wanted
    if wanted in renamed:
        return renamed[wanted]
    matches = close_matches(wanted, [*names, *renamed])
    remedy = did_you_mean(matches) or "`precision-bridge explain` lists them."
    raise UnknownFieldError(f"Unknown field {field!r}. {remedy}", matches)


def _home(route: Route, default: object) -> dict[str, Any]:
    row = dataclasses.asdict(route)
    family = {"fp8": "while fp8 is on", "fp4": "while fp4 is on", "low": "while fp8 or fp4 is on"}
    when = f"while fp8_recipe is {route.scheme}" if route.scheme else family.get(route.family or "", "always")
    return {
        "owner": route.owner,
        "class": OWNERS[route.owner],
        "attribute": route.attribute,
        "since_megatron_core": route.since if route.attribute and route.owner != "process" else None,
        "written": RULES[route.rule].format(default=repr(default)),
        "acts": when,
        "note": row["note"],
        "source": row["source"],
    }


def _text(found: dict[str, Any]) -> str:
    lines = [f"{found['field']}: {found['type']} = {found['default']!r}", f"  {found['meaning']}"]
    if found["read_by_schemes"]:
        lines.append(f"  Read under: {', '.join(found['read_by_schemes'])}.")
    for home in found["homes"]:
        if home["attribute"] is None:
            lines.append(f"  No home in {home['class']}. {home['note']}")
            continue
        since = f", megatron-core >= {home['since_megatron_core']}" if home["since_megatron_core"] else ""
        lines.append(f"  {home['owner']}.{home['attribute']} ({home['class']}{since})")
        lines.append(f"    Acts {home['acts']}. {_capital(home['written'])}.")
        if home["note"]:
            lines.append(f"    {home['note']}")
        if home["source"]:
            lines.append(f"    Source: {home['source']}.")
    if "in_recipe" in found:
        row = found["in_recipe"]
        how = f"stated by {row['by']}" if row["stated"] else "not stated"
        lines.append(f"  In {row['recipe']}: {row['value']!r}, {how}.")
    return "\n".join(lines)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
