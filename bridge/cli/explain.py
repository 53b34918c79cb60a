"""`precision-bridge explain FIELD [NAME]`: a field's meaning, place and conditions; `explain PB101`: a rule in full.

With ``--run RUN`` the value of a field, or of any key of the config, in a run: who set it, what it replaced, what ran.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bridge.cli.output import print_json
from bridge.cli.parser import add_json
from bridge.cli.recipes.named import NamedRecipe
from bridge.cli.recipes.show import fields_by_subject
from bridge.cli.run_arguments import read_saved
from bridge.errors import UnknownFieldError, close_matches, did_you_mean
from bridge.precision.config import FIELD_DEFAULTS, FIELDS, GROUPS
from bridge.precision.field_docs import field_docs
from bridge.precision.statements import field_names, is_stated, recipe_name, source_of
from bridge.registry.config import MixedPrecisionConfig
from bridge.rules.rule import EVIDENCE, Rule
from bridge.rules.rulebook import BY_ID, RULES
from bridge.rules.run_context import RunContext
from bridge.runtime.audit.run_folder import RunFolder
from bridge.runtime.audit.setting import Setting, effect_in
from bridge.sync.routes import OWNERS, ROUTES, Route, notes, routes_of
from bridge.target.fields import FIELDS as VALUES

if TYPE_CHECKING:
    from bridge.preflight.run import Run

LIST = "rules"
WIDTH = max(map(len, FIELD_DEFAULTS))
"""Of the longest field."""

WRITTEN = {
    "switch": "always written; what the recipe does not mention is off",
    "value": "written if stated; otherwise a value that the owner set itself is kept, and a default becomes {default}",
    "count": "written if stated; otherwise left as the owner has it",
    "stated": "written if stated; otherwise left as the owner has it",
    "dtype": "written if stated; otherwise derived from the mode (fp32, fp16 or bf16)",
    "autocast dtype": "written if stated; otherwise params_dtype, computed again after the sync",
    "none": "nothing is written",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_json(parser)
    parser.epilog = fields_by_subject()
    text = "field, by its own name or Megatron's, or a rule's id; without it, all fields are listed"
    parser.add_argument("field", nargs="?", help=text)
    parser.add_argument("name", nargs="?", help="recipe: what the field is there, and why")
    parser.add_argument(
        "--config-dir", metavar="FOLDER", help="a folder with YAML recipes in mixed_precision/"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a file that describes a run: what the field is in it"
    )
    parser.add_argument(
        "--trust", action="store_true", help="run the Python that recipes_from names in a config"
    )
    parser.add_argument(
        "--run", dest="run_folder", metavar="RUN", help="folder of a run: what the field was in it"
    )


def run(chosen: argparse.Namespace) -> None:
    """Print everything about a field or a rule."""
    if chosen.field == LIST:
        found: Any = [rule_dict(rule) for rule in RULES]
        text = "\n".join(f"{rule.id}  {rule.severity:<7}  {rule.title}" for rule in RULES)
    elif chosen.field is None:
        found = {name: doc.text for name, doc in field_docs(MixedPrecisionConfig).items()}
        text = "\n\n".join(
            "\n".join([subject, *(f"  {name:<{WIDTH}} {found[name]}" for name in names)])
            for subject, names in GROUPS.items()
        )
    elif re.fullmatch(r"[Pp][Bb]\d+", chosen.field):
        found = rule_dict(_rule(chosen.field))
        text = _rule_text(found)
    elif chosen.run_folder is not None:
        found = in_run(
            chosen.field, Path(chosen.run_folder), chosen.name, config_dir=chosen.config_dir
        )
        text = _field_text(found)
    elif chosen.config is not None:
        values = read_saved(chosen, chosen.config, strict=False)
        found = in_file(chosen.field, values)
        lines = [_setting_text(one, found["config"]) for one in found["settings"]]
        text = "\n".join([*lines, *(f"  {line}" for line in values.reading.lines)])
    else:
        found = explanation(chosen.field, chosen.name, config_dir=chosen.config_dir)
        text = _field_text(found)
    if chosen.json:
        print_json(found)
    else:
        print(text)


def explanation(
    field: str, recipe: str | None = None, *, config_dir: str | None = None
) -> dict[str, Any]:
    """Return everything known about a field, in a recipe too, as plain data; Megatron's names are taken too."""
    name = _field_name(field)
    default, doc = getattr(MixedPrecisionConfig, name), field_docs(MixedPrecisionConfig)[name]
    found: dict[str, Any] = {
        "field": name,
        "type": doc.annotation,
        "default": default,
        "meaning": doc.text,
    }
    found["homes"] = [_home(route, default) for route in routes_of(name)]
    found["read_by_schemes"] = sorted({*FIELDS[name].schemes})
    if recipe is not None:
        named = NamedRecipe.of(recipe, config_dir)
        config = named.config
        found["in_recipe"] = {
            "recipe": recipe_name(config) or named.name,
            "value": config.to_dict(full=True)[name],
            "stated": is_stated(config, name),
            "by": source_of(config, name),
        }
    return found


