"""`decode_fields`: plain data as the constructor arguments of a dataclass, by its annotations.

Scalars follow the rules of the precision fields (`bridge.precision.coercion.coerce`). An ambiguous
value of YAML or of a command line is refused.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

from bridge.errors import WrongValueError, close_matches, did_you_mean, listed
from bridge.precision.coercion import coerce, get_torch_dtype
from bridge.precision.matchers import convert_to_file_content
from bridge.preflight.problems import Problems


class _NotDataError(WrongValueError):
    """The annotation is a type whose values plain data cannot describe, such as a function."""


def decode_fields(
    values: Mapping[str, Any],
    owner: type[Any],
    *,
    section: str,
    problems: Problems,
    functions: Mapping[str, Mapping[str, Callable[..., Any]]] | None = None,
) -> dict[str, Any]:
    """Return the constructor arguments of a dataclass, decoded by its annotations.

    Args:
        values: Field -> its value as plain data.
        owner: The dataclass.
        section: The section, in messages.
        problems: It gets the keys that are not fields and the values that do not fit.
        functions: Field -> name -> function, for fields that hold a function.
    """
    hints = typing.get_type_hints(owner)
    fields = {}
    for field in dataclasses.fields(owner):
        if field.init and field.name[0] != "_":
            fields[field.name] = field
    decoded: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{section}.{name}"
        if name not in fields:
            problems.add_unknown(path, value, f"no such field of {owner.__name__}", fields)
            continue
        if value is None and fields[name].default is None:
            decoded[name] = None
            continue
        try:
            if functions and name in functions and isinstance(value, str):
                named = functions[name]
                short = value.rpartition(".")[2]  # Megatron Bridge writes torch.nn.functional.silu
                decoded[name] = named[_decode_choice(short, tuple(named))]
            else:
                decoded[name] = decode_value(value, hints[name])
        except WrongValueError as error:
            problems.add(path, error.rule, value, error.remedy)
    return decoded


def decode_value(value: Any, annotation: Any, *, optional: bool = False) -> Any:
    """Return plain data as a value of the annotated type.

    Args:
        value: The plain data.
        annotation: bool, int, float, str, torch.dtype, an Enum, Literal, list, tuple, or an
            Optional or Union of these.
        optional: Whether None is legal. Then an unquoted ``off`` or ``no``, which YAML reads as
            False, means None for a field that holds a name.

    Raises:
        WrongValueError: The value does not fit the annotation.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return _decode_union(value, arguments)
    if origin is Literal:
        return _decode_choice(value, arguments, optional=optional)
    if annotation in (bool, int, float):
        return coerce(value, annotation.__name__)
    if annotation is str:
        return _decode_text(value, optional=optional)
    if origin in (list, tuple) or annotation in (list, tuple):
        return _decode_sequence(value, origin or annotation, arguments)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _decode_enum(value, annotation)
    if getattr(annotation, "__module__", "") == "torch" and annotation.__name__ == "dtype":
        return get_torch_dtype(coerce(value, "dtype"))
    if annotation is Any:
        return value
    if isinstance(value, Mapping | str) and hasattr(annotation, "from_config_dict"):
        return _decode_recipe(value, annotation)
    rule = f"holds {_describe_annotation(annotation)}, which a configuration cannot describe"
    raise _NotDataError(rule, value, "Set it in Python.")


def _decode_recipe(value: Mapping[str, Any] | str, annotation: Any) -> Any:
    """Return Megatron's object of a per-module recipe: the content of a file of matchers."""
    if isinstance(value, str):
        rule = "is the content of a file of configs and matchers, not its path"
        raise WrongValueError(rule, value, "Write the content.")
    try:
        return annotation.from_config_dict(convert_to_file_content(value))
    except Exception as error:  # noqa: BLE001  Megatron raises exceptions of any class
        why = " ".join(str(error).split()) or type(error).__name__
        rule = f"is refused by Megatron's RecipeConfig ({why})"
        raise WrongValueError(rule, dict(value), "Correct it.") from None


