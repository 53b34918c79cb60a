"""`Flag`: the options of Megatron-LM's parser, which of them take a value, and the fields that they set.

The rows are in `foreign/tables/megatron_lm.yaml`. A *name* here is a name of argparse's namespace, "fp8_recipe",
and an *option* is a word of a command line, "--fp8-recipe". Options of the same parser may have
several spellings for one argument.
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from bridge.errors import PrecisionTypeError
from bridge.precision.coercion import Kind
from bridge.precision.precision_config import FIELD_DEFAULTS, FIELDS, MEGATRON_FIELDS
from bridge.precision.stated_field import KEY
from bridge.precision.statements import get_field_value
from bridge.read.foreign.import_builder import ImportBuilder
from bridge.read.foreign.setting_row import PRECISION_NAME_PATTERN
from bridge.read.foreign.table import load_table
from bridge.registry.mixed_precision_config import MixedPrecisionConfig
from bridge.target.fields import OWNER_FIELDS

TABLE = load_table("megatron_lm")
FlagKind = Literal["on", "off", "value"]
NULL_WORDS = ("null", "auto")
"""Words for no value: "null" in argument files, "auto" after flags of Megatron-FSDP."""
OTHER_SETTINGS = TABLE.parts[""].named
"""Name of a setting that affects the precision and has no field -> its row."""
FILE_SETTINGS: Sequence[str] = TABLE.data["files"]
"""Settings of `OTHER_SETTINGS` that name a file."""
LIST_TYPES: Mapping[str, Kind] = TABLE.data["lists"]
"""Argument that takes several values -> the type of each value."""
ARGUMENT_OF_OPTION: Mapping[str, str] = TABLE.data["spelled"]
"""Name of an option -> the name of its argument, if the two differ."""
SWITCHED_OFF_ARGUMENTS: Mapping[str, str] = TABLE.data["switched off"]
"""Name of an option -> the argument that it switches off."""
FIELDS_OF_ARGUMENT: Mapping[str, Sequence[str]] = TABLE.data["fields"]
"""Argument -> its fields, if they have another name."""
FIELDS_OF_SWITCH: Mapping[str, Mapping[str, object]] = TABLE.data["sets"]
"""Switch -> the fields of the model that it sets, with their values."""
PARALLELISM_SWITCHES: Sequence[str] = TABLE.data["parallelism"]
"""Switches that affect the precision and are no field of it."""
OWNERS = ("model", "optimizer", "ddp")
MIN_SIMILARITY = 0.945
"""Least similarity of a misspelt name to the argument's. At this value decoder_num_layers is no
misspelt encoder_num_layers."""
SWITCH_PATTERN = re.compile(TABLE.data["switch"])
"""Options that take no value."""
DECIDING_PATTERN = re.compile(TABLE.data["decides"])
"""Names of arguments that decide how a precision is read."""
ANY_SYSTEM_PATTERN = re.compile(TABLE.data["any system"])
"""Keys of other systems' files that may affect a precision."""
NON_PRECISION_NAMES = frozenset(TABLE.data["not precision"])
"""Names that look like settings of a precision and are none."""


@dataclass(frozen=True, kw_only=True)
class Flag:
    """An option of the command line that has a field of the precision."""

    option: str
    field: str
    kind: FlagKind = "value"
    """`on` takes no value and sets True, `off` takes no value and sets False, `value` takes one."""
    also: Sequence[str] = ()
    """Other spellings of the option, and the keys of argument files."""
    sets: object = None
    """The value that a flag of older releases sets by itself; None for other flags."""


def get_dest(name: str) -> str:
    """Return the name of an option in argparse's namespace: "--fp8-recipe" -> "fp8_recipe"."""
    return name.lstrip("-").replace("-", "_")


def format_option(name: str) -> str:
    """Return the option of an argument: "fp8_recipe" -> "--fp8-recipe"."""
    return f"--{name.replace('_', '-')}"


RENAMED_FLAGS = [Flag(option=option, **columns) for option, columns in TABLE.data["flags"].items()]
"""Flags whose name differs from their field's, or that are not the only flag of it."""


