"""Megatron-LM: ``--mixed-precision-recipe NAME`` through the hook for extra arguments of its parser.

    args = parse_and_validate_args(extra_args_provider=add_recipe_argument)

The hook runs before Megatron-LM parses. The recipe's values become the defaults of the parser's own
arguments, so that Megatron-LM validates them as if they stood on the command line. An argument that
does stand there is stated over the recipe.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.errors import BridgeError, RunConfigError
from bridge.precision.fields import COMMAND_LINE
from bridge.precision.mode import label_of, mode_of
from bridge.precision.statements import source_of
from bridge.preflight.context import CheckContext
from bridge.preflight.run import Run
from bridge.read.megatron_lm.flags import BY_NAME, OWNERS
from bridge.registry.config import MixedPrecisionConfig
from bridge.registry.registry import get_mixed_precision_config
from bridge.rules.rule import ask
from bridge.rules.rulebook import BY_ID
from bridge.rules.sync_row import SyncRow
from bridge.sync.report import SyncReport
from bridge.sync.synchroniser import megatron_version
from bridge.target.fields import FIELDS
from bridge.trainers.arguments import exported

OPTION = "--mixed-precision-recipe"
DROP_ONE = "Drop that argument, or take a recipe of its mode."


def add_recipe_argument(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--mixed-precision-recipe``, and give the parser the values of the recipe that the command line names.

    The first process prints the report: every argument with Megatron-LM's default,
    the new value and who decided. A recipe that cannot be used ends the program
    with one sentence and exit code 2.

    Args:
        parser: Megatron-LM's parser, as it hands it to an `extra_args_provider`. A provider of your
            own comes first: ``lambda parser: add_recipe_argument(add_my_arguments(parser))``.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("precision recipe")
    group.add_argument(
        OPTION, metavar="NAME", help="registered recipe that sets the precision arguments"
    )
    given, _ = _set_by(parser)
    name = given.get("mixed_precision_recipe")
    if name is not None:
        try:
            report = _apply(parser, name, given)
        except BridgeError as error:
            parser.exit(2, f"{error}\n")
        if os.environ.get("RANK", "0") == "0":
            sys.stdout.write(f"{report}\n")
    return parser


def _set_by(
    parser: argparse.ArgumentParser, words: Sequence[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that the command line and `words` set, without defaults, and the words it does not know."""
    line = [*sys.argv[1:], *words]
    names = vars(parser.parse_known_args(line)[0])
    found, unknown = parser.parse_known_args(line, argparse.Namespace(**dict.fromkeys(names)))
    return {name: value for name, value in vars(found).items() if value is not None}, unknown


def _apply(parser: argparse.ArgumentParser, name: str, given: Mapping[str, Any]) -> SyncReport:
    if given.get("yaml_cfg") is not None:
        rule = (
            "cannot be used together with --yaml-cfg, whose file takes the place of all arguments"
        )
        raise RunConfigError.of(OPTION, rule, name, "State the precision in that file.")
    config = get_mixed_precision_config(name)
    modes = [
        f"--{mode}" for mode in ("bf16", "fp16") if given.get(mode) and not getattr(config, mode)
    ]
    mode_of_recipe = mode_of(config)
    if modes and mode_of_recipe != "fp32":
        raise RunConfigError.of(
            OPTION, f"its mode is {mode_of_recipe}, and {modes[0]} asks for another", name, DROP_ONE
        )
    flags = [(BY_NAME[dest], value) for dest, value in given.items() if dest in BY_NAME]
    stated = {
        flag.field: value if flag.kind == "value" else bool(value) is (flag.kind == "on")
        for flag, value in flags
    }
    config.override(COMMAND_LINE, **stated)
    words: list[str] = exported("megatron-lm", config).payload
    both, unknown = _set_by(parser, words)
    missing = [word for word in words if word in unknown]
    if missing:
        rule = f"needs {missing[0]}, which Megatron-LM with megatron-core {megatron_version()} does not have"
        raise RunConfigError(f"{OPTION}: {rule}. Update it, or take another recipe.")
    values = {dest: value for dest, value in both.items() if dest not in given}
    rows = [_row(config, dest, parser.get_default(dest), value) for dest, value in values.items()]
    parser.set_defaults(**values)
    _require_sharding(parser, config, name)
    return SyncReport(
        precision=label_of(config), rows=tuple(rows), megatron_version=megatron_version()
    )


def _require_sharding(
    parser: argparse.ArgumentParser, config: MixedPrecisionConfig, name: str
) -> None:
    """Refuse weights that are stored in FP8 or FP4 where no argument shards the optimizer, by the rules of `check`."""
    given = {
        name: value
        for name, value in vars(parser.parse_known_args()[0]).items()
        if value is not None
    }
    owners: dict[str, Any] = {
        role: {name: given[name] for name in FIELDS[role] if name in given} for role in OWNERS
    }
    for finding in ask([BY_ID["PB301"], BY_ID["PB302"]], CheckContext(Run.of(config, **owners))):
        raise RunConfigError.of(OPTION, finding.rule, name, "Add --use-distributed-optimizer.")


def _row(config: MixedPrecisionConfig, dest: str, default: Any, value: Any) -> SyncRow:
    flag = BY_NAME.get(dest)
    return SyncRow(
        owner="args",
        attribute=dest,
        field=flag.field if flag is not None else None,
        old=default,
        new=value,
        verdict="agree" if value == default else "set",
        by=source_of(config, flag.field) if flag is not None else "recipe",
        why="instead of the parser's default",
    )
