"""`precision-bridge explain FIELD [NAME]`: a field's meaning, place and conditions.

`explain PB101`: a rule in full.

With ``--run RUN`` the value of a field, or of any key of the config, in a run: who set it, the
value that it replaced, and what ran.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bridge.cli.described_logs import DescribedLog, is_log, read_described_log
from bridge.cli.output import print_json
from bridge.cli.parser import add_json_option
from bridge.cli.recipes.named_recipe import NamedRecipe
from bridge.cli.recipes.show import format_fields_by_subject
from bridge.cli.run_arguments import read_without_overrides
from bridge.errors import UnknownFieldError, close_matches, did_you_mean
from bridge.precision.config import FIELD_DEFAULTS, FIELDS, FIELDS_BY_SUBJECT
from bridge.precision.field_docs import read_field_docs
from bridge.precision.statements import get_recipe_name, get_source, is_stated, list_field_names
from bridge.registry.config import MixedPrecisionConfig
from bridge.rules.rule import EVIDENCE, Rule
from bridge.rules.rulebook import RULES, RULES_BY_ID
from bridge.rules.run_context import RunContext
from bridge.rules.sync_row import SyncRow
from bridge.runtime.audit.run_folder import RunFolder
from bridge.runtime.audit.run_log import RunLog
from bridge.runtime.audit.setting import (
    LOSS_SCALE_SUBJECT,
    Setting,
    describe_effect,
    describe_loss_scale,
    describe_trace,
)
from bridge.sync.routes import OWNER_CLASS_NAMES, ROUTES, Route, get_routes, load_route_notes
from bridge.target.fields import OWNER_FIELDS as VALUES

if TYPE_CHECKING:
    from bridge.preflight.run import Run

RULE_LIST = "rules"
FIELD_WIDTH = max(map(len, FIELD_DEFAULTS))
"""Of the longest field."""

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_json_option(parser)
    parser.epilog = format_fields_by_subject()
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
    text = "folder of a run, or a log of another trainer: what the field was in it"
    parser.add_argument("--run", dest="run_folder", metavar="RUN", help=text)


def run(args: argparse.Namespace) -> None:
    """Print everything about a field or a rule."""
    content: Any
    if args.field == RULE_LIST:
        content = list(map(rule_to_dict, RULES))
        text = _format_rule_list()
    elif args.field is None:
        content = {name: doc.text for name, doc in read_field_docs(MixedPrecisionConfig).items()}
        text = _format_field_list(content)
    elif re.fullmatch(r"[Pp][Bb]\d+", args.field):
        content = rule_to_dict(_get_rule(args.field))
        text = _format_rule(content)
    elif args.run_folder is not None and is_log(Path(args.run_folder)):
        described = read_described_log(Path(args.run_folder))
        content = explain_in_log(args.field, described, args.name, config_dir=args.config_dir)
        text = _format_log(content, described)
    elif args.run_folder is not None:
        folder = Path(args.run_folder)
        content = explain_in_run(args.field, folder, args.name, config_dir=args.config_dir)
        text = _format_field(content)
    elif args.config is not None:
        values = read_without_overrides(args, args.config, strict=False)
        content = explain_in_file(args.field, values)
        text = _format_file(content, values.reading.lines)
    else:
        content = explain_field(args.field, args.name, config_dir=args.config_dir)
        text = _format_field(content)
    if args.json:
        print_json(content)
    else:
        print(text)


def _format_rule_list() -> str:
    """Return a line for each rule."""
    lines = []
    for rule in RULES:
        lines.append(f"{rule.id}  {rule.severity:<7}  {rule.title}")
    return "\n".join(lines)


def _format_field_list(meanings: Mapping[str, str]) -> str:
    """Return a paragraph for each subject, with a line for each field."""
    paragraphs = []
    for subject, names in FIELDS_BY_SUBJECT.items():
        lines = [subject]
        for name in names:
            lines.append(f"  {name:<{FIELD_WIDTH}} {meanings[name]}")
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def _format_file(content: Mapping[str, Any], reading: Iterable[str]) -> str:
    """Return the sentences about a field in a file's run, and those about the file."""
    lines = []
    for setting in content["settings"]:
        lines.append(_format_setting(setting, content["config"]))
    for line in reading:
        lines.append(f"  {line}")
    return "\n".join(lines)


