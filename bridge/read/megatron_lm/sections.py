"""`build_sections`: the sections of a run that Megatron-LM's arguments become.

An argument becomes the field of the same name in every config that has one, as
`core_transformer_config_from_args`, `get_megatron_optimizer_config` and `get_megatron_ddp_config`
do it. `flags.FIELDS_OF_ARGUMENT` and `flags.FIELDS_OF_SWITCH` have the arguments with other fields.

Source: Megatron-LM of 2026-08-22, training/arguments.py, argument_utils.py and training.py.
"""

import re
from collections.abc import Sequence

from bridge.errors import WrongValueError
from bridge.precision.coercion import coerce, parse_number
from bridge.read.launch.shell_word import ShellWord
from bridge.read.megatron_lm import flags
from bridge.read.megatron_lm.argument_values import ArgumentValues, is_on
from bridge.read.megatron_lm.start_rows import ARGUMENT_SECTION
from bridge.target.fields import OWNER_FIELDS

BROADCAST_LISTS: Sequence[str] = flags.TABLE.data["one for all"]
"""Lists whose single value holds for every layer. The field takes such a value without a list."""


def build_sections(arguments: ArgumentValues) -> dict[str, dict[str, object]]:
    """Return the sections that arguments become.

    An argument whose value has a wrong type is added to `arguments.open_values`.
    """
    sections: dict[str, dict[str, object]] = {
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
                arguments.open_values[name] = str(value)
    # Megatron-LM reads --num-query-groups only under --group-query-attention.
    if not is_on(arguments.known.get("group_query_attention", False)):
        model.pop("num_query_groups", None)
    if "hybrid_layer_pattern" in model:
        model["is_hybrid_model"] = True
    return sections


def _convert_value(owner_name: str, name: str, value: object) -> object:
    """Return the value of a field, in the field's type.

    Raises:
        WrongValueError: The value has another type.
    """
    if name in flags.LIST_TYPES:
        return _convert_list(name, value)
    kind = OWNER_FIELDS[owner_name][name].kind
    if kind == "any" or kind == "dtype":  # noqa: PLR1714  mypy narrows the type of `kind` by ==
        if isinstance(value, str):
            return parse_number(value)
        return value
    return coerce(value, kind)


def _convert_list(name: str, value: object) -> object:
    """Return the value of a field that takes a list: [1, 2] of "1 2" or "[1, 2]".

    Raises:
        WrongValueError: A value of the list has another type.
    """
    items: list[object] = []
    if isinstance(value, list):
        items.extend(value)
    else:
        items.extend(re.sub(r"[\[\],'\"]", " ", str(value)).split())
    values = [coerce(item, flags.LIST_TYPES[name]) for item in items]
    if name in BROADCAST_LISTS and len(values) == 1:
        return values[0]
    return values


def add_malformed_values(sections: dict[str, dict[str, object]], arguments: ArgumentValues) -> None:
    """Move stated values of a wrong type from `arguments.open_values` into the sections, where a rule names them."""
    for name, text in list(arguments.open_values.items()):
        paths = flags.get_argument_fields(name)
        if paths and not ShellWord(text).is_open:
            del arguments.open_values[name]
            for path in paths:
                owner_name, _, attribute = path.partition(".")
                sections[owner_name][attribute] = text


def collect_fields_of_no_config(arguments: ArgumentValues) -> dict[str, object]:
    """Return the arguments that are no field of a config, by their paths in `ARGUMENT_SECTION`."""
    fields: dict[str, object] = {}
    for name, value in arguments.known.items():
        if not flags.get_argument_fields(name):
            fields[f"{ARGUMENT_SECTION}.{name}"] = value
    return fields


def collect_open_fields(arguments: ArgumentValues) -> dict[str, str]:
    """Return each field whose value is decided when the run starts -> the value as it is written."""
    texts: dict[str, str] = {}
    for name, text in arguments.open_values.items():
        for path in flags.get_argument_fields(name):
            texts[path] = text
    return texts
