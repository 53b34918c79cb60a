"""Hydra's and OmegaConf's errors in this package's words.

Each message has the key, the rule, the value, its origin and the remedy. Hydra answers a key it
does not know with the advice to put a plus sign before it, which here would only turn one wrong key
into another.
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
from bridge.precision.fields import COMMAND_LINE
from bridge.read.run_keys import PRECISION_KEY, RUN_CONFIG_KEYS
from bridge.registry.registry import REGISTRY

COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError)
"""The errors that Hydra raises for its user's mistakes."""
COMPOSER_PACKAGES = frozenset({"hydra", "hydra_plugins", "omegaconf", "antlr4", "yaml"})
"""The packages that compose a config, and raise a plain ValueError for their user's mistakes."""

RUN_FOLDER_NOTE = "Run folder: "
"""Begins the note on a job's own error."""
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
"""Pattern in Hydra's message -> the sentence in its place. Hydra's errors have no other data than
their text."""


@contextmanager
def translate_errors(
    overrides: Sequence[str], loader: ConfigLoader | None = None
) -> Iterator[None]:
    """Translate the errors of a block.

    A crash stays as it is: of the job, whose folder is noted on it, and of this package's code.
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
    """Return whether a package that composes raised an error, rather than this one's code.

    The last function that is one of theirs or ours decides. It may have called the standard
    library.
    """
    own = __name__.partition(".")[0]
    last = own
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package == own or package in COMPOSER_PACKAGES:
            last = package
    return last != own


def translate_error(
    error: Exception, overrides: Sequence[str], loader: ConfigLoader | None
) -> BridgeError:
    """Return the error to show instead of one of Hydra's.

    `overrides` is the command line, to name it as an origin; `loader` knows the configs that can be
    found, for near names.
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
        why = f"{error.strerror}: {str(error.filename)!r:.80}"
        return RunConfigError(f"The configuration cannot be composed. {why}.")
    return _translate_by_message(error)


def _translate_by_message(error: Exception) -> RunConfigError:
    """Return the error whose sentence fits the text of Hydra's error, or that text itself."""
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
    kept = []
    for line in text.splitlines():
        if line.strip() and "use +" not in line:
            kept.append(line.strip())
    return RunConfigError(f"The configuration cannot be composed. {'; '.join(kept).rstrip('.')}.")


def _find_long_number(overrides: Sequence[str]) -> RunConfigError | None:
    """Return the error of a number that has more digits than Python reads; None without one."""
    most = sys.get_int_max_str_digits()
    for word in overrides:
        key, _, value = word.partition("=")
        if most and re.search(rf"\d{{{most + 1}}}", value):
            rule, remedy = f"must have at most {most} digits", "Write a shorter number."
            return RunConfigError(
                f"{key}: {rule}, got {value!r:.80} ({COMMAND_LINE}). {remedy}", path=key, rule=rule
            )
    return None


def _translate_parse_error(error: OverrideParseException) -> RunConfigError:
    """Return the error of a word that Hydra cannot parse as an override."""
    word = str(error.override)
    is_key = "=" not in word and word.partition(".")[0] in RUN_CONFIG_KEYS
    if is_key:
        return RunConfigError(f"{word!r} is no override (command line). Write {word}=VALUE.")
    if word in REGISTRY:
        assignment = f"{PRECISION_KEY}={word}"
        return RunConfigError(f"{word!r} is no override (command line). Write {assignment}.")
    return RunConfigError(
        f"{error.override!r} is no override (command line). Write KEY=VALUE, and quote a value "
        "with special characters: 'KEY=\"a=b\"'."
    )


def _format_hint(word: str, known: Sequence[str]) -> tuple[str, list[str]]:
    """Return what to do about a name that does not exist, and the nearest that do."""
    matches = close_matches(word, known)
    hint = did_you_mean(matches)
    if not hint and known:
        hint = f"There are {', '.join(known)}."
    return hint or "Remove it.", matches


def _translate_missing_config(
    error: MissingConfigException, overrides: Sequence[str], loader: ConfigLoader | None
) -> BridgeError:
    """Return the error of a config that no folder of the search path has."""
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
    for word in overrides:
        if word.lstrip("+").startswith(f"{group}=") and option in word:
            origin = COMMAND_LINE
    return _make_missing_option_error(group, option, origin, error, loader)


def _make_missing_option_error(
    group: str,
    option: str,
    origin: str,
    error: MissingConfigException,
    loader: ConfigLoader | None,
) -> BridgeError:
    """Return the error of an option that its group does not have, or of a group that is none."""
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
    """Return the error of a path in the place of a recipe's name."""
    rule = "must be a recipe's name, not a file"
    remedy = "check, plan and memory read a run's file with --config."
    return RunConfigError.of(PRECISION_KEY, rule, path, remedy)


def _make_unknown_recipe_error(option: str, options: Sequence[str], got: str) -> UnknownRecipeError:
    """Return the error of a recipe that is neither registered nor a file of the group."""
    matches = close_matches(option, sorted({*options, *REGISTRY.aliases()}))
    remedy = REGISTRY.listing_hint
    if matches:
        remedy = f"{did_you_mean(matches)} {remedy}"
    return UnknownRecipeError(f"{PRECISION_KEY}: no such recipe, {got}. {remedy}", matches)