def explain_field(
    field: str, recipe: str | None = None, *, config_dir: str | None = None
) -> dict[str, Any]:
    """Return everything known about a field, in a recipe too, as plain data.

    Megatron's names are taken too.
    """
    name = _resolve_field_name(field)
    default, doc = getattr(MixedPrecisionConfig, name), read_field_docs(MixedPrecisionConfig)[name]
    content: dict[str, Any] = {
        "field": name,
        "type": doc.annotation,
        "default": default,
        "meaning": doc.text,
    }
    content["homes"] = [_home_to_dict(route, default) for route in get_routes(name)]
    content["read_by_schemes"] = sorted({*FIELDS[name].schemes})
    if recipe is not None:
        named = NamedRecipe.from_name(recipe, config_dir)
        config = named.config
        content["in_recipe"] = {
            "recipe": get_recipe_name(config) or named.name,
            "value": config.to_dict(full=True)[name],
            "stated": is_stated(config, name),
            "by": get_source(config, name),
        }
    return content


def explain_in_run(
    word: str, folder: Path, recipe: str | None = None, *, config_dir: str | None = None
) -> dict[str, Any]:
    """Return the values that a field had in a run, as plain data.

    The field is any key of the run's config, or a field of the precision.

    A precision's field has its `explain_field`, and under `explain_in_run` the `rows` of the sync, `findings`
    of the check and the sync about it, and `ran`, one sentence on its trace in the records, empty
    where there is none. Another field has its `Setting` under `setting`, with the rows of the sync
    and the findings too.
    """
    run = RunFolder.from_path(folder)
    section, _, name = word.rpartition(".")
    is_precision = name in FIELD_DEFAULTS or any(name == route.attribute for route in ROUTES)
    setting = None
    stated: dict[str, Any] = {}
    if not is_precision or section not in ("", "mixed_precision"):
        setting = Setting.from_run(run, word)
    if setting is not None:
        stated["setting"] = asdict(setting)
    if setting is not None and not is_precision:
        return {"field": setting.key, **stated, "in_run": _collect_traces(run, setting.key)}
    content = explain_field(word, recipe, config_dir=config_dir)
    return {**content, "in_run": _collect_traces(run, content["field"]), **stated}


def explain_in_file(word: str, run: Run) -> dict[str, Any]:
    """Return the values of a field of Megatron's configs in a file's run, and who set them.

    The name of a field of the precision stands for the fields of the configs that it is written to.
    """
    section, _, name = word.rpartition(".")
    homes = []
    for role, field in _find_config_fields(name):
        if role in VALUES and section in ("", "mixed_precision", role):
            homes.append((role, field))
    if not homes:
        raise _make_unknown_setting_error(word, name)
    rows = {(row.owner, row.attribute): row for row in run.prediction.rows}
    settings = []
    for role, field in homes:
        settings.append(_setting_to_dict(role, field, run, rows.get((role, field))))
    return {
        "field": word,
        "config": run.name,
        "settings": settings,
        "reading": run.reading.to_dict(),
    }


def explain_in_log(
    word: str, described: DescribedLog, recipe: str | None = None, *, config_dir: str | None = None
) -> dict[str, Any]:
    """Return the values that a field had in a run by its log, as plain data.

    They are those of `explain_in_file` where the log has arguments, and else the field's `explain_field`.
    Under `explain_in_log` stands the trace of the field in the log, empty where there is none.
    """
    log = described.log
    trace = _describe_log_trace(log, word.rpartition(".")[2])
    if described.run is not None:
        content = explain_in_file(word, described.run)
    elif trace and word.rpartition(".")[2] not in FIELDS:
        content = {"field": word}
    else:
        content = explain_field(word, recipe, config_dir=config_dir)
    return {**content, "in_log": {"log": str(log.path), "source": log.source, "ran": trace}}


def _describe_log_trace(log: RunLog, name: str) -> str:
    """Return one sentence on the trace of a field in a log; empty without a trace."""
    subject = None
    if name in FIELDS:
        subject = FIELDS[name].subject
    if subject is not None and subject.title == LOSS_SCALE_SUBJECT and log.values("loss_scale"):
        return describe_loss_scale(log.records())
    if name in ("lr", "min_lr") and log.values("learning_rate"):
        return describe_trace(f"optimizer.{name}", log.records())
    if name == "train_iters":
        return describe_trace("train.train_iters", log.records())
    return ""


