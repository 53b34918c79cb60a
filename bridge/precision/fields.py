"""`stated(default)`: a dataclass field that knows whether somebody set it.

The descriptor keeps what was stated in one dictionary per object; an unstated field reads as its default. Values are
checked for type only: what a value means is the business of `finalize()`.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Protocol

from bridge.errors import PrecisionTypeError
from bridge.precision.dtypes import dtype_token, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["StatedField", "coerce", "stated"]

YES = frozenset({"true", "yes", "on", "1"})
NO = frozenset({"false", "no", "off", "0"})


class _Holder(Protocol):
    """What the descriptor needs of its object."""

    def _read(self, field: StatedField) -> Any: ...
    def _assign(self, name: str, value: object) -> None: ...
    def _unstate(self, name: str) -> None: ...


class StatedField:
    """Data descriptor behind one field of `MixedPrecisionConfig`.

    Args:
        default: What an unstated field reads as.
        kind: bool, int, float, name or dtype.
        optional: None is a value of its own (``fp8=None``: no FP8).
        unstates: None takes a statement back instead of being one (``params_dtype=None``: derive it).
        twin: Another name of the same setting; stated alone, either name stands for both.
        leads: Of two twins stated with different values, this one is read.
    """

    name: str

    def __init__(
        self,
        default: object,
        *,
        kind: str,
        optional: bool = False,
        unstates: bool = False,
        twin: str | None = None,
        leads: bool = False,
    ) -> None:
        self.default = default
        self.kind = kind
        self.optional = optional
        self.unstates = unstates
        self.twin = twin
        self.leads = leads

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, holder: _Holder | None, owner: type) -> Any:
        if holder is None:
            return self.default
        value = holder._read(self)
        return torch_dtype(value) if self.kind == "dtype" and value is not None else value

    def __set__(self, holder: _Holder, value: object) -> None:
        holder._assign(self.name, value)

    def __delete__(self, holder: _Holder) -> None:
        holder._unstate(self.name)

    def check(self, value: object, *, text: bool = False) -> Any:
        """Return `value` in the form it is kept in.

        Args:
            value: What somebody gave.
            text: The value comes from YAML, JSON or a command line, where numbers and switches may be strings.

        Raises:
            PrecisionTypeError: The value is of the wrong type for the field.
        """
        if value is None and (self.optional or self.unstates):
            return None
        try:
            return coerce(value, self.kind, text=text, switch=self.optional)
        except ValueError as error:
            raise PrecisionTypeError(f"mixed_precision.{self.name}: {_sentence(str(error))}") from None


def stated(default: Any, *, kind: str, **options: Any) -> Any:
    """Declare a field of `MixedPrecisionConfig`; see `StatedField`."""
    return StatedField(default, kind=kind, **options)


def coerce(value: object, kind: str, *, text: bool = False, switch: bool = False) -> Any:
    """Return `value` as a `kind`, without ever changing what it means.

    Args:
        value: Anything.
        kind: bool, int, float, name or dtype.
        text: Accept the spellings that YAML and command lines produce ("2", "off", "1e-5").
        switch: For names: False means None, as YAML reads an unquoted ``off``.

    Raises:
        ValueError: Says what was expected and what was given, as a clause.
    """
    return _COERCIONS[kind](value, text, switch)


def _bool(value: object, text: bool, switch: bool) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    if text and isinstance(value, str) and value.lower() in YES | NO:
        return value.lower() in YES
    raise ValueError(f"must be true or false, got {value!r}")


def _int(value: object, text: bool, switch: bool) -> int:
    if text and isinstance(value, str):
        value = _number(value, "a whole number")
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, bool) and hasattr(value, "__index__"):
        return operator.index(value)
    raise ValueError(f"must be a whole number, got {value!r}")


def _float(value: object, text: bool, switch: bool) -> float:
    if text and isinstance(value, str):
        return _number(value, "a number")
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        raise ValueError(f"must be a number, got {value!r}")
    if isinstance(value, int | float):
        return value
    if not isinstance(value, str) and hasattr(value, "__float__"):
        return float(value)
    raise ValueError(f"must be a number, got {value!r}")


def _number(text: str, wanted: str) -> float:
    try:
        return int(text, 10)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"must be {wanted}, got {text!r}") from None


def _name(value: object, text: bool, switch: bool) -> str | None:
    value = getattr(value, "value", value)  # Megatron's Fp8Recipe and Fp4Recipe are string enums
    if isinstance(value, str):
        off = text and switch and value.lower() in {"none", "null"}
        return None if off else str(value)
    if switch and value is False:
        return None
    raise ValueError(f"must be a name, got {value!r}" + (". YAML reads an unquoted yes or on as true" if text else ""))


def _dtype(value: object, text: bool, switch: bool) -> str:
    return dtype_token(value)


_COERCIONS: dict[str, Callable[[object, bool, bool], Any]] = {
    "bool": _bool,
    "int": _int,
    "float": _float,
    "name": _name,
    "dtype": _dtype,
}


def _sentence(clause: str) -> str:
    return clause if clause.endswith((".", "?")) else f"{clause}."
