"""Errors of Hydra and OmegaConf, translated into errors of this package.

Each message has the key, the rule, the value, its origin and the remedy. For an unknown key, Hydra
advises to put a plus sign before it. Here every key is checked, so that advice is left out.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import yaml
from hydra.core.config_loader import ConfigLoader
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from bridge.errors import (
    BridgeError,
    RunConfigError,
    UnknownRecipeError,
    close_matches,
    did_you_mean,
)
from bridge.precision.stated_field import COMMAND_LINE
from bridge.read.run_keys import PRECISION_KEY, RUN_CONFIG_KEYS
from bridge.registry.registry import REGISTRY

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError)
"""The errors that Hydra raises for a mistake of its user."""
COMPOSER_PACKAGES = frozenset({"hydra", "hydra_plugins", "omegaconf", "antlr4", "yaml"})
"""The packages that compose a config. They raise a plain ValueError for a mistake of their user."""

RUN_FOLDER_NOTE = "Run folder: "
"""The beginning of the note on an error that a job raised itself."""
MESSAGE_SENTENCES = {
    r"Could not delete from config\. '(?P<key>[^']*)' does not exist": (
        "{key}: has no value that could be taken back (command line). Remove ~{key}."
    ),
    r"Could not delete '(?P<key>[^']*)'\. No match in the defaults list": (
        "{key}: no option of this group is chosen that could be taken back (command line). "
        "Remove ~{key}."
    ),
    r"Could not append to config\. An item is already at '(?P<key>[^']*)'": (
        "{key}: has a value already (command line). Write {key}=VALUE, without a sign before it."
    ),
    r"(?P<key>\S+) appears more than once in the final defaults list": (
        "{key}: an option of this group is chosen already. "
        "Write {key}=OPTION, without a sign before it, or in a YAML file `override {key}: OPTION`."
    ),
    r"Could not override '(?P<key>[^']*)'\. No match in the defaults list": (
        "{key}: this group is not part of the primary config. Add it to its defaults list."
    ),
    r"Could not override '(?P<key>[^']*)'\.": "{key}: no such key (command line). {hint}",
    r"(?P<rule>Only one of --run.*|The --resolve flag .*)": "{rule}.",
}
"""Pattern in Hydra's message -> the sentence that replaces it. Hydra's errors have only a text."""


@contextmanager
def translate_errors(
    overrides: Sequence[str], loader: ConfigLoader | None = None
) -> Iterator[None]:
    """Translate the errors of a ``with`` block.

    A crash is raised unchanged. A crash is an error of the job, which has a note with the job's
    folder, or a ValueError of this package's code.

    Args:
        overrides: The overrides of the command line.
        loader: Hydra's loader, which knows the configs that can be found. None: no near names.
    """
    try:
        yield
    except COMPOSITION_ERRORS as error:
        notes = getattr(error, "__notes__", ())
        is_crash = any(note.startswith(RUN_FOLDER_NOTE) for note in notes)
        if type(error) is ValueError and not _is_raised_by_composer(error):
            is_crash = True
        if isinstance(error, BridgeError) or is_crash:
            raise
        raise translate_error(error, overrides, loader) from error


def _is_raised_by_composer(error: Exception) -> bool:
    """Return whether a package that composes configs raised an error, and not this package.

    The innermost function of those packages or of this package decides. Functions of the standard
    library below it are passed over.
    """
    own_package = __name__.partition(".")[0]
    innermost = own_package
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == own_package or package in COMPOSER_PACKAGES:
            innermost = package
    return innermost != own_package


def translate_error(
    error: Exception, overrides: Sequence[str], loader: ConfigLoader | None
) -> BridgeError:
    """Return the error to show instead of an error of Hydra.

    Args:
        error: The error of Hydra or of a package below it.
        overrides: The overrides of the command line, which may be the origin of the fault.
        loader: Hydra's loader, which knows the configs that can be found. None: no near names.
    """
    if type(error) is ValueError:
        too_long = _find_long_number(overrides)
        if too_long is not None:
            return too_long
    if isinstance(error, OverrideParseException):
        return _translate_parse_error(error)
    if isinstance(error, MissingConfigException):
        return _translate_missing_config(error, overrides, loader)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return RunConfigError(
            f"{mark.name}:{mark.line + 1}: is not YAML: {error.problem}. Correct the line."
        )
    if isinstance(error, OSError) and error.strerror:
        reason = f"{error.strerror}: {str(error.filename)!r:.80}"
        return RunConfigError(f"The configuration cannot be composed. {reason}.")
    return _translate_by_message(error)


def _translate_by_message(error: Exception) -> RunConfigError:
    """Return the error with the sentence for Hydra's message, or else with that message."""
    cause = None
    if isinstance(error.__cause__, OmegaConfBaseException):
        cause = error.__cause__
    for pattern, sentence in MESSAGE_SENTENCES.items():
        match = re.search(pattern, str(error))
        if match:
            siblings = getattr(cause, "parent_node", None) or ()
            known = list(map(str, siblings))
            hint, matches = _format_hint(str(getattr(cause, "key", "")), known)
            return RunConfigError(sentence.format(**match.groupdict(), hint=hint), matches)
    text = str(error)
    if cause is not None and str(cause) not in text:
        text = f"{text}\n{cause}"
    sentences = []
    for line in text.splitlines():
        is_plus_sign_advice = "use +" in line
        if line.strip() and not is_plus_sign_advice:
            sentences.append(line.strip())
    reason = "; ".join(sentences).rstrip(".")
    return RunConfigError(f"The configuration cannot be composed. {reason}.")