def in_run(
    word: str, folder: Path, recipe: str | None = None, *, config_dir: str | None = None
) -> dict[str, Any]:
    """Return what a field was in a run, as plain data: any key of its config, or a field of the precision.

    A precision's field has its `explanation`, and under `in_run` the `rows` of the sync, `findings` of the check and
    the sync about it, and `ran`, one sentence on its trace in the records, empty where there is none. Another field has
    its `Setting` under `setting`, with the rows of the sync and the findings too.
    """
    run = RunFolder.of(folder)
    section, _, name = word.rpartition(".")
    is_precision = name in FIELD_DEFAULTS or any(name == route.attribute for route in ROUTES)
    setting = None if is_precision and section in ("", "mixed_precision") else Setting.of(run, word)
    stated = {} if setting is None else {"setting": asdict(setting)}
    if setting is not None and not is_precision:
        return {"field": setting.key, **stated, "in_run": _traces(run, setting.key)}
    found = explanation(word, recipe, config_dir=config_dir)
    return {**found, "in_run": _traces(run, found["field"]), **stated}


def in_file(word: str, run: Run) -> dict[str, Any]:
    """Return what a field of one of Megatron's configs is in a file's run, as plain data: before and after the sync.

    A field of the precision by its own name is that of the config that holds it.
    """
    section, _, name = word.rpartition(".")
    homes = [
        (route.owner, route.attribute)
        for route in ROUTES
        if name == route.field and route.attribute
    ]
    homes = homes or [(role, name) for role in VALUES if name in VALUES[role]]
    homes = [
        (role, field)
        for role, field in homes
        if role in VALUES and section in ("", "mixed_precision", role)
    ]
    if not homes:
        matches = close_matches(name, [field for fields in VALUES.values() for field in fields])
        raise UnknownFieldError(
            f"Unknown field {word!r}. {did_you_mean(matches) or 'Name one of Megatron.'}", matches
        )
    rows = {(row.owner, row.attribute): row for row in run.prediction.rows}
    settings = []
    for role, field in homes:
        row, by = rows.get((role, field)), "default"
        if row is not None:
            by = row.by
        elif run.section(role).get(field) is not None:
            by = run.origin_of(f"{role}.{field}")
        value, decider = run.prediction.values[role].get(field), None
        if row is None or row.by == role:
            decider = run.weakness(f"{role}.{field}")
        dropped = run.reading.dropped_of(f"{role}.{field}")
        setting = {
            "key": f"{role}.{field}",
            "value": value,
            "by": by,
            "decided_by": decider,
            "dropped": dropped,
        }
        settings.append(setting)
    return {
        "field": word,
        "config": run.name,
        "settings": settings,
        "reading": run.reading.to_dict(),
    }


def _setting_text(setting: Mapping[str, Any], config: str) -> str:
    """Return the sentence about one setting of a file's run."""
    key, value, decider = setting["key"], setting["value"], setting["decided_by"]
    sentence = f"{key} is {value!r} in {config}: {setting['by']}."
    if decider is not None:
        sentence = f"{key} is not known from {config}: {decider} may set it; {value!r} is assumed."
    return " ".join([sentence, *setting["dropped"]])


def _traces(run: RunFolder, field: str) -> dict[str, Any]:
    rows = [
        row
        for row in run.sync.get("rows", ())
        if field in {row["field"], f"{row['owner']}.{row['attribute']}"}
    ]
    paths = {
        field,
        f"mixed_precision.{field}",
        *(f"{row['owner']}.{row['attribute']}" for row in rows),
    }
    findings = [*run.findings.get("findings", ()), *run.sync.get("findings", ())]
    about = [
        f"{one['severity']}: {one['rule']}"
        for one in findings
        if paths & set(re.findall(r"[\w.]+", one["path"]))
    ]
    ran = effect_in(run, field) if field in FIELD_DEFAULTS else ""
    return {"run": str(run.path), "rows": rows, "findings": about, "ran": ran}


def _field_name(field: str) -> str:
    wanted = field.rpartition(".")[2]
    names = field_names(MixedPrecisionConfig)
    renamed = {route.attribute: route.field for route in ROUTES if route.attribute}
    if wanted in names or wanted in renamed:
        return wanted if wanted in names else renamed[wanted]
    known = list(dict.fromkeys([*names, *renamed]))
    matches = (
        close_matches(wanted, known)
        or [name for name in known if len(wanted) > 2 and wanted in name][:3]
    )
    remedy = did_you_mean(matches) or "`precision-bridge explain` lists them."
    raise UnknownFieldError(f"Unknown field {field!r}. {remedy}", matches)


