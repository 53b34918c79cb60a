"""Arguments of Megatron-LM as settings: a list of words, a namespace, or the argument files its users write."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.errors import PayloadError
from bridge.interop.megatron_flags import BY_NAME, OTHER_SETTINGS, bears_on_precision, dest
from bridge.interop.shell_values import is_unknown

if TYPE_CHECKING:
    from bridge.interop.launch import Launch

__all__ = ["Arguments", "Written", "argument_groups", "runs_of"]

HOLDS_ARGUMENTS = re.compile(r"[$@*]@?\*?$|ARG|OPT|FLAG|PARAM|EXTRA|CONFIG|SETTING|[$]{?[@*]", re.IGNORECASE)
GROUP = re.compile(r"(?:[A-Z0-9]+_)*ARGS")
PARALLELISM = frozenset({"use_distributed_optimizer", "use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp"})
TAKES_A_LIST = re.compile(r"path|_blend|split|_files?$|dirs?$")


@dataclass(slots=True)
class Written:
    """One setting as it was written."""

    name: str
    """The flag or key."""
    value: Any
    """True for a flag without a value, None where only the run decides it."""
    shown: str = ""
    """An undecided value as it was written."""


@dataclass
class Arguments:
    """What one run is given."""

    settings: dict[str, Written] = field(default_factory=dict)
    """By destination; the last one written wins, as in argparse."""
    overridden: list[Written] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    """Words that only the run decides and that may hold further flags."""
    environment: Mapping[str, str] = field(default_factory=dict)
    decisions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    defaulted: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    is_launch: bool = True
    """False where nothing is started and no argument is set."""

    def add(self, written: Written) -> None:
        """Add a setting; an earlier one of another value is remembered as overridden."""
        key = dest(written.name)
        key = dest(BY_NAME[key].option) if key in BY_NAME else key
        old = self.settings.get(key)
        if old is not None and old.value != written.value:
            self.overridden.append(old)
        self.settings[key] = written

    def __contains__(self, key: str) -> bool:
        return key in self.settings and self.settings[key].value not in (False, None)


def runs_of(payload: object) -> list[Arguments]:
    """Return the runs of a payload: a list of arguments, a mapping of any of Megatron-LM's argument files, launches.

    Raises:
        PayloadError: It is neither.
    """
    from bridge.interop.launch import Launch

    if isinstance(payload, Launch):
        return [_of_launch(payload)]
    if isinstance(payload, str):
        return [_of_words(payload.split(), lambda text: text)]
    if isinstance(payload, Mapping):
        return _of_mapping(payload)
    if isinstance(payload, Sequence) and all(isinstance(item, Launch) for item in payload) and payload:
        return [_of_launch(item) for item in payload]
    if isinstance(payload, Sequence) and all(isinstance(item, str | int | float) for item in payload):
        return [_of_words([str(item) for item in payload], lambda text: text)]
    rule = "must be arguments, a mapping of them, or a launch script"
    raise PayloadError(f"megatron-lm: {rule}, got a {type(payload).__name__}. Give the contents of the file.")


def _of_launch(launch: Launch) -> Arguments:
    found = _of_words(list(launch.arguments), launch.unknowns.shown)
    found.environment, found.decisions, found.notes = launch.environment, launch.decisions, launch.notes
    found.defaulted, found.label = launch.defaulted, launch.label
    found.is_launch = bool(launch.line or launch.arguments)
    return found


def _of_words(words: list[str], shown: Any) -> Arguments:
    found = Arguments()
    option, values = "", 0
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            option, values = name, 0
            if is_unknown(name):
                found.undecided.append(shown(word))
                continue
            if not _is_known(name) and not bears_on_precision(name):
                continue
            if equals:
                found.add(_written(name, value, shown))
            elif place < len(words) and not words[place].startswith("--") and _takes_value(name):
                found.add(_written(name, words[place], shown))
                place += 1
                values = 1
            else:
                found.add(Written(name, True))
        elif is_unknown(word):
            text = shown(word)
            first = values == 0 and option and _takes_value(option)
            listed = option and TAKES_A_LIST.search(dest(option))
            if HOLDS_ARGUMENTS.search(text) or bears_on_precision(text) or not (first or listed):
                found.undecided.append(text)
            values += 1
        else:
            values += 1
    return found


def _written(name: str, value: str, shown: Any) -> Written:
    return Written(name, None, shown(value)) if is_unknown(value) else Written(name, value)


def _is_known(name: str) -> bool:
    return dest(name) in BY_NAME or dest(name) in OTHER_SETTINGS or dest(name) in PARALLELISM


def _takes_value(name: str) -> bool:
    flag = BY_NAME.get(dest(name))
    if flag is not None:
        return flag.kind == "value"
    row = OTHER_SETTINGS.get(dest(name))
    return row is None or row.default is not False


def argument_groups(payload: Mapping[Any, Any]) -> list[tuple[str, Mapping[Any, Any]]]:
    """Return the mappings of arguments in a mapping: those named in capitals, MODEL_ARGS say, and those of flags."""
    return [
        (str(key), value)
        for key, value in payload.items()
        if isinstance(value, Mapping) and (GROUP.fullmatch(str(key)) or _all_flags(value))
    ]


def _of_mapping(payload: Mapping[Any, Any]) -> list[Arguments]:
    groups = argument_groups(payload)
    environment = next(
        (value for key, value in payload.items() if key == "ENV_VARS" and isinstance(value, Mapping)), {}
    )
    if not groups:
        flat: dict[str, Any] = {}
        for key, value in payload.items():
            inner = (
                value if isinstance(value, Mapping) and key in ("language_model", "model_parallel") else {key: value}
            )
            flat.update({str(name): setting for name, setting in inner.items()})
        groups = [("", flat)]
    runs = []
    for name, values in groups:
        found = Arguments(environment={str(key): str(value) for key, value in environment.items()}, label=name)
        for key, value in values.items():
            _add_key(found, str(key), value)
        runs.append(found)
    return runs


def _all_flags(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(str(key).startswith("--") for key in value)


def _add_key(found: Arguments, key: str, value: Any) -> None:
    if not _is_known(key) and not bears_on_precision(key):
        return
    if isinstance(value, str) and "$" in value:
        found.add(Written(key, None, value))
    elif isinstance(value, Mapping | list):
        found.add(Written(key, None, f"a {type(value).__name__}"))
    elif value is None:
        return
    else:
        found.add(Written(key, value))
