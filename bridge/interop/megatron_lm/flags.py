"""Megatron-LM's command-line flags that bear on precision, as rows."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bridge.errors import PrecisionTypeError
from bridge.interop.builders import ImportBuilder
from bridge.interop.table import table
from bridge.precision.config import FIELD_DEFAULTS, FIELDS, MEGATRON_FIELDS
from bridge.precision.fields import KEY
from bridge.registry.config import MixedPrecisionConfig

TABLE = table("megatron_lm")


def pattern(row: str) -> re.Pattern[str]:
    """Return the pattern of a row, whose lines are one."""
    return re.compile(TABLE.data[row].replace(" |", "|"))


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag that has a field."""

    option: str
    field: str
    kind: str = "value"
    """on (takes nothing, sets true), off (takes nothing, sets false), value."""
    also: Sequence[str] = ()
    """Other spellings, and the keys of argument files."""
    sets: object = None
    """The value that a flag of older releases stands for."""


def dest(name: str) -> str:
    """Return the name of a flag in argparse's namespace and in argument files: "--fp8-recipe" -> "fp8_recipe"."""
    return name.lstrip("-").replace("-", "_")


OWN_NAMES = [Flag(option=option, **columns) for option, columns in TABLE.data["flags"].items()]


def _named_like_their_field() -> Iterator[Flag]:
    others = {flag.field for flag in OWN_NAMES} - {"fp8_wgrad"}  # whose flag of its own name is of older releases
    for name, field in FIELDS.items():
        if field.flag is not None and name not in others:
            option = name if field.flag == KEY else f"--{name.replace('_', '-')}"
            yield Flag(option=option, field=name, kind="on" if isinstance(field.default, bool) else "value")


FLAGS = (*_named_like_their_field(), *OWN_NAMES)
NOTHING = ("null", "auto")
"""Words that stand for no value: of argument files, and of Megatron-FSDP's flags."""


BY_NAME = {dest(name): flag for flag in FLAGS for name in (flag.option, *flag.also)}

OTHER_SETTINGS, FILES = TABLE.parts[""].named, TABLE.data["files"]
"""Settings that have no field, and those of them that name a file."""
SWITCH, DECIDES, ANY_SYSTEM = (pattern(row) for row in ("switch", "decides", "any system"))
NOT_PRECISION = frozenset(TABLE.data["not precision"])
LOOKS_LIKE_PRECISION = re.compile(
    r"fp8|fp4|fp16|bf16|fp32|fp64|tf32|bfloat|float(?:16|32|8)|half|dtype|precision|loss_scale|amax|mxfp|nvfp|hysteresis"
    r"|grad_reduce_in|quantiz|query_key_layer"
)


def may_repeat(key: str) -> bool:
    """Return whether a key of a configuration file may stand twice: it bears on no precision, in no system."""
    if key.startswith("--"):
        name = dest(key)
        return not (bears_on_precision(key) or name in BY_NAME or name in OTHER_SETTINGS or DECIDES.search(name))
    return not (bears_on_precision(key) or ANY_SYSTEM.search(key.lower()))


def report_other(builder: ImportBuilder, where: str, key: str, value: object) -> None:
    """Map a setting of a model's section that has a field or is at its default; report another one of a precision."""
    flag, row = BY_NAME.get(key), OTHER_SETTINGS.get(key)
    if flag is not None and flag.field in MEGATRON_FIELDS and value is not None and not is_default(flag.field, value):
        builder.map(where, **{flag.field: value})
        return
    if flag is not None:
        builder.map(where)
        return
    if row is None and not bears_on_precision(key.lower()):
        return
    if value in (None, False, *(row.harmless if row else ())):
        builder.map(where)
    else:
        detail = row.detail if row else "a setting of the model that no recipe has"
        builder.report(where, value, "unsupported", detail, "Keep it in the model's configuration.")


def is_default(field: str, value: object) -> bool:
    """Return whether a value of a setting says no more than an unstated field does: off, or Megatron's default."""
    if value is None or value in NOTHING:
        return FIELD_DEFAULTS[field] is None
    if value is False:
        return True
    try:
        return bool(MixedPrecisionConfig.from_dict({field: value}).reading(field) == FIELD_DEFAULTS[field])
    except PrecisionTypeError:
        return False


def bears_on_precision(name: str) -> bool:
    """Return whether a flag or key that no row knows looks as if it bore on precision."""
    key = dest(name)
    return LOOKS_LIKE_PRECISION.search(key) is not None and key not in NOT_PRECISION