def _home(route: Route, default: object) -> dict[str, Any]:
    family = {"fp8": "while fp8 is on", "fp4": "while fp4 is on", "low": "while fp8 or fp4 is on"}
    about = notes()[route.owner].get(route.field, {})
    return {
        "owner": route.owner,
        "class": OWNERS[route.owner],
        "attribute": route.attribute,
        "since_megatron_core": route.since
        if route.attribute and route.owner != "process"
        else None,
        "written": WRITTEN[route.rule].format(default=repr(default)),
        "acts": f"while fp8_recipe is {route.scheme}"
        if route.scheme
        else family.get(route.family or "", "always"),
        "note": about.get("note", ""),
        "source": about.get("source", ""),
    }


def _field_text(found: dict[str, Any]) -> str:
    lines = []
    if "meaning" in found:
        lines = [
            f"{found['field']}: {found['type']} = {found['default']!r}",
            f"  {found['meaning']}",
        ]
    if found.get("read_by_schemes"):
        lines.append(f"  Read under: {', '.join(found['read_by_schemes'])}.")
    for home in found.get("homes", ()):
        if home["attribute"] is None:
            lines.append(f"  No field of {home['class']}. {home['note']}")
            continue
        since = (
            f", megatron-core >= {home['since_megatron_core']}"
            if home["since_megatron_core"]
            else ""
        )
        lines.append(f"  {home['owner']}.{home['attribute']} ({home['class']}{since})")
        lines.append(
            f"    Acts {home['acts']}. {home['written'][:1].upper()}{home['written'][1:]}."
        )
        if home["note"]:
            lines.append(f"    {home['note']}")
        if home["source"]:
            lines.append(f"    Source: {home['source']}.")
    if "in_recipe" in found:
        row = found["in_recipe"]
        how = f"stated by {row['by']}" if row["stated"] else "not stated"
        lines.append(f"  In {row['recipe']}: {row['value']!r}, {how}.")
    if "setting" in found:
        lines += _setting_lines(found["setting"], found["in_run"]["run"])
    if "in_run" in found and (
        "meaning" in found or found["in_run"]["rows"] or found["in_run"]["findings"]
    ):
        lines += _run_lines(found["in_run"])
    return "\n".join(lines)


def _setting_lines(setting: dict[str, Any], run: str) -> list[str]:
    lines = [f"  {setting['key']} is {setting['value']!r} in the run {run}: {setting['by']}."]
    before = f"the default was {setting['default']!r}"
    for origin, value in setting["set_by"].items():
        lines.append(f"    Set by {origin}: {value!r}; {before}.")
        before = f"the value of {origin} was {value!r}"
    return [*lines, *([f"    {setting['ran']}."] if setting["ran"] else [])]


def _run_lines(run: dict[str, Any]) -> list[str]:
    lines = [f"  In the run {run['run']}:"]
    for row in run["rows"]:
        change = (
            f"is {row['new']}, before {row['old']}"
            if row["old"] != row["new"]
            else f"is {row['new']}, as before"
        )
        lines.append(
            f"    {row['owner']}.{row['attribute']} {change}: by {row['by']} ({row['why']})."
        )
    if not run["rows"]:
        lines.append("    The sync wrote it into no config.")
    lines += [f"    {finding}." for finding in run["findings"]]
    lines += [f"    {run['ran']}."] if run["ran"] else []
    return lines


def _rule(word: str) -> Rule[RunContext]:
    rule = BY_ID.get(word.upper())
    if rule is None:
        matches = [name for name in BY_ID if name.startswith(word.upper())][
            :3
        ]  # a number is near to no other
        hint = did_you_mean(matches) or f"`precision-bridge explain {LIST}` lists them."
        raise UnknownFieldError(f"Unknown rule {word!r}. {hint}", matches)
    return rule


def rule_dict(rule: Rule[RunContext]) -> dict[str, Any]:
    """Return everything about a rule as plain data."""
    return {
        "id": rule.id,
        "severity": rule.severity,
        "title": rule.title,
        "about": rule.setting,
        "examples": _examples()[rule.id],
        "explanation": rule.explanation,
        "holds_for": [str(versions) for versions in rule.versions],
        "source": rule.source,
        "evidence": rule.evidence,
        "evidence_means": EVIDENCE[rule.evidence],
    }


@cache
def _examples() -> dict[str, list[str]]:
    """Return id -> the findings of a run that breaks the rule, each as "severity path: rule, got value. Remedies."."""
    text = resources.files("bridge.rules").joinpath("examples.yaml").read_text(encoding="utf-8")
    found: dict[str, list[str]] = yaml.safe_load(text)
    return found


def _rule_text(row: dict[str, Any]) -> str:
    lines = [f"{row['id']}, {row['severity']}: {row['title']}"]
    if row["explanation"]:
        lines.append(f"  {row['explanation']}")
    lines.append("  The finding of a run that breaks it:")
    lines += [f"    {example}" for example in row["examples"]]
    lines += [f"  Holds for {versions}." for versions in row["holds_for"]]
    lines.append(f"  Source: {row['source']}.")
    lines.append(f"  Evidence: {row['evidence']} ({row['evidence_means']}).")
    lines.append(
        f"  Silence it with --silence {row['id']}=REASON; the reason is kept with the run."
    )
    return "\n".join(lines)
