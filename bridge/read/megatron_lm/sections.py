"""`build_sections`: the sections of a run that Megatron-LM's arguments become.

An argument becomes the field of the same name in every config that has one, as
`core_transformer_config_from_args`, `get_megatron_optimizer_config` and `get_megatron_ddp_config`
do it. `flags.FIELD_OF` and `flags.SETS` hold the others.

Source: Megatron-LM of 2026-08-22, training/arguments.py, argument_utils.py and training.py.
"""

import re
from typing import Any

from bridge.errors import WrongValueError
from bridge.precision.coercion import coerce, parse_number
from bridge.read.launch.shell_word import ShellWord
from bridge.read.megatron_lm import flags
from bridge.read.megatron_lm.argument_values import LIST_TYPES, ArgumentValues, is_on
from bridge.read.megatron_lm.start_rows import ARGUMENT_SECTION
from bridge.target.fields import OWNER_FIELDS

BROADCAST_LISTS = flags.TABLE.data["one for all"]
"""Lists of which a single value stands for every layer, and is the field's value by itself."""


def build_sections(arguments: ArgumentValues) -> dict[str, dict[str, Any]]:
    """Return the sections that arguments become.

    An argument whose value is of a wrong type moves to `arguments.late`.
    """
    sections: dict[str, dict[str, Any]] = {
        owner_name: {} for owner_name in (*flags.OWNERS, "train")
    }
    model = sections["model"]
    for name, value in arguments.known.items():
        if name in flags.FIELDS_OF_SWITCH and is_on(value):
            model.update(flags.FIELDS_OF_SWITCH[name])
    for name, value in arguments.known.items():
        for path in flags.get_argument_fields(name):
            owner_name, _, attribute = path.partition(".")
            try:
                sections[owner_name][attribute] = _convert_value(owner_name, attribute, value)
            except WrongValueError:
                arguments.late[name] = str(value)
    if not is_on(arguments.known.get("group_query_attention", False)):
        model.pop("num_query_groups", None)
    if "hybrid_layer_pattern" in model:
        model["is_hybrid_model"] = True
    return sections


def _convert_value(owner_name: str, name: str, value: Any) -> Any:
    """Return the value of a field; WrongValueError for a value of another type."""
    if name in LIST_TYPES:
        words = value
        if not isinstance(value, list):
            words = re.sub(r"[\[\],'\"]", " ", str(value)).split()
        values = [coerce(word, LIST_TYPES[name]) for word in words]
        if name in BROADCAST_LISTS and len(values) == 1:
            return values[0]
        return values
    kind = OWNER_FIELDS[owner_name][name].kind
    if kind not in ("any", "dtype"):
        return coerce(value, kind)
    if isinstance(value, str):
        return parse_number(value)
    return value


def add_malformed_values(sections: dict[str, dict[str, Any]], arguments: ArgumentValues) -> None:
    """Put values that are stated and of a wrong type into the sections, where a rule names them."""
    for name, text in list(arguments.late.items()):
        paths = flags.get_argument_fields(name)
        if paths and not ShellWord(text).is_unknown:
            del arguments.late[name]
            for path in paths:
                owner_name, _, attribute = path.partition(".")
                sections[owner_name][attribute] = text


def collect_fields_of_no_config(arguments: ArgumentValues) -> dict[str, Any]:
    """Return the arguments that are no field of a config, by their paths in the section `ARGUMENT`."""
    fields: dict[str, Any] = {}
    for name, value in arguments.known.items():
        if not flags.get_argument_fields(name):
            fields[f"{ARGUMENT_SECTION}.{name}"] = value
    return fields


def collect_late_fields(arguments: ArgumentValues) -> dict[str, str]:
    """Return each field whose value only the run decides -> the value as it is written."""
    texts: dict[str, str] = {}
    for name, text in arguments.late.items():
        for path in flags.get_argument_fields(name):
            texts[path] = text
    return texts
