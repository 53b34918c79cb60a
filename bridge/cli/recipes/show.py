"""`precision-bridge recipes NAME`: the fields that a recipe states, and the derived fields."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.cli.output import format_value, print_json
from bridge.cli.recipes.named_recipe import NamedRecipe
from bridge.precision.field_docstrings import read_field_docs
from bridge.precision.mode import get_mode, get_scheme
from bridge.precision.precision_config import FIELDS_BY_SUBJECT, MEGATRON_FIELDS
from bridge.precision.statements import is_stated, list_field_names
from bridge.registry.mixed_precision_config import MixedPrecisionConfig, find_config_faults
from bridge.rules.inert_fields import find_inert_fields


def format_fields_by_subject() -> str:
    """Return the names of the fields for the help of a command, a paragraph for each subject."""
    lines = ["fields by subject:"]
    for subject, names in FIELDS_BY_SUBJECT.items():
        paragraph = f"  {subject}: {', '.join(names)}"
        lines.extend(textwrap.wrap(paragraph, 110, subsequent_indent="    "))
    return "\n".join(lines)


def print_recipe(args: argparse.Namespace, name: str) -> None:
    """Print a recipe: its description, its fields by subject, and its faults."""
    named = NamedRecipe.from_name(name, args.config_dir)
    faults = list(map(str, find_config_faults(named.config)))
    if args.json:
        print_json(_recipe_to_dict(named, faults, stated_only=args.stated))
        return
    print(f"{named.name}\n\n{named.description or 'No docstring.'}\n")
    shown = _select_fields(named.config, args)
    for paragraph in _format_subjects(shown):
        print(paragraph)
    hidden_count = len(list_field_names(named.config)) - len(shown)
    if hidden_count and not args.stated:
        reason = "not stated and off, or without effect here"
        print(f"\n  {hidden_count} more fields are {reason}: --all lists them.")
    for fault in faults:
        print(f"fault: {fault}")


def _recipe_to_dict(
    named: NamedRecipe, faults: Sequence[str], *, stated_only: bool
) -> dict[str, Any]:
    """Return a recipe as plain data, with all fields or only its stated fields."""
    config = named.config
    stated = [field for field in list_field_names(config) if is_stated(config, field)]
    return {
        "name": named.name,
        "place": named.place,
        "aliases": named.aliases,
        "mode": get_mode(config),
        "scheme": get_scheme(config),
        "fields": config.to_dict(full=not stated_only),
        "stated": stated,
        "faults": faults,
    }


def _format_subjects(shown: Mapping[str, str]) -> list[str]:
    """Return a paragraph for each subject with a shown field.

    Args:
        shown: Field -> its value, and the source that decides it.
    """
    docs = read_field_docs(MixedPrecisionConfig)
    width = max(map(len, shown), default=0)
    paragraphs = []
    for subject, names in FIELDS_BY_SUBJECT.items():
        lines = [f"  {subject}"]
        for field in names:
            if field in shown:
                lines.append(f"    {field:<{width}}  {shown[field]}  {docs[field].text}")
        if len(lines) > 1:
            paragraphs.append("\n".join(lines))
    return paragraphs


def _select_fields(config: MixedPrecisionConfig, args: argparse.Namespace) -> dict[str, str]:
    """Return each field that is printed -> its value, and the source that decides it."""
    values = config.to_dict(full=True)
    for name in ("params_dtype", "pipeline_dtype"):
        values[name] = values[name] or get_mode(config)
    inert = find_inert_fields(config)
    shown = {}
    for name, value in values.items():
        if is_stated(config, name):
            decider = "stated"
        elif name in MEGATRON_FIELDS:
            decider = "owner's"
        elif name in inert or value in (None, False):
            decider = "default"
        else:
            decider = "follows"
        follows = decider == "follows" and not args.stated
        if decider == "stated" or follows or args.all:
            shown[name] = f"{format_value(value):<12} {decider:<7}"
    return shown
