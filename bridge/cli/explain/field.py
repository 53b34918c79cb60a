"""`precision-bridge explain FIELD [NAME]`: the meaning of a field, its configs, and its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bridge.cli.recipes.named_recipe import NamedRecipe
from bridge.errors import UnknownFieldError, close_matches, did_you_mean
from bridge.precision.field_docstrings import read_field_docs
from bridge.precision.precision_config import FIELD_DEFAULTS, FIELDS, FIELDS_BY_SUBJECT
from bridge.precision.statements import get_recipe_name, get_source, is_stated, list_field_names
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.sync.field_routes import OWNER_CLASS_NAMES, ROUTES, Route, get_routes, load_route_notes

FIELD_WIDTH = max(map(len, FIELD_DEFAULTS))
"""Characters of the longest field name."""
MAX_MATCHES = 3
"""The most fields that an error about an unknown field suggests, if no spelling is similar."""
MIN_PART_LENGTH = 3
"""The least number of characters of a word that is searched inside the names of fields."""
WRITE_RULE_TEXTS = {
    "switch": "always written; what the recipe does not mention is off",
    "value": (
        "written if stated; otherwise a value that the owner set itself is kept, "
        "and a default becomes {default}"
    ),
    "count": "written if stated; otherwise left as the owner has it",
    "stated": "written if stated; otherwise left as the owner has it",
    "dtype": "written if stated; otherwise derived from the mode (fp32, fp16 or bf16)",
    "autocast dtype": "written if stated; otherwise params_dtype, computed again after the sync",
    "none": "nothing is written",
}
"""Rule of a route -> the condition under which a sync writes the attribute."""
FAMILY_CONDITIONS = {
    "fp8": "while fp8 is on",
    "fp4": "while fp4 is on",
    "low": "while fp8 or fp4 is on",
}
"""Family of a route -> the condition under which the attribute has an effect."""


def format_field_list(meanings: Mapping[str, str]) -> str:
    """Return a paragraph for each subject, with a line for each field."""
    paragraphs = []
    for subject, names in FIELDS_BY_SUBJECT.items():
        lines = [subject]
        for name in names:
            lines.append(f"  {name:<{FIELD_WIDTH}} {meanings[name]}")
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def explain_field(
    field: str, recipe: str | None = None, *, config_dir: str | None = None
) -> dict[str, Any]:
    """Return the meaning of a field, the configs that have it, and its value in a recipe.

    Args:
        field: The name of the field here or in Megatron. The name of a config may precede it.
        recipe: The recipe. None: no recipe.
        config_dir: A folder with recipes of a team. None: no such folder.

    Returns:
        Plain data.

    Raises:
        UnknownFieldError: There is no such field.
    """
    name = _resolve_field_name(field)
    default = getattr(MixedPrecisionConfig, name)
    doc = read_field_docs(MixedPrecisionConfig)[name]
    content: dict[str, Any] = {
        "field": name,
        "type": doc.annotation,
        "default": default,
        "meaning": doc.text,
        "homes": [_route_to_dict(route, default) for route in get_routes(name)],
        "read_by_schemes": sorted({*FIELDS[name].schemes}),
    }
    if recipe is not None:
        content["in_recipe"] = _recipe_value_to_dict(name, recipe, config_dir)
    return content


def _recipe_value_to_dict(field: str, recipe: str, config_dir: str | None) -> dict[str, Any]:
    """Return the value of a field in a recipe, whether it is stated, and where."""
    named = NamedRecipe.from_name(recipe, config_dir)
    config = named.config
    return {
        "recipe": get_recipe_name(config) or named.name,
        "value": config.to_dict(full=True)[field],
        "stated": is_stated(config, field),
        "by": get_source(config, field),
    }


def _resolve_field_name(field: str) -> str:
    """Return the name of a field of the precision, from this name or Megatron's name.

    Raises:
        UnknownFieldError: There is no such field.
    """
    wanted = field.rpartition(".")[2]
    names = list_field_names(MixedPrecisionConfig)
    field_by_attribute = {route.attribute: route.field for route in ROUTES if route.attribute}
    if wanted in names:
        return wanted
    if wanted in field_by_attribute:
        return field_by_attribute[wanted]
    known = list(dict.fromkeys([*names, *field_by_attribute]))
    matches = close_matches(wanted, known)
    if not matches and len(wanted) >= MIN_PART_LENGTH:
        matches = [name for name in known if wanted in name][:MAX_MATCHES]
    remedy = did_you_mean(matches) or "`precision-bridge explain` lists them."
    raise UnknownFieldError(f"Unknown field {field!r}. {remedy}", matches)


def _route_to_dict(route: Route, default: object) -> dict[str, Any]:
    """Return the config that a field is written to, and the condition of its effect there."""
    notes_of_field = load_route_notes()[route.owner].get(route.field, {})
    since = None
    if route.attribute and route.owner != "process":
        since = route.since
    acts = FAMILY_CONDITIONS.get(route.family or "", "always")
    if route.scheme:
        acts = f"while fp8_recipe is {route.scheme}"
    return {
        "owner": route.owner,
        "class": OWNER_CLASS_NAMES[route.owner],
        "attribute": route.attribute,
        "since_megatron_core": since,
        "written": WRITE_RULE_TEXTS[route.rule].format(default=repr(default)),
        "acts": acts,
        "note": notes_of_field.get("note", ""),
        "source": notes_of_field.get("source", ""),
    }


def format_field(content: Mapping[str, Any]) -> str:
    """Return a field as text: its meaning and configs, its value in a recipe and in a run.

    Args:
        content: The result of `explain_field`, `explain_in_run` or `explain_in_log`.
    """
    lines = []
    if "meaning" in content:
        lines.append(f"{content['field']}: {content['type']} = {content['default']!r}")
        lines.append(f"  {content['meaning']}")
    if content.get("read_by_schemes"):
        lines.append(f"  Read under: {', '.join(content['read_by_schemes'])}.")
    for home in content.get("homes", ()):
        lines += _format_home(home)
    if "in_recipe" in content:
        row = content["in_recipe"]
        origin = "not stated"
        if row["stated"]:
            origin = f"stated by {row['by']}"
        lines.append(f"  In {row['recipe']}: {row['value']!r}, {origin}.")
    if "setting" in content:
        lines += _format_run_setting(content["setting"], content["in_run"]["run"])
    if "in_run" in content:
        traces = content["in_run"]
        if "meaning" in content or traces["rows"] or traces["findings"]:
            lines += _format_run_traces(traces)
    return "\n".join(lines)


def _format_home(home: Mapping[str, Any]) -> list[str]:
    """Return the lines about a config that has the field."""
    if home["attribute"] is None:
        return [f"  No field of {home['class']}. {home['note']}"]
    since = ""
    if home["since_megatron_core"]:
        since = f", megatron-core >= {home['since_megatron_core']}"
    written = home["written"]
    written = written[:1].upper() + written[1:]  # capitalize() would also change later letters
    lines = [
        f"  {home['owner']}.{home['attribute']} ({home['class']}{since})",
        f"    Acts {home['acts']}. {written}.",
    ]
    if home["note"]:
        lines.append(f"    {home['note']}")
    if home["source"]:
        lines.append(f"    Source: {home['source']}.")
    return lines


def _format_run_setting(setting: Mapping[str, Any], run: str) -> list[str]:
    """Return the lines about the value of a setting in a run, and each source that set it."""
    lines = [f"  {setting['key']} is {setting['value']!r} in the run {run}: {setting['by']}."]
    before = f"the default was {setting['default']!r}"
    for origin, value in setting["set_by"].items():
        lines.append(f"    Set by {origin}: {value!r}; {before}.")
        before = f"the value of {origin} was {value!r}"
    if setting["ran"]:
        lines.append(f"    {setting['ran']}.")
    return lines


def _format_run_traces(run: Mapping[str, Any]) -> list[str]:
    """Return the lines about a field in the sync, the findings and the records of a run."""
    lines = [f"  In the run {run['run']}:"]
    for row in run["rows"]:
        change = f"is {row['new']}, as before"
        if row["old"] != row["new"]:
            change = f"is {row['new']}, before {row['old']}"
        path = f"{row['owner']}.{row['attribute']}"
        lines.append(f"    {path} {change}: by {row['by']} ({row['why']}).")
    if not run["rows"]:
        lines.append("    The sync wrote it into no config.")
    for finding in run["findings"]:
        lines.append(f"    {finding}.")
    if run["ran"]:
        lines.append(f"    {run['ran']}.")
    return lines
