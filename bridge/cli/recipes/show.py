"""`precision-bridge recipes NAME`: the fields that a recipe states, and those that follow."""

from __future__ import annotations

import argparse
import textwrap

from bridge.cli.output import format_value, print_json
from bridge.cli.recipes.named_recipe import NamedRecipe
from bridge.precision.config import FIELDS_BY_SUBJECT, MEGATRON_FIELDS
from bridge.precision.field_docs import read_field_docs
from bridge.precision.mode import get_mode, get_scheme
from bridge.precision.statements import is_stated, list_field_names
from bridge.registry.config import MixedPrecisionConfig, find_config_faults
from bridge.rules.inert import find_inert_fields


def format_fields_by_subject() -> str:
    """Return the fields' names as a list for a command's help, a paragraph for each subject."""
    lines = ["fields by subject:"]
    for subject, names in FIELDS_BY_SUBJECT.items():
        paragraph = f"  {subject}: {', '.join(names)}"
        lines.extend(textwrap.wrap(paragraph, 110, subsequent_indent="    "))
    return "\n".join(lines)


def print_recipe(args: argparse.Namespace, name: str) -> None:
    """Print a recipe: its description, and its fields by subject."""
    named = NamedRecipe.from_name(name, args.config_dir)
    config = named.config
    faults = list(map(str, find_config_faults(config)))
    if args.json:
        stated = [field for field in list_field_names(config) if is_stated(config, field)]
        content = {
            "name": named.name,
            "place": named.place,
            "aliases": named.aliases,
            "mode": get_mode(config),
            "scheme": get_scheme(config),
            "fields": config.to_dict(full=not args.stated),
            "stated": stated,
            "faults": faults,
        }
        print_json(content)
        return
    print(f"{named.name}\n\n{named.description or 'No docstring.'}\n")
    docs = read_field_docs(MixedPrecisionConfig)
    shown = _select_fields(config, args)
    width = max(map(len, shown), default=0)
    for subject, names in FIELDS_BY_SUBJECT.items():
        lines = [f"  {subject}"]
        for field in names:
            if field in shown:
                lines.append(f"    {field:<{width}}  {shown[field]}  {docs[field].text}")
        if len(lines) > 1:
            print("\n".join(lines))
    others = len(list_field_names(config)) - len(shown)
    if others and not args.stated:
        why = "not stated and off, or without effect here"
        print(f"\n  {others} more fields are {why}: --all lists them.")
    for fault in faults:
        print(f"fault: {fault}")


def _select_fields(config: MixedPrecisionConfig, args: argparse.Namespace) -> dict[str, str]:
    """Return each field that is to be printed with its value and what decides it."""
    values = config.to_dict(full=True)
    for name in ("params_dtype", "pipeline_dtype"):
        values[name] = values[name] or get_mode(config)
    inert = find_inert_fields(config)
    shown = {}
    for name, value in values.items():
        if is_stated(config, name):
            kind = "stated"
        elif name in MEGATRON_FIELDS:
            kind = "owner's"
        elif name in inert or value in (None, False):
            kind = "default"
        else:
            kind = "follows"
        if kind == "stated" or args.all or (kind == "follows" and not args.stated):
            shown[name] = f"{format_value(value):<12} {kind:<7}"
    return shown
