"""`precision-bridge recipes`, `show NAME` and `diff A B`: the recipes, every field of one, and how two differ."""

from __future__ import annotations

import argparse
import inspect
import itertools
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.cli.arguments import add_command, print_json, text_of
from bridge.errors import RunConfigError, UnknownRecipeError, close_matches, did_you_mean
from bridge.precision.config import GROUPS, MEGATRON_FIELDS
from bridge.precision.field_docs import field_docs
from bridge.precision.mode import mode_of, scheme_of
from bridge.precision.statements import field_names, is_stated, recipe_name
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.faults import faults_of
from bridge.registry.registry import REGISTRY
from bridge.rules.inert import inert_fields


def by_subject() -> str:
    """Return the names of the fields as a list for a command's help, a paragraph for each subject."""
    lines = ["fields by subject:"]
    for subject, names in GROUPS.items():
        lines.extend(textwrap.wrap(f"  {subject}: {', '.join(names)}", 110, subsequent_indent="    "))
    return "\n".join(lines)


def add_parsers(commands: Any) -> None:
    """Add the commands."""
    recipes = add_command(commands, "recipes", _recipes, "list the recipes, one line each")
    recipes.add_argument("--tag", help="only those with this tag (fp8, bf16, mxfp8, ...)")
    text = "show the fields that a recipe states, and those that follow from them"
    show = add_command(commands, "show", _show, text, epilog=by_subject())
    show.add_argument("name", help="recipe, in any spelling, or an alias")
    shown = show.add_mutually_exclusive_group()
    shown.add_argument("--stated", action="store_true", help="only the fields the recipe states")
    shown.add_argument("--all", action="store_true", help="every field, by subject")
    diff = add_command(commands, "diff", _diff, "show the fields in which two recipes differ")
    diff.add_argument("a", help="recipe")
    diff.add_argument("b", help="recipe")
    for parser in (recipes, show, diff):
        parser.add_argument("--config-dir", metavar="FOLDER", help="a folder with YAML recipes in mixed_precision/")


def _recipes(chosen: argparse.Namespace) -> None:
    """Print the list; the registry logs each source that it could not load."""
    keys = ("name", "summary", "tags", "aliases", "place")
    found = [{key: getattr(recipe, key) for key in keys} for recipe in REGISTRY.recipes()]
    found += _of_folder(chosen.config_dir)
    tags = sorted({tag for recipe in found for tag in recipe["tags"]})
    if chosen.tag is not None and chosen.tag not in tags:
        hint = did_you_mean(close_matches(chosen.tag, tags)) or f"Tags: {', '.join(tags)}."
        raise UnknownRecipeError(f"--tag: no recipe has the tag {chosen.tag!r}. {hint}")
    listed = [recipe for recipe in found if chosen.tag in (None, *recipe["tags"])]
    if chosen.json:
        print_json(listed)
        return
    width = max((len(recipe["name"]) for recipe in listed), default=0)
    for recipe in listed:
        aliases = f" (also {', '.join(recipe['aliases'])})" if recipe["aliases"] else ""
        print(f"{recipe['name']:<{width}}  {recipe['summary']}{aliases}")


def _of_folder(config_dir: str | None) -> list[dict[str, Any]]:
    """Return the YAML recipes of a team's folder as rows of the list; the summary is the file's first comment."""
    if config_dir is None:
        return []
    if not Path(config_dir).is_dir():
        raise RunConfigError.of("--config-dir", "there is no such folder", config_dir, "Give an existing one.")
    rows = []
    for path in sorted((Path(config_dir) / "mixed_precision").glob("*.yaml")):
        summary = _comment(path).partition("\n")[0] or "No comment."
        rows.append({"name": path.stem, "summary": summary, "tags": (), "aliases": (), "place": str(path)})
    return rows


def _comment(path: Path) -> str:
    from bridge.precision import strict_yaml  # for the recipes of a folder alone

    lines = strict_yaml.decoded(strict_yaml.read_bytes(path), str(path)).splitlines()
    return "\n".join(line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines))