def _format_log(content: dict[str, Any], described: DescribedLog) -> str:
    """Return the sentences about a field in a log."""
    log = described.log
    if described.run is None:
        text = _format_field(content) or content["field"]
        lines = [text, f"  Its value in {log.path} is not known: {log.source} without arguments."]
    else:
        lines = [_format_file(content, described.run.reading.lines)]
    trace = content["in_log"]["ran"]
    if trace:
        lines.append(f"  {trace}.")
    return "\n".join(lines)


def _make_unknown_setting_error(word: str, name: str) -> UnknownFieldError:
    """Return the error about a word that names no field of Megatron's configs."""
    known: list[str] = []
    for fields in VALUES.values():
        known.extend(fields)
    matches = close_matches(name, known)
    hint = did_you_mean(matches) or "Name one of Megatron."
    return UnknownFieldError(f"Unknown field {word!r}. {hint}", matches)


def _setting_to_dict(role: str, field: str, run: Run, row: SyncRow | None) -> dict[str, Any]:
    """Return the value of a field in a file's run, and what decides it, as plain data.

    `row` is the row of the sync that writes the field; None: the sync does not write it.
    """
    path = f"{role}.{field}"
    by = "default"
    if row is not None:
        by = row.by
    elif run.section(role).get(field) is not None:
        by = run.origin_of(path)
    decider = None
    if row is None or row.by == role:
        decider = run.find_decider(path)
    return {
        "key": path,
        "value": run.prediction.values[role].get(field),
        "by": by,
        "decided_by": decider,
        "dropped": run.reading.describe_dropped(path),
    }


def _find_config_fields(name: str) -> list[tuple[str, str]]:
    """Return (owner, field) of each config with a field, of the precision or of Megatron's own."""
    homes: list[tuple[str, str]] = []
    for route in ROUTES:
        if name == route.field and route.attribute:
            homes.append((route.owner, route.attribute))
    if homes:
        return homes
    return [(role, name) for role in VALUES if name in VALUES[role]]


def _format_setting(setting: Mapping[str, Any], config: str) -> str:
    """Return the sentence about one setting of a file's run."""
    key, value, decider = setting["key"], setting["value"], setting["decided_by"]
    sentence = f"{key} is {value!r} in {config}: {setting['by']}."
    if decider is not None:
        sentence = f"{key} is not known from {config}: {decider} may set it; {value!r} is assumed."
    return " ".join([sentence, *setting["dropped"]])


def _collect_traces(run: RunFolder, field: str) -> dict[str, Any]:
    rows = []
    paths = {field, f"mixed_precision.{field}"}
    for row in run.sync.get("rows", ()):
        path = f"{row['owner']}.{row['attribute']}"
        if field in {row["field"], path}:
            rows.append(row)
            paths.add(path)
    about = []
    for finding in (*run.findings.get("findings", ()), *run.sync.get("findings", ())):
        if paths & set(re.findall(r"[\w.]+", finding["path"])):
            about.append(f"{finding['severity']}: {finding['rule']}")
    ran = ""
    if field in FIELD_DEFAULTS:
        ran = describe_effect(run, field)
    return {"run": str(run.path), "rows": rows, "findings": about, "ran": ran}


def _resolve_field_name(field: str) -> str:
    wanted = field.rpartition(".")[2]
    names = list_field_names(MixedPrecisionConfig)
    renamed = {route.attribute: route.field for route in ROUTES if route.attribute}
    if wanted in names:
        return wanted
    if wanted in renamed:
        return renamed[wanted]
    known = list(dict.fromkeys([*names, *renamed]))
    matches = close_matches(wanted, known)
    if not matches and len(wanted) > 2:
        matches = [name for name in known if wanted in name][:3]
    remedy = did_you_mean(matches) or "`precision-bridge explain` lists them."
    raise UnknownFieldError(f"Unknown field {field!r}. {remedy}", matches)


