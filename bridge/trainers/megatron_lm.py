"""``--mixed-precision-recipe NAME`` for Megatron-LM, through its parser's hook for extra arguments.

    args = parse_and_validate_args(extra_args_provider=add_recipe_argument)

The hook runs before Megatron-LM parses its command line. The values of the recipe become the
defaults of the parser's arguments, so Megatron-LM validates them like arguments of the command
line. An argument on the command line is stated over the recipe.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.errors import BridgeError, RunConfigError
from bridge.precision.mode import format_label, get_mode
from bridge.precision.stated_field import COMMAND_LINE
from bridge.precision.statements import get_source
from bridge.preflight.check_context import CheckContext
from bridge.preflight.run import Run
from bridge.read.megatron_lm.flags import FLAG_OF_NAME, OWNERS
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config
from bridge.rules.rule import evaluate_rules
from bridge.rules.rulebook import RULES_BY_ID
from bridge.rules.sync_row import Decider, SyncRow, Verdict
from bridge.sync.report import SyncReport
from bridge.sync.synchroniser import get_megatron_version
from bridge.target.fields import OWNER_FIELDS
from bridge.trainers.arguments import export_to_trainer

RECIPE_OPTION = "--mixed-precision-recipe"
MODE_REMEDY = "Drop that argument, or take a recipe of its mode."


def add_recipe_argument(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--mixed-precision-recipe``, and set the values of the named recipe as defaults.

    The first process prints a report: every changed argument with Megatron-LM's default, the new
    value and its origin. A recipe that cannot be used ends the program with an error message and
    exit code 2.

    Args:
        parser: Megatron-LM's parser, which it passes to an `extra_args_provider`. A provider of a
            team comes first: ``lambda parser: add_recipe_argument(add_my_arguments(parser))``.

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
    parser: argparse.ArgumentParser, recipe_tokens: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that a command line states, without the parser's defaults.

    Args:
        parser: Megatron-LM's parser.
        recipe_tokens: Tokens that are parsed after the command line of this process.

    Returns:
        Destination -> value of the stated arguments, and the tokens that the parser does not know.
    """
    tokens = [*sys.argv[1:], *recipe_tokens]
    destinations = vars(parser.parse_known_args(tokens)[0])
    # argparse sets a default only if the namespace has no such attribute. So every attribute is
    # None before the second parse. After it, an attribute that is not None was stated.
    without_defaults = argparse.Namespace(**dict.fromkeys(destinations))
    arguments, unknown_tokens = parser.parse_known_args(tokens, without_defaults)
    return _drop_none(arguments), unknown_tokens