def _iterate_field_flags() -> Iterator[Flag]:
    """Yield a flag for each field of a precision whose option has the name of the field."""
    renamed_fields = {flag.field for flag in RENAMED_FLAGS}
    # --fp8-wgrad, of older releases, is a flag as well as --no-fp8-wgrad of RENAMED_FLAGS.
    renamed_fields.remove("fp8_wgrad")
    for name, field in FIELDS.items():
        if field.flag is None or name in renamed_fields:
            continue
        option = name if field.flag == KEY else format_option(name)
        kind: FlagKind = "value"
        if isinstance(field.default, bool):
            kind = "on"
        yield Flag(option=option, field=name, kind=kind)


FLAGS = (*_iterate_field_flags(), *RENAMED_FLAGS)


def _index_flags() -> dict[str, Flag]:
    """Return `FLAG_OF_NAME`."""
    flags: dict[str, Flag] = {}
    for flag in FLAGS:
        for name in (flag.option, *flag.also):
            flags[get_dest(name)] = flag
    return flags


FLAG_OF_NAME = _index_flags()
"""Name of an option, in any of its spellings -> its flag."""


def may_repeat(key: str) -> bool:
    """Return whether a key of a configuration file may stand twice.

    It may if it affects the precision in no system.
    """
    if may_affect_precision(key):
        return False
    if not key.startswith("--"):
        return ANY_SYSTEM_PATTERN.search(key.lower()) is None
    name = get_dest(key)
    is_read = name in FLAG_OF_NAME or name in OTHER_SETTINGS
    return not is_read and DECIDING_PATTERN.search(name) is None


def report_model_setting(builder: ImportBuilder, path: str, key: str, value: object) -> None:
    """Map or report a setting of the model's section in another system's file.

    A setting that has a field of Megatron's, or is at its default, is mapped. Another one that may
    affect the precision is reported.

    Args:
        builder: The report.
        path: Name of the setting, from the top of the file.
        key: Its key in the model's section.
    """
    flag = FLAG_OF_NAME.get(key)
    if flag is not None:
        is_of_megatron = flag.field in MEGATRON_FIELDS
        if is_of_megatron and value is not None and not is_default(flag.field, value):
            builder.map(path, **{flag.field: value})
        else:
            builder.map(path)
        return
    row = OTHER_SETTINGS.get(key)
    if row is None and not may_affect_precision(key.lower()):
        return
    harmless: Sequence[object] = ()
    detail = "a setting of the model that no recipe has"
    if row is not None:
        harmless = row.harmless
        detail = row.detail
    if value in (None, False, *harmless):
        builder.map(path)
    else:
        builder.report(path, value, "unsupported", detail, "Keep it in the model's configuration.")


def is_default(field: str, value: object) -> bool:
    """Return whether a value is that of an unstated field: off, or Megatron's default."""
    if value is None or value in NULL_WORDS:
        return FIELD_DEFAULTS[field] is None
    return value is False or reads_as_default(field, value)


def reads_as_default(field: str, value: object) -> bool:
    """Return whether a field with this value acts as if it were not stated."""
    try:
        config = MixedPrecisionConfig.from_dict({field: value})
    except PrecisionTypeError:
        return False
    return bool(get_field_value(config, field) == FIELD_DEFAULTS[field])


def may_affect_precision(name: str) -> bool:
    """Return whether an option or a key looks like a setting of a precision, by the words in its name."""
    key = get_dest(name)
    return PRECISION_NAME_PATTERN.search(key) is not None and key not in NON_PRECISION_NAMES


def get_argument_fields(name: str) -> tuple[str, ...]:
    """Return the fields that an argument becomes, as section.field; empty if no config has such a setting."""
    if name in FIELDS_OF_ARGUMENT:
        return tuple(FIELDS_OF_ARGUMENT[name])
    ddp_name = name.removeprefix("ddp_")
    if ddp_name != name and ddp_name in OWNER_FIELDS["ddp"]:
        return (f"ddp.{ddp_name}",)
    owner_names = [owner_name for owner_name in OWNERS if name in OWNER_FIELDS[owner_name]]
    return tuple(f"{owner_name}.{name}" for owner_name in owner_names)


