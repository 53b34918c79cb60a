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
from bridge.precision.statements import field_value
from bridge.read.foreign.import_builder import ImportBuilder
from bridge.read.foreign.setting_row import LOOKS_LIKE_PRECISION
from bridge.read.foreign.table import table
from bridge.registry.config import MixedPrecisionConfig
from bridge.target.fields import FIELDS as OWNER_FIELDS

TABLE = table("megatron_lm")


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


def dest(name: str) -> str:
    """Return the name of a flag in argparse's namespace: "--fp8-recipe" -> "fp8_recipe"."""
    return name.lstrip("-").replace("-", "_")


def option_of(name: str) -> str:
    """Return the option of an argument: "fp8_recipe" -> "--fp8-recipe"."""
    return f"--{name.replace('_', '-')}"


OWN_NAMES = [Flag(option=option, **columns) for option, columns in TABLE.data["flags"].items()]


def _named_like_their_field() -> Iterator[Flag]:
    others = {flag.field for flag in OWN_NAMES}
    others.remove("fp8_wgrad")  # the flag of its own name is of older releases
    for name, field in FIELDS.items():
        if field.flag is None or name in others:
            continue
        option = option_of(name)
        if field.flag == KEY:
            option = name
        kind = "value"
        if isinstance(field.default, bool):
            kind = "on"
        yield Flag(option=option, field=name, kind=kind)


FLAGS = (*_named_like_their_field(), *OWN_NAMES)
NOTHING = ("null", "auto")
"""Words that stand for no value: of argument files, and of Megatron-FSDP's flags."""


def _by_name() -> dict[str, Flag]:
    flags: dict[str, Flag] = {}
    for flag in FLAGS:
        for name in (flag.option, *flag.also):
            flags[dest(name)] = flag
    return flags


BY_NAME = _by_name()
"""Name of an argument -> its flag."""
OTHER_SETTINGS = TABLE.parts[""].named
"""Settings that bear on precision and have no field."""
FILES = TABLE.data["files"]
"""Settings of `OTHER_SETTINGS` that name a file."""
SPELLED = TABLE.data["spelled"]
"""Name of an option -> the name of its argument, where the two differ."""
SWITCHED_OFF = TABLE.data["switched off"]
"""Option -> the argument that it switches off."""
FIELD_OF = TABLE.data["fields"]
"""Argument -> its fields, where they have another name."""
SETS = TABLE.data["sets"]
"""Switch -> the fields of the model that it sets, with their values."""
PARALLELISM = TABLE.data["parallelism"]
"""Switches that bear on precision, and have no field of it."""
OWNERS = ("model", "optimizer", "ddp")
SLIP = 0.945
"""Least likeness of a misspelt name to the argument's: decoder_num_layers is not a misspelt
encoder_num_layers."""
SWITCH = re.compile(TABLE.data["switch"])
DECIDES = re.compile(TABLE.data["decides"])
ANY_SYSTEM = re.compile(TABLE.data["any system"])
NOT_PRECISION = frozenset(TABLE.data["not precision"])


def may_repeat(key: str) -> bool:
    """Return whether a key of a configuration file may stand twice: it bears on no precision, in no system."""
    if bears_on_precision(key):
        return False
    if not key.startswith("--"):
        return ANY_SYSTEM.search(key.lower()) is None
    name = dest(key)
    is_read = name in BY_NAME or name in OTHER_SETTINGS
    return not is_read and DECIDES.search(name) is None


def report_other(builder: ImportBuilder, where: str, key: str, value: object) -> None:
    """Map a setting of a model's section that has a field or is at its default.

    Another setting that bears on precision is reported.
    """
    flag = BY_NAME.get(key)
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
    if value is None or value in NOTHING:
        return FIELD_DEFAULTS[field] is None
    return value is False or reads_as_default(field, value)


def reads_as_default(field: str, value: object) -> bool:
    """Return whether a field that has a value acts as it does where it is not stated."""
    try:
        return bool(
            field_value(MixedPrecisionConfig.from_dict({field: value}), field)
            == FIELD_DEFAULTS[field]
        )
    except PrecisionTypeError:
        return False


def bears_on_precision(name: str) -> bool:
    """Return whether a flag or key that no row knows looks as if it bore on precision."""
    key = dest(name)
    return LOOKS_LIKE_PRECISION.search(key) is not None and key not in NOT_PRECISION


def fields_of(name: str) -> tuple[str, ...]:
    """Return the fields that an argument becomes, as section.field; empty where no config has such a setting."""
    if name in FIELD_OF:
        return tuple(FIELD_OF[name])
    short = name.removeprefix("ddp_")
    if short != name and short in OWNER_FIELDS["ddp"]:
        return (f"ddp.{short}",)
    roles = [role for role in OWNERS if name in OWNER_FIELDS[role]]
    return tuple(f"{role}.{name}" for role in roles)


def switched_off(option: str) -> str | None:
    """Return the argument that an option switches off; None for another option."""
    if option in SWITCHED_OFF:
        return str(SWITCHED_OFF[option])
    if option in known_arguments():
        return negated(option)
    return None


def negated(option: str) -> str | None:
    """Return the switch that an option with `no_` or `disable_` before its name negates; None for another option."""
    for prefix in ("no_", "disable_"):
        name = option.removeprefix(prefix)
        if name != option and _has_a_switch(fields_of(name)):
            return name
    return None


def _has_a_switch(paths: Iterable[str]) -> bool:
    return any(_kind_of(path) == "bool" for path in paths)


@functools.cache
def known_arguments() -> frozenset[str]:
    """Return the arguments of Megatron-LM's parser in the releases that the file names."""
    content = json.loads(
        Path(__file__).with_name("known_arguments.json").read_text(encoding="utf-8")
    )
    return frozenset(content["arguments"])


def _kind_of(path: str) -> str:
    role, _, name = path.partition(".")
    return OWNER_FIELDS[role][name].kind


def is_switch(option: str) -> bool:
    """Return whether an option takes no value."""
    name = dest(option)
    flag = BY_NAME.get(name)
    if flag is not None:
        return flag.kind != "value"
    if name in PARALLELISM or name in SETS:
        return True
    if name in OTHER_SETTINGS and OTHER_SETTINGS[name].harmless[0] is False:
        return True
    if _has_a_switch(fields_of(SPELLED.get(name, name))):
        return True
    return switched_off(name) is not None or SWITCH.fullmatch(option) is not None


def misspelt(names: Iterable[str]) -> dict[str, str]:
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
        if (total - alone) / total >= SLIP:
            likely.append(known)
    for near in get_close_matches(name, likely, 1, SLIP):
        return near
    return None


@functools.cache
def _arguments_by_letters() -> dict[str, frozenset[str]]:
    """Return each name of an argument or of a field of Megatron's -> its letters."""
    known = {*BY_NAME, *SPELLED, *SPELLED.values(), *FIELD_OF, *SETS, *SWITCHED_OFF}
    known.update(flag.field for flag in BY_NAME.values())
    for role in OWNERS:
        known.update(OWNER_FIELDS[role])
    return {name: frozenset(name) for name in known}
