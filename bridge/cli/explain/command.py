"""`precision-bridge explain FIELD [NAME]`: a field, a rule, or a setting in a run."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.cli.described_logs import is_log, read_described_log
from bridge.cli.explain.field import explain_field, format_field, format_field_list
from bridge.cli.explain.in_file import explain_in_file, format_in_file
from bridge.cli.explain.in_log import explain_in_log, format_in_log
from bridge.cli.explain.in_run import explain_in_run
from bridge.cli.explain.rule import (
    RULE_LIST,
    format_rule,
    format_rule_list,
    get_rule,
    rule_to_dict,
)
from bridge.cli.output import print_json
from bridge.cli.parser import add_json_option
from bridge.cli.recipes.show import format_fields_by_subject
from bridge.cli.run_arguments import read_without_overrides
from bridge.precision.field_docstrings import read_field_docs
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.rules.rulebook import RULES

RULE_ID = re.compile(r"[Pp][Bb]\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Explanation:
    """The answer of the command."""

    content: Any
    """The answer as plain data."""
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_json_option(parser)
    parser.epilog = format_fields_by_subject()
    help_text = (
        "field, by its own name or Megatron's, or a rule's id; without it, all fields are listed"
    )
    parser.add_argument("field", nargs="?", help=help_text)
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
    help_text = "folder of a run, or a log of another trainer: what the field was in it"
    parser.add_argument("--run", dest="run_folder", metavar="RUN", help=help_text)


def run(args: argparse.Namespace) -> None:
    """Print the explanation of a field, a rule or a setting."""
    explanation = _explain(args)
    if args.json:
        print_json(explanation.content)
    else:
        print(explanation.text)


def _explain(args: argparse.Namespace) -> _Explanation:
    """Return the explanation that the arguments choose."""
    if args.field is None:
        docs = read_field_docs(MixedPrecisionConfig)
        meanings = {name: doc.text for name, doc in docs.items()}
        return _Explanation(content=meanings, text=format_field_list(meanings))
    if args.field == RULE_LIST:
        return _Explanation(content=list(map(rule_to_dict, RULES)), text=format_rule_list())
    if RULE_ID.fullmatch(args.field):
        rule = rule_to_dict(get_rule(args.field))
        return _Explanation(content=rule, text=format_rule(rule))
    if args.run_folder is not None:
        return _explain_in_run_or_log(args, Path(args.run_folder))
    if args.config is not None:
        described_run = read_without_overrides(args, args.config, strict=False)
        content = explain_in_file(args.field, described_run)
        explanation = format_in_file(content, described_run.reading.lines)
        return _Explanation(content=content, text=explanation)
    content = explain_field(args.field, args.name, config_dir=args.config_dir)
    return _Explanation(content=content, text=format_field(content))


def _explain_in_run_or_log(args: argparse.Namespace, path: Path) -> _Explanation:
    """Return the explanation of a setting in a run of ours, or in another trainer's log."""
    if is_log(path):
        described = read_described_log(path)
        content = explain_in_log(args.field, described, args.name, config_dir=args.config_dir)
        return _Explanation(content=content, text=format_in_log(content, described))
    content = explain_in_run(args.field, path, args.name, config_dir=args.config_dir)
    return _Explanation(content=content, text=format_field(content))