def _drop_none(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return destination -> value of the arguments that are not None."""
    return {name: value for name, value in vars(arguments).items() if value is not None}


def _apply_recipe(
    parser: argparse.ArgumentParser, name: str, command_line: Mapping[str, Any]
) -> SyncReport:
    """Set the values of a recipe as the parser's defaults, and return the report.

    Args:
        parser: Megatron-LM's parser.
        name: Name of the recipe.
        command_line: Arguments of the command line. They are stated over the recipe.

    Raises:
        BridgeError: The recipe cannot be used with this parser or this command line.
    """
    if command_line.get("yaml_cfg") is not None:
        rule = (
            "cannot be used together with --yaml-cfg, whose file takes the place of all arguments"
        )
        raise RunConfigError.of(RECIPE_OPTION, rule, name, "State the precision in that file.")
    config = get_mixed_precision_config(name)
    _require_same_mode(config, name, command_line)
    config.override(COMMAND_LINE, **_collect_stated_fields(command_line))
    defaults = _parse_recipe_arguments(parser, config)
    for destination in command_line:
        defaults.pop(destination, None)
    rows = []
    for destination, value in defaults.items():
        old = parser.get_default(destination)
        rows.append(_make_sync_row(config, destination, old, value))
    before = {destination: parser.get_default(destination) for destination in defaults}
    parser.set_defaults(**defaults)
    try:
        _require_sharded_optimizer(parser, config, name)
    except RunConfigError:
        parser.set_defaults(**before)
        raise
    return SyncReport(
        precision=format_label(config), rows=tuple(rows), megatron_version=get_megatron_version()
    )


def _parse_recipe_arguments(
    parser: argparse.ArgumentParser, config: MixedPrecisionConfig
) -> dict[str, Any]:
    """Return destination -> value of the arguments of a recipe and of the command line.

    Raises:
        PayloadError: Megatron-LM cannot run the formats of the recipe.
        RunConfigError: The parser of this release has no such argument.
    """
    recipe_tokens: list[str] = export_to_trainer("megatron-lm", config).payload
    arguments, unknown_tokens = _parse_stated_arguments(parser, recipe_tokens)
    missing = [token for token in recipe_tokens if token in unknown_tokens]
    if missing:
        raise RunConfigError(
            f"{RECIPE_OPTION}: needs {missing[0]}, which Megatron-LM with megatron-core "
            f"{get_megatron_version()} does not have. Update it, or take another recipe."
        )
    return arguments


def _require_same_mode(
    config: MixedPrecisionConfig, name: str, command_line: Mapping[str, Any]
) -> None:
    """Refuse ``--bf16`` or ``--fp16`` on the command line if the recipe has the other mode.

    Raises:
        RunConfigError: The modes differ.
    """
    mode = get_mode(config)
    if mode == "fp32":
        return
    for option in ("bf16", "fp16"):
        if command_line.get(option) and not getattr(config, option):
            rule = f"its mode is {mode}, and --{option} asks for another"
            raise RunConfigError.of(RECIPE_OPTION, rule, name, MODE_REMEDY)


def _collect_stated_fields(command_line: Mapping[str, Any]) -> dict[str, Any]:
    """Return field -> value of the arguments that set a field of a precision."""
    fields = {}
    for destination, value in command_line.items():
        if destination not in FLAG_OF_NAME:
            continue
        flag = FLAG_OF_NAME[destination]
        if flag.kind == "value":
            fields[flag.field] = value
        else:
            # A flag of the kind "off" states the field as False.
            fields[flag.field] = bool(value) is (flag.kind == "on")
    return fields


def _require_sharded_optimizer(
    parser: argparse.ArgumentParser, config: MixedPrecisionConfig, name: str
) -> None:
    """Refuse weights that are stored in FP8 or FP4 if the optimizer is not sharded.

    The rules of `check` about it are evaluated on the arguments, as Megatron-LM will parse them.

    Raises:
        RunConfigError: A rule is broken.
    """
    arguments = _drop_none(parser.parse_known_args()[0])
    owners: dict[str, Any] = {}
    for owner_name in OWNERS:
        fields = OWNER_FIELDS[owner_name]
        owners[owner_name] = {name: arguments[name] for name in fields if name in arguments}
    context = CheckContext(Run.from_configs(config, **owners))
    for finding in evaluate_rules([RULES_BY_ID["PB301"], RULES_BY_ID["PB302"]], context):
        raise RunConfigError.of(
            RECIPE_OPTION, finding.rule, name, "Add --use-distributed-optimizer."
        )


def _make_sync_row(
    config: MixedPrecisionConfig, destination: str, default: Any, value: Any
) -> SyncRow:
    """Return the row of the report about an argument.

    Args:
        config: The recipe.
        destination: Name of the argument in the parsed namespace.
        default: Megatron-LM's default.
        value: The value of the recipe.
    """
    field = None
    # If no field of a precision sets the argument, the origin is the recipe as a whole.
    decider = Decider("source", "recipe")
    if destination in FLAG_OF_NAME:
        field = FLAG_OF_NAME[destination].field
        decider = Decider("source", get_source(config, field))
    verdict: Verdict = "set"
    if value == default:
        verdict = "agree"
    return SyncRow(
        owner="args",
        attribute=destination,
        field=field,
        old=default,
        new=value,
        verdict=verdict,
        by=decider,
        why="instead of the parser's default",
    )