def find_switched_off_argument(option: str) -> str | None:
    """Return the argument that an option of the parser switches off; None for another option."""
    if option in SWITCHED_OFF_ARGUMENTS:
        return SWITCHED_OFF_ARGUMENTS[option]
    if option in load_known_arguments():
        return find_negated_switch(option)
    return None


def find_negated_switch(option: str) -> str | None:
    """Return the switch that an option negates by `no_` or `disable_` before its name; None for another option.

    The parser need not have the option.
    """
    for prefix in ("no_", "disable_"):
        name = option.removeprefix(prefix)
        if name != option and _has_switch(get_argument_fields(name)):
            return name
    return None


def _has_switch(paths: Iterable[str]) -> bool:
    """Return whether one of these fields is a switch."""
    return any(_get_kind(path) == "bool" for path in paths)


@functools.cache
def load_known_arguments() -> frozenset[str]:
    """Return the arguments of Megatron-LM's parser in the releases that `known_arguments.json` names."""
    content = json.loads(
        Path(__file__).with_name("known_arguments.json").read_text(encoding="utf-8")
    )
    return frozenset(content["arguments"])


def _get_kind(path: str) -> str:
    """Return the kind of a field of Megatron's configs: "bool" for example."""
    owner_name, _, name = path.partition(".")
    return OWNER_FIELDS[owner_name][name].kind


def is_switch(option: str) -> bool:
    """Return whether an option takes no value."""
    name = get_dest(option)
    flag = FLAG_OF_NAME.get(name)
    if flag is not None:
        return flag.kind != "value"
    if name in PARALLELISM_SWITCHES or name in FIELDS_OF_SWITCH:
        return True
    if name in OTHER_SETTINGS and OTHER_SETTINGS[name].harmless[0] is False:
        return True
    if _has_switch(get_argument_fields(ARGUMENT_OF_OPTION.get(name, name))):
        return True
    return (
        find_switched_off_argument(name) is not None or SWITCH_PATTERN.fullmatch(option) is not None
    )


def find_misspelt(names: Iterable[str]) -> dict[str, str]:
    """Return each name that differs from an argument's name by a letter or two -> the argument's name.

    Both names have the same number of words, so that no name with one more word is taken for a
    misspelt one.
    """
    argument_of_name: dict[str, str] = {}
    for name in sorted(names):
        argument = _find_closest_argument(name)
        if argument is not None and argument.count("_") == name.count("_"):
            argument_of_name[name] = argument
    return argument_of_name


@functools.lru_cache(maxsize=4096)
def _find_closest_argument(name: str) -> str | None:
    """Return the argument whose name is closest; None for an argument, and if none is close.

    The ratio of `get_close_matches` is 2 * matches / total letters. A letter that only one of the
    two names has matches nothing, nor do the letters by which one name is longer. Names that cannot
    reach the ratio are left out first, since the search is slow.
    """
    letters_of_argument = _collect_argument_letters()
    if name in letters_of_argument:
        return None
    letters = frozenset(name)
    likely: list[str] = []
    for argument, argument_letters in letters_of_argument.items():
        total = len(name) + len(argument)
        unmatched = max(len(letters ^ argument_letters), abs(len(name) - len(argument)))
        if (total - unmatched) / total >= MIN_SIMILARITY:
            likely.append(argument)
    for argument in get_close_matches(name, likely, 1, MIN_SIMILARITY):
        return argument
    return None


@functools.cache
def _collect_argument_letters() -> dict[str, frozenset[str]]:
    """Return the name of every argument that is read here -> its letters."""
    names = {
        *FLAG_OF_NAME,
        *ARGUMENT_OF_OPTION,
        *ARGUMENT_OF_OPTION.values(),
        *FIELDS_OF_ARGUMENT,
        *FIELDS_OF_SWITCH,
        *SWITCHED_OFF_ARGUMENTS,
    }
    names.update(flag.field for flag in FLAG_OF_NAME.values())
    for owner_name in OWNERS:
        names.update(OWNER_FIELDS[owner_name])
    return {name: frozenset(name) for name in names}
