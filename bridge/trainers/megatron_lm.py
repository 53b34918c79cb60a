"""Megatron-LM: ``--mixed-precision-recipe NAME`` through its parser's hook for extra arguments.

    args = parse_and_validate_args(extra_args_provider=add_recipe_argument)

The hook runs before Megatron-LM parses. The recipe's values become the defaults of the parser's
arguments, so that Megatron-LM validates them like arguments of the command line. An argument that is
on the command line is stated over the recipe.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.errors import BridgeError, RunConfigError
from bridge.precision.fields import COMMAND_LINE
from bridge.precision.mode import format_label, get_mode
from bridge.precision.statements import get_source
from bridge.preflight.check_context import CheckContext
from bridge.preflight.run import Run
from bridge.read.megatron_lm.flags import FLAG_OF_NAME, OWNERS
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config
from bridge.rules.rule import evaluate_rules
from bridge.rules.rulebook import RULES_BY_ID
from bridge.rules.sync_row import SyncRow, Verdict
from bridge.sync.report import SyncReport
from bridge.sync.synchroniser import get_megatron_version
from bridge.target.fields import OWNER_FIELDS
from bridge.trainers.arguments import exported

RECIPE_OPTION = "--mixed-precision-recipe"
MODE_REMEDY = "Drop that argument, or take a recipe of its mode."


def add_recipe_argument(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--mixed-precision-recipe``, and set the values of the named recipe as defaults.

    The first process prints a report: every argument with Megatron-LM's default, the new value and
    its origin. A recipe that cannot be used ends the program with a sentence and exit code 2.

    Args:
        parser: Megatron-LM's parser, the argument of an `extra_args_provider`. Another provider
            comes first: ``lambda parser: add_recipe_argument(add_my_arguments(parser))``.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("precision recipe")
    group.add_argument(
        RECIPE_OPTION, metavar="NAME", help="registered recipe that sets the precision arguments"
    )
    command_line, _ = _parse_stated_arguments(parser)
    name = command_line.get("mixed_precision_recipe")
    if name is not None:
        try:
            report = _apply_recipe(parser, name, command_line)
        except BridgeError as error:
            parser.exit(2, f"{error}\n")
        if os.environ.get("RANK", "0") == "0":
            sys.stdout.write(f"{report}\n")
    return parser


def _parse_stated_arguments(
    parser: argparse.ArgumentParser, words: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that the command line and `words` set, and the words without an argument.

    Defaults are left out.
    """
    line = [*sys.argv[1:], *words]
    names = vars(parser.parse_known_args(line)[0])
    without_defaults = argparse.Namespace(**dict.fromkeys(names))
    arguments, unknown = parser.parse_known_args(line, without_defaults)
    return _drop_none(arguments), unknown


def _drop_none(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that are not None, by name."""
    return {name: value for name, value in vars(arguments).items() if value is not None}


def _apply_recipe(
    parser: argparse.ArgumentParser, name: str, command_line: Mapping[str, Any]
) -> SyncReport:
    """Set the values of a recipe as the parser's defaults, and return the report.

    Args:
        parser: Megatron-LM's parser.
        name: Name of the recipe.
        command_line: Arguments of the command line, which are stated over the recipe.

    Raises:
        BridgeError: The recipe cannot be used.
    """
    if command_line.get("yaml_cfg") is not None:
        rule = (
            "cannot be used together with --yaml-cfg, whose file takes the place of all arguments"
        )
        raise RunConfigError.of(RECIPE_OPTION, rule, name, "State the precision in that file.")
    config = get_mixed_precision_config(name)
    _require_same_mode(config, name, command_line)
    config.override(COMMAND_LINE, **_collect_stated_fields(command_line))
    words: list[str] = exported("megatron-lm", config).payload
    values, unknown = _parse_stated_arguments(parser, words)
    missing = [word for word in words if word in unknown]
    if missing:
        raise RunConfigError(
            f"{RECIPE_OPTION}: needs {missing[0]}, which Megatron-LM with megatron-core "
            f"{get_megatron_version()} does not have. Update it, or take another recipe."
        )
    for dest in command_line:
        values.pop(dest, None)
    rows = []
    for dest, value in values.items():
        rows.append(_make_sync_row(config, dest, parser.get_default(dest), value))
    parser.set_defaults(**values)
    _require_sharded_optimizer(parser, config, name)
    return SyncReport(
        precision=format_label(config), rows=tuple(rows), megatron_version=get_megatron_version()
    )


def _require_same_mode(
    config: MixedPrecisionConfig, name: str, command_line: Mapping[str, Any]
) -> None:
    """Refuse an argument that asks for another mode than the recipe's."""
    mode = get_mode(config)
    if mode == "fp32":
        return
    for asked in ("bf16", "fp16"):
        if command_line.get(asked) and not getattr(config, asked):
            rule = f"its mode is {mode}, and --{asked} asks for another"
            raise RunConfigError.of(RECIPE_OPTION, rule, name, MODE_REMEDY)


def _collect_stated_fields(command_line: Mapping[str, Any]) -> dict[str, Any]:
    """Return field -> value of the arguments that set a field of a precision."""
    fields = {}
    for dest, value in command_line.items():
        if dest not in FLAG_OF_NAME:
            continue
        flag = FLAG_OF_NAME[dest]
        if flag.kind == "value":
            fields[flag.field] = value
        else:
            fields[flag.field] = bool(value) is (flag.kind == "on")
    return fields


def _require_sharded_optimizer(
    parser: argparse.ArgumentParser, config: MixedPrecisionConfig, name: str
) -> None:
    """Refuse weights that are stored in FP8 or FP4 without a sharded optimizer, by rules of `check`."""
    arguments = _drop_none(parser.parse_known_args()[0])
    owners: dict[str, Any] = {}
    for role in OWNERS:
        owners[role] = {
            field: arguments[field] for field in OWNER_FIELDS[role] if field in arguments
        }
    context = CheckContext(Run.from_configs(config, **owners))
    for finding in evaluate_rules([RULES_BY_ID["PB301"], RULES_BY_ID["PB302"]], context):
        raise RunConfigError.of(
            RECIPE_OPTION, finding.rule, name, "Add --use-distributed-optimizer."
        )


def _make_sync_row(config: MixedPrecisionConfig, dest: str, default: Any, value: Any) -> SyncRow:
    """Return the row of the report for an argument."""
    field = None
    by = "recipe"
    if dest in FLAG_OF_NAME:
        field = FLAG_OF_NAME[dest].field
        by = get_source(config, field)
    verdict: Verdict = "set"
    if value == default:
        verdict = "agree"
    return SyncRow(
        owner="args",
        attribute=dest,
        field=field,
        old=default,
        new=value,
        verdict=verdict,
        by=by,
        why="instead of the parser's default",
    )
