"""`sections_of`: the sections of a run that Megatron-LM's arguments become.

An argument becomes the field of the same name in every config that has one, as
`core_transformer_config_from_args`, `get_megatron_optimizer_config` and `get_megatron_ddp_config`
do it. `flags.FIELD_OF` and `flags.SETS` hold the others.

Source: Megatron-LM of 2026-08-22, training/arguments.py, argument_utils.py and training.py.
"""

import re
from typing import Any

from bridge.errors import WrongValueError
from bridge.precision.values import coerce, number_of_text
from bridge.read.launch.word import Word
from bridge.read.megatron_lm import flags
from bridge.read.megatron_lm.argument_values import LISTS, ArgumentValues, is_on
from bridge.read.megatron_lm.start import ARGUMENT
from bridge.target.fields import FIELDS

ONE_FOR_ALL = flags.TABLE.data["one for all"]
"""Lists of which a single value stands for every layer, and is the field's value by itself."""


def sections_of(arguments: ArgumentValues) -> dict[str, dict[str, Any]]:
    """Return the sections that arguments become.

    An argument whose value is of a wrong type moves to `arguments.late`.
    """
    sections: dict[str, dict[str, Any]] = {role: {} for role in (*flags.OWNERS, "train")}
    model = sections["model"]
    for name, value in arguments.known.items():
        if name in flags.SETS and is_on(value):
            model.update(flags.SETS[name])
    for name, value in arguments.known.items():
        for path in flags.fields_of(name):
            role, _, attribute = path.partition(".")
            try:
                sections[role][attribute] = _field_value(role, attribute, value)
            except WrongValueError:
                arguments.late[name] = str(value)
    if not is_on(arguments.known.get("group_query_attention", False)):
        model.pop("num_query_groups", None)
    if "hybrid_layer_pattern" in model:
        model["is_hybrid_model"] = True
    return sections


def _field_value(role: str, name: str, value: Any) -> Any:
    """Return the value of a field; WrongValueError for a value of another type."""
    if name in LISTS:
        words = value
        if not isinstance(value, list):
            words = re.sub(r"[\[\],'\"]", " ", str(value)).split()
        values = [coerce(word, LISTS[name]) for word in words]
        if name in ONE_FOR_ALL and len(values) == 1:
            return values[0]
        return values
    kind = FIELDS[role][name].kind
    if kind not in ("any", "dtype"):
        return coerce(value, kind)
    if isinstance(value, str):
        return number_of_text(value)
    return value


def put_malformed(sections: dict[str, dict[str, Any]], arguments: ArgumentValues) -> None:
    """Put values that are stated and of a wrong type into the sections, where a rule names them."""
    for name, text in list(arguments.late.items()):
        paths = flags.fields_of(name)
        if paths and not Word(text).is_unknown:
            del arguments.late[name]
            for path in paths:
                role, _, attribute = path.partition(".")
                sections[role][attribute] = text


def fields_of_no_config(arguments: ArgumentValues) -> dict[str, Any]:
    """Return the arguments that are no field of a config, by their paths in the section `ARGUMENT`."""
    fields: dict[str, Any] = {}
    for name, value in arguments.known.items():
        if not flags.fields_of(name):
            fields[f"{ARGUMENT}.{name}"] = value
    return fields


def late_fields(arguments: ArgumentValues) -> dict[str, str]:
    """Return each field whose value only the run decides -> the value as it is written."""
    texts: dict[str, str] = {}
    for name, text in arguments.late.items():
        for path in flags.fields_of(name):
            texts[path] = text
    return texts