@dataclass(frozen=True, kw_only=True)
class NamedRecipe:
    """A recipe by its name: a registered one, or a YAML file of the group `mixed_precision` in a team's folder."""

    name: str
    config: MixedPrecisionConfig
    place: str
    """``file:line`` of the function, or the YAML file."""
    description: str
    """The function's docstring, or the comment that the YAML file begins with."""
    aliases: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, config_dir: str | None) -> NamedRecipe:
        """Return the recipe of a name; UnknownRecipeError where neither the registry nor the folder has it."""
        path = Path(config_dir or "") / "mixed_precision" / f"{name}.yaml"
        if config_dir is not None and (name not in REGISTRY or path.is_file()):
            from bridge.front.loader import load_run, shipped_folder  # Hydra is heavy

            run = load_run([f"mixed_precision={name}"], shipped_folder(), config_dir=config_dir, strict=False)
            if run.precision is not None and path.is_file():
                return cls(name=name, config=run.precision, place=str(path), description=_comment(path))
        recipe, config = REGISTRY.recipe(name), REGISTRY.get(name)
        description = inspect.getdoc(recipe.function) or ""
        return cls(name=recipe.name, config=config, place=recipe.place, description=description, aliases=recipe.aliases)


def _show(chosen: argparse.Namespace) -> None:
    named = NamedRecipe.of(chosen.name, chosen.config_dir)
    config = named.config
    faults = [str(fault) for fault in faults_of(config)]
    if chosen.json:
        content = {name: getattr(named, name) for name in ("name", "place", "aliases")}
        content |= {"mode": mode_of(config), "scheme": scheme_of(config)}
        content["fields"] = config.to_dict(full=not chosen.stated)
        stated = [name for name in field_names(config) if is_stated(config, name)]
        print_json(content | {"stated": stated, "faults": faults})
        return
    print(f"{named.name}\n\n{named.description or 'No docstring.'}\n")
    docs = field_docs(MixedPrecisionConfig)
    shown = _shown(config, chosen)
    width = max(map(len, shown), default=0)
    for subject, names in GROUPS.items():
        lines = [f"    {name:<{width}}  {shown[name]}  {docs[name].text}" for name in names if name in shown]
        if lines:
            print("\n".join([f"  {subject}", *lines]))
    others = len(field_names(config)) - len(shown)
    if others and not chosen.stated:
        print(f"\n  {others} more fields are not stated and off, or without effect here: --all lists them.")
    for fault in faults:
        print(f"fault: {fault}")


def _shown(config: MixedPrecisionConfig, chosen: argparse.Namespace) -> dict[str, str]:
    """Return each field that is to be printed with its value and what decides it."""
    values = config.to_dict(full=True)
    values |= {name: values[name] or mode_of(config) for name in ("params_dtype", "pipeline_dtype")}
    inert = inert_fields(config)
    found = {}
    for name, value in values.items():
        kind = "default" if name in inert or value in (None, False) else "follows"
        kind = "owner's" if name in MEGATRON_FIELDS else kind
        kind = "stated" if is_stated(config, name) else kind
        if kind == "stated" or chosen.all or (kind == "follows" and not chosen.stated):
            found[name] = f"{text_of(value):<12} {kind:<7}"
    return found


def field_differences(one: MixedPrecisionConfig, two: MixedPrecisionConfig) -> list[dict[str, Any]]:
    """Return a row per field that differs: its values, and whether each side states it."""
    first, second = one.to_dict(full=True), two.to_dict(full=True)
    rows = []
    for name in first:
        stated = {"a_stated": is_stated(one, name), "b_stated": is_stated(two, name)}
        rows.append({"field": name, "a": first[name], "b": second[name], **stated})
    return [row for row in rows if row["a"] != row["b"] or row["a_stated"] != row["b_stated"]]


def _diff(chosen: argparse.Namespace) -> None:
    """Print one line per field in which two recipes differ: values, and whether each side states them."""
    one, two = (NamedRecipe.of(name, chosen.config_dir).config for name in (chosen.a, chosen.b))
    rows = field_differences(one, two)
    if chosen.json:
        print_json({"a": recipe_name(one), "b": recipe_name(two), "fields": rows})
        return
    if not rows:
        print(f"{recipe_name(one)} and {recipe_name(two)} say the same.")
        return
    print(f"  {'':<33} {recipe_name(one)} -> {recipe_name(two)}")
    for row in rows:
        before, after = (f"{text_of(row[side])}{'' if row[f'{side}_stated'] else ' (default)'}" for side in "ab")
        print(f"  {row['field']:<33} {before} -> {after}")
