"""Options of Megatron-LM's command line: the switches, the fields, and what bears on precision."""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from bridge.errors import PrecisionTypeError
from bridge.precision.config import FIELD_DEFAULTS, FIELDS, MEGATRON_FIELDS
from bridge.precision.fields import KEY
from bridge.precision.statements import get_field_value
from bridge.read.foreign.import_builder import ImportBuilder
from bridge.read.foreign.setting_row import PRECISION_NAME_PATTERN
from bridge.read.foreign.table import load_table
from bridge.registry.config import MixedPrecisionConfig
from bridge.target.fields import OWNER_FIELDS as OWNER_FIELDS

TABLE = load_table("megatron_lm")


@dataclass(frozen=True, kw_only=True)
class Flag:
    """An option of the command line that has a field of the precision."""

    option: str
    field: str
    kind: str = "value"
    """on (takes nothing, sets true), off (takes nothing, sets false), value."""
    also: Sequence[str] = ()
    """Other spellings, and the keys of argument files."""
    sets: object = None
    """The value that a flag of older releases stands for."""


def get_dest(name: str) -> str:
    """Return the name of a flag in argparse's namespace: "--fp8-recipe" -> "fp8_recipe"."""
    return name.lstrip("-").replace("-", "_")


def format_option(name: str) -> str:
    """Return the option of an argument: "fp8_recipe" -> "--fp8-recipe"."""
    return f"--{name.replace('_', '-')}"


RENAMED_FLAGS = [Flag(option=option, **columns) for option, columns in TABLE.data["flags"].items()]


def _iterate_field_flags() -> Iterator[Flag]:
    others = {flag.field for flag in RENAMED_FLAGS}
    others.remove("fp8_wgrad")  # the flag of its own name is of older releases
    for name, field in FIELDS.items():
        if field.flag is None or name in others:
            continue
        option = format_option(name)
        if field.flag == KEY:
            option = name
        kind = "value"
        if isinstance(field.default, bool):
            kind = "on"
        yield Flag(option=option, field=name, kind=kind)


FLAGS = (*_iterate_field_flags(), *RENAMED_FLAGS)
NULL_WORDS = ("null", "auto")
"""Words that stand for no value: of argument files, and of Megatron-FSDP's flags."""


def _index_flags() -> dict[str, Flag]:
    flags: dict[str, Flag] = {}
    for flag in FLAGS:
        for name in (flag.option, *flag.also):
            flags[get_dest(name)] = flag
    return flags


FLAG_OF_NAME = _index_flags()
"""Name of an argument -> its flag."""
OTHER_SETTINGS = TABLE.parts[""].named
"""Settings that bear on precision and have no field."""
FILE_SETTINGS = TABLE.data["files"]
"""Settings of `OTHER_SETTINGS` that name a file."""
ARGUMENT_OF_OPTION = TABLE.data["spelled"]
"""Name of an option -> the name of its argument, where the two differ."""
SWITCHED_OFF_ARGUMENTS = TABLE.data["switched off"]
"""Option -> the argument that it switches off."""
FIELDS_OF_ARGUMENT = TABLE.data["fields"]
"""Argument -> its fields, where they have another name."""
FIELDS_OF_SWITCH = TABLE.data["sets"]
"""Switch -> the fields of the model that it sets, with their values."""
PARALLELISM_SWITCHES = TABLE.data["parallelism"]
"""Switches that bear on precision, and have no field of it."""
OWNERS = ("model", "optimizer", "ddp")
MIN_SIMILARITY = 0.945
"""Least likeness of a misspelt name to the argument's: decoder_num_layers is not a misspelt
encoder_num_layers."""
SWITCH_PATTERN = re.compile(TABLE.data["switch"])
DECIDING_PATTERN = re.compile(TABLE.data["decides"])
ANY_SYSTEM_PATTERN = re.compile(TABLE.data["any system"])
NON_PRECISION_NAMES = frozenset(TABLE.data["not precision"])


def may_repeat(key: str) -> bool:
    """Return whether a key of a configuration file may stand twice: it bears on no precision, in no system."""
    if bears_on_precision(key):
        return False
    if not key.startswith("--"):
        return ANY_SYSTEM_PATTERN.search(key.lower()) is None
    name = get_dest(key)
    is_read = name in FLAG_OF_NAME or name in OTHER_SETTINGS
    return not is_read and DECIDING_PATTERN.search(name) is None