def _home_to_dict(route: Route, default: object) -> dict[str, Any]:
    family = {"fp8": "while fp8 is on", "fp4": "while fp4 is on", "low": "while fp8 or fp4 is on"}
    notes_of_field = load_route_notes()[route.owner].get(route.field, {})
    since = None
    if route.attribute and route.owner != "process":
        since = route.since
    acts = family.get(route.family or "", "always")
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


def _format_field(content: dict[str, Any]) -> str:
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
        how = "not stated"
        if row["stated"]:
            how = f"stated by {row['by']}"
        lines.append(f"  In {row['recipe']}: {row['value']!r}, {how}.")
    if "setting" in content:
        lines += _format_run_setting(content["setting"], content["in_run"]["run"])
    if "in_run" in content:
        traces = content["in_run"]
        if "meaning" in content or traces["rows"] or traces["findings"]:
            lines += _format_run(traces)
    return "\n".join(lines)


def _format_home(home: dict[str, Any]) -> list[str]:
    """Return the lines about one config that holds a field."""
    if home["attribute"] is None:
        return [f"  No field of {home['class']}. {home['note']}"]
    since = ""
    if home["since_megatron_core"]:
        since = f", megatron-core >= {home['since_megatron_core']}"
    written = f"{home['written'][:1].upper()}{home['written'][1:]}"
    lines = [
        f"  {home['owner']}.{home['attribute']} ({home['class']}{since})",
        f"    Acts {home['acts']}. {written}.",
    ]
    if home["note"]:
        lines.append(f"    {home['note']}")
    if home["source"]:
        lines.append(f"    Source: {home['source']}.")
    return lines


def _format_run_setting(setting: dict[str, Any], run: str) -> list[str]:
    lines = [f"  {setting['key']} is {setting['value']!r} in the run {run}: {setting['by']}."]
    before = f"the default was {setting['default']!r}"
    for origin, value in setting["set_by"].items():
        lines.append(f"    Set by {origin}: {value!r}; {before}.")
        before = f"the value of {origin} was {value!r}"
    if setting["ran"]:
        lines.append(f"    {setting['ran']}.")
    return lines


def _format_run(run: dict[str, Any]) -> list[str]:
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


def _get_rule(word: str) -> Rule[RunContext]:
    rule = RULES_BY_ID.get(word.upper())
    if rule is None:
        # By its beginning: a number is near to no other.
        matches = [name for name in RULES_BY_ID if name.startswith(word.upper())][:3]
        hint = did_you_mean(matches) or f"`precision-bridge explain {RULE_LIST}` lists them."
        raise UnknownFieldError(f"Unknown rule {word!r}. {hint}", matches)
    return rule


def rule_to_dict(rule: Rule[RunContext]) -> dict[str, Any]:
    """Return everything about a rule as plain data."""
    return {
        "id": rule.id,
        "severity": rule.severity,
        "title": rule.title,
        "about": rule.setting,
        "examples": _load_examples()[rule.id],
        "explanation": rule.explanation,
        "holds_for": list(map(str, rule.versions)),
        "source": rule.source,
        "evidence": rule.evidence,
        "evidence_means": EVIDENCE[rule.evidence],
    }


@cache
def _load_examples() -> dict[str, list[str]]:
    """Return id -> the findings of a run that breaks the rule.

    A finding is "severity path: rule, got value. Remedies.".
    """
    text = resources.files("bridge.rules").joinpath("examples.yaml").read_text(encoding="utf-8")
    examples: dict[str, list[str]] = yaml.safe_load(text)
    return examples


def _format_rule(row: dict[str, Any]) -> str:
    lines = [f"{row['id']}, {row['severity']}: {row['title']}"]
    if row["explanation"]:
        lines.append(f"  {row['explanation']}")
    lines.append("  The finding of a run that breaks it:")
    for example in row["examples"]:
        lines.append(f"    {example}")
    for versions in row["holds_for"]:
        lines.append(f"  Holds for {versions}.")
    lines.append(f"  Source: {row['source']}.")
    lines.append(f"  Evidence: {row['evidence']} ({row['evidence_means']}).")
    silenced = f"--silence {row['id']}=REASON"
    lines.append(f"  Silence it with {silenced}; the reason is kept with the run.")
    return "\n".join(lines)