def _find_long_number(overrides: Sequence[str]) -> RunConfigError | None:
    """Return the error of a number with more digits than Python converts, or None."""
    max_digits = sys.get_int_max_str_digits()
    for override in overrides:
        key, _, value = override.partition("=")
        # A limit of 0 means no limit.
        if max_digits and re.search(rf"\d{{{max_digits + 1}}}", value):
            rule, remedy = f"must have at most {max_digits} digits", "Write a shorter number."
            return RunConfigError(
                f"{key}: {rule}, got {value!r:.80} ({COMMAND_LINE}). {remedy}", path=key, rule=rule
            )
    return None


def _translate_parse_error(error: OverrideParseException) -> RunConfigError:
    """Return the error of an argument that Hydra cannot parse as an override."""
    argument = str(error.override)
    is_key = "=" not in argument and argument.partition(".")[0] in RUN_CONFIG_KEYS
    if is_key:
        return RunConfigError(
            f"{argument!r} is no override (command line). Write {argument}=VALUE."
        )
    if argument in REGISTRY:
        assignment = f"{PRECISION_KEY}={argument}"
        return RunConfigError(f"{argument!r} is no override (command line). Write {assignment}.")
    return RunConfigError(
        f"{error.override!r} is no override (command line). Write KEY=VALUE, and quote a value "
        "with special characters: 'KEY=\"a=b\"'."
    )


def _format_hint(name: str, known: Sequence[str]) -> tuple[str, list[str]]:
    """Return the advice about an unknown name, and the known names that are similar."""
    matches = close_matches(name, known)
    hint = did_you_mean(matches)
    if not hint and known:
        hint = f"There are {', '.join(known)}."
    return hint or "Remove it.", matches


def _translate_missing_config(
    error: MissingConfigException, overrides: Sequence[str], loader: ConfigLoader | None
) -> BridgeError:
    """Return the error of a config that no folder of the search path has.

    Hydra names the config whose defaults list asks for it: "In 'config': ...". Without that name the
    primary config itself is missing.
    """
    message = str(error)
    parent = re.match(r"In '([^']*)'", message)
    name = error.missing_cfg_file
    if name and parent is None:
        rule = "no such config in the folders searched"
        return RunConfigError.of(
            "--config-name", rule, name, "Give the name of a YAML file there, without .yaml."
        )
    if not name or parent is None:
        first_line = message.partition("\n")[0].strip().rstrip(".")
        return RunConfigError(f"{first_line}. Give the name of one that exists.")
    group, _, option = name.rpartition("/")
    origin = f"{parent.group(1)}.yaml"
    for override in overrides:
        if override.lstrip("+").startswith(f"{group}=") and option in override:
            origin = COMMAND_LINE
    return _make_missing_option_error(group, option, origin, error, loader)


def _make_missing_option_error(
    group: str,
    option: str,
    origin: str,
    error: MissingConfigException,
    loader: ConfigLoader | None,
) -> BridgeError:
    """Return the error of an option that its group does not have, or of an unknown group.

    Args:
        group: The group; empty: the top of the tree.
        option: The option of the group.
        origin: The source that chose the option.
        error: Hydra's error.
        loader: Hydra's loader. None: the known groups and options cannot be named.
    """
    options = list(error.options or ())
    if not options and loader is not None:
        options = loader.get_group_options(group)
    got = f"got {option!r} ({origin})"
    name = str(error.missing_cfg_file)
    if name.startswith(f"{PRECISION_KEY}/") and name.endswith((".yaml", ".yml")):
        return _make_recipe_path_error(name.removeprefix(f"{PRECISION_KEY}/"))
    if group == PRECISION_KEY:
        return _make_unknown_recipe_error(option, options, got)
    if not options and loader is not None:  # the group itself does not exist
        groups = [known for known in loader.list_groups("") if known != "hydra"]
        hint, matches = _format_hint(group, groups)
        return RunConfigError(f"{group}: no such group, {got}. {hint}", matches)
    hint, matches = _format_hint(option, options)
    return RunConfigError(f"{group or 'defaults'}: no such option, {got}. {hint}", matches)


def _make_recipe_path_error(path: str) -> RunConfigError:
    """Return the error of a path instead of a recipe's name."""
    rule = "must be a recipe's name, not a file"
    remedy = "check, plan and memory read a run's file with --config."
    return RunConfigError.of(PRECISION_KEY, rule, path, remedy)


def _make_unknown_recipe_error(option: str, options: Sequence[str], got: str) -> UnknownRecipeError:
    """Return the error of a recipe that is neither registered nor a file of the group.

    Args:
        option: The name of the recipe.
        options: The known recipes.
        got: The name and its origin, for the message: "got 'bf16_mixd' (command line)".
    """
    matches = close_matches(option, sorted({*options, *REGISTRY.aliases()}))
    remedy = REGISTRY.listing_hint
    if matches:
        remedy = f"{did_you_mean(matches)} {remedy}"
    return UnknownRecipeError(f"{PRECISION_KEY}: no such recipe, {got}. {remedy}", matches)