def report_model_setting(builder: ImportBuilder, where: str, key: str, value: object) -> None:
    """Map a setting of a model's section that has a field or is at its default.

    Another setting that bears on precision is reported.
    """
    flag = FLAG_OF_NAME.get(key)
    if flag is not None:
        is_of_megatron = flag.field in MEGATRON_FIELDS
        if is_of_megatron and value is not None and not is_default(flag.field, value):
            builder.map(where, **{flag.field: value})
        else:
            builder.map(where)
        return
    row = OTHER_SETTINGS.get(key)
    if row is None and not bears_on_precision(key.lower()):
        return
    harmless: Sequence[object] = ()
    detail = "a setting of the model that no recipe has"
    if row is not None:
        harmless = row.harmless
        detail = row.detail
    if value in (None, False, *harmless):
        builder.map(where)
    else:
        builder.report(where, value, "unsupported", detail, "Keep it in the model's configuration.")


def is_default(field: str, value: object) -> bool:
    """Return whether a value is that of an unstated field: off, or Megatron's default."""
    if value is None or value in NULL_WORDS:
        return FIELD_DEFAULTS[field] is None
    return value is False or reads_as_default(field, value)


def reads_as_default(field: str, value: object) -> bool:
    """Return whether a field that has a value acts as it does where it is not stated."""
    try:
        return bool(
            get_field_value(MixedPrecisionConfig.from_dict({field: value}), field)
            == FIELD_DEFAULTS[field]
        )
    except PrecisionTypeError:
        return False


def bears_on_precision(name: str) -> bool:
    """Return whether a flag or key that no row knows looks as if it bore on precision."""
    key = get_dest(name)
    return PRECISION_NAME_PATTERN.search(key) is not None and key not in NON_PRECISION_NAMES


def get_argument_fields(name: str) -> tuple[str, ...]:
    """Return the fields that an argument becomes, as section.field; empty where no config has such a setting."""
    if name in FIELDS_OF_ARGUMENT:
        return tuple(FIELDS_OF_ARGUMENT[name])
    short = name.removeprefix("ddp_")
    if short != name and short in OWNER_FIELDS["ddp"]:
        return (f"ddp.{short}",)
    roles = [owner_name for owner_name in OWNERS if name in OWNER_FIELDS[owner_name]]
    return tuple(f"{owner_name}.{name}" for owner_name in roles)


def find_switched_off_argument(option: str) -> str | None:
    """Return the argument that an option switches off; None for another option."""
    if option in SWITCHED_OFF_ARGUMENTS:
        return str(SWITCHED_OFF_ARGUMENTS[option])
    if option in load_known_arguments():
        return find_negated_switch(option)
    return None


def find_negated_switch(option: str) -> str | None:
    """Return the switch that an option with `no_` or `disable_` before its name negates; None for another option."""
    for prefix in ("no_", "disable_"):
        name = option.removeprefix(prefix)
        if name != option and _has_switch(get_argument_fields(name)):
            return name
    return None


def _has_switch(paths: Iterable[str]) -> bool:
    return any(_get_kind(path) == "bool" for path in paths)


@functools.cache
def load_known_arguments() -> frozenset[str]:
    """Return the arguments of Megatron-LM's parser in the releases that the file names."""
    content = json.loads(
        Path(__file__).with_name("known_arguments.json").read_text(encoding="utf-8")
    )
    return frozenset(content["arguments"])


def _get_kind(path: str) -> str:
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
    """Return each name that is an argument's but for a letter or two -> the argument's name."""
    meant: dict[str, str] = {}
    for name in sorted(names):
        near = _nearest_argument(name)
        if near is not None and near.count("_") == name.count("_"):
            meant[name] = near
    return meant


@functools.lru_cache(maxsize=4096)
def _nearest_argument(name: str) -> str | None:
    """Return the argument that a name is most like; None for an argument, and for a name like none."""
    if name in _arguments_by_letters():
        return None
    letters = frozenset(name)
    likely = []
    for known, known_letters in _arguments_by_letters().items():
        total = len(name) + len(known)
        # Letters of one name alone have no partner in the other, nor has what one is longer by.
        alone = max(len(letters ^ known_letters), abs(len(name) - len(known)))
        if (total - alone) / total >= MIN_SIMILARITY:
            likely.append(known)
    for near in get_close_matches(name, likely, 1, MIN_SIMILARITY):
        return near
    return None


@functools.cache
def _arguments_by_letters() -> dict[str, frozenset[str]]:
    """Return each name of an argument or of a field of Megatron's -> its letters."""
    known = {
        *FLAG_OF_NAME,
        *ARGUMENT_OF_OPTION,
        *ARGUMENT_OF_OPTION.values(),
        *FIELDS_OF_ARGUMENT,
        *FIELDS_OF_SWITCH,
        *SWITCHED_OFF_ARGUMENTS,
    }
    known.update(flag.field for flag in FLAG_OF_NAME.values())
    for role in OWNERS:
        known.update(OWNER_FIELDS[role])
    return {name: frozenset(name) for name in known}