def _decode_union(value: Any, members: tuple[Any, ...]) -> Any:
    """Return the value as the first member of a union that it fits.

    Members that have the value's type are tried before members to which it can be converted.
    """
    optional = type(None) in members
    if value is None and optional:
        return None
    same_type, other_types = [], []
    for member in members:
        if type(value) in (member, typing.get_origin(member)):
            same_type.append(member)
        elif member is not type(None):
            other_types.append(member)
    refusals: list[WrongValueError] = []
    for member in (*same_type, *other_types):
        try:
            return decode_value(value, member, optional=optional)
        except WrongValueError as error:
            refusals.append(error)
    # The refusal by a type of plain data helps the user more than the refusal by another type.
    for refusal in refusals:
        if not isinstance(refusal, _NotDataError):
            raise refusal
    raise refusals[0]


def _decode_choice(value: Any, known: tuple[Any, ...], *, optional: bool = False) -> Any:
    """Return the known value that equals a value or has the same text."""
    for name in known:
        if name == value and isinstance(name, bool) == isinstance(value, bool):
            return name
    is_none = value is False or (isinstance(value, str) and value.lower() in ("none", "null"))
    if optional and is_none:
        return None
    names = list(map(str, known))
    if str(value) in names and not isinstance(value, bool):  # "2" for 2
        return known[names.index(str(value))]
    raise _make_choice_error(value, names)


def _decode_text(value: Any, *, optional: bool) -> str | None:
    """Return a name. A number or a switch is refused, because YAML may have misread the text."""
    if isinstance(value, str) or (optional and value is False):
        return coerce(value, "name", switch=optional)  # type: ignore[no-any-return]
    remedy = "Give a single value"
    if isinstance(value, bool):
        remedy = "YAML reads an unquoted yes, no, on or off as a switch; quote it"
    elif isinstance(value, int | float):
        remedy = "Quote it"
    raise WrongValueError("must be text", value, f"{remedy}.")


def _decode_sequence(value: Any, kind: type[Any], arguments: tuple[Any, ...]) -> Any:
    """Return a list or a tuple with each item decoded by its annotation."""
    if not isinstance(value, list | tuple):
        raise WrongValueError("must be a list", value, "Write [a, b].")
    is_fixed = kind is tuple and arguments and Ellipsis not in arguments
    if is_fixed and len(value) != len(arguments):
        raise WrongValueError(f"must have {len(arguments)} items", list(value), "Give all of them.")
    annotations: Sequence[Any] = arguments
    if not is_fixed:
        item: Any = Any
        if arguments:
            item = arguments[0]
        annotations = [item] * len(value)
    try:
        return kind(map(decode_value, value, annotations))
    except WrongValueError as error:
        raise WrongValueError(f"each item {error.rule}", list(value), error.remedy) from None


def _decode_enum(value: Any, kind: type[enum.Enum]) -> enum.Enum:
    """Return the member with a name or a value. A YAML of Megatron Bridge may have either."""
    is_plain = isinstance(value, str | int) and not isinstance(value, bool)
    for member in kind:
        if is_plain and str(value).lower() in (member.name.lower(), str(member.value).lower()):
            return member
    raise _make_choice_error(value, list(kind.__members__))


def _make_choice_error(value: Any, names: list[str]) -> WrongValueError:
    """Return the error of a value that is not among some names, with the nearest names."""
    hint = did_you_mean(close_matches(str(value), names)) or f"Use {listed(names)}."
    return WrongValueError(f"must be one of {', '.join(names)}", value, hint)


def _describe_annotation(annotation: Any) -> str:
    """Return a type that plain data cannot describe, with its article."""
    if typing.get_origin(annotation) is Callable or annotation in (Callable, typing.Callable):
        return "a function"
    return f"a {getattr(annotation, '__name__', str(annotation))} object"
