"""`coerce`: values in the form in which a precision stores them.

A dtype is stored as a token, a plain string such as "bf16". So recipes can be listed, compared and
written to YAML without importing torch. Every common spelling of a dtype is accepted. The spellings
of YAML and command lines ("2", "off", "1e-5") are accepted in Python too. A switch is true, yes, on
or 1, or false, no, off or 0, in upper or lower case.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ForwardRef, Literal, TypeAlias

from bridge.errors import WrongValueError, close_matches, did_you_mean
from bridge.precision.row_normalisation import normalise_rows

if TYPE_CHECKING:
    import torch


class _LazyTorch:
    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


LAZY_TORCH = _LazyTorch()
"""Replaces `torch` in modules whose annotations name it. Evaluating an annotation imports torch."""

if TYPE_CHECKING:
    DType: TypeAlias = torch.dtype | str
else:
    # `typing.get_type_hints` can evaluate it in a module that has `LAZY_TORCH` as `torch`.
    DType = ForwardRef("torch.dtype | str")
"""A dtype as a user may write it: ``torch.bfloat16``, "bf16", "bfloat16", "torch.bfloat16"."""

TORCH_NAMES = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "uint8": "uint8",
}
"""Canonical token -> name of the dtype in `torch`."""

DTYPE_SPELLINGS = {
    **{token: token for token in TORCH_NAMES},
    **{name: token for token, name in TORCH_NAMES.items()},
    "double": "fp64",
    "float": "fp32",
    "half": "fp16",
    "bfloat": "bf16",
    "single": "fp32",
    "32": "fp32",
}
"""Accepted spelling, in lower case and without ``torch.`` -> canonical token."""
TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "0"})


def is_torch_dtype(value: object) -> bool:
    """Return whether `value` is a `torch.dtype`, without importing torch."""
    return type(value).__module__ == "torch" and type(value).__name__ == "dtype"


def parse_dtype(value: object) -> str:
    """Return the canonical token ("bf16") of a `torch.dtype` or of a common spelling of a dtype.

    Raises:
        WrongValueError: The value is not a dtype. For a string the remedy names the nearest dtype.
    """
    spelling = str(value)
    is_dtype = is_torch_dtype(value)
    if not isinstance(value, str) and not is_dtype:
        raise WrongValueError(
            "must be a dtype or its name, such as torch.bfloat16 or 'bf16'", value
        )
    name = spelling.strip().lower().removeprefix("torch.")
    if name in DTYPE_SPELLINGS:
        return DTYPE_SPELLINGS[name]
    if is_dtype:
        return name
    nearest = did_you_mean(close_matches(name, DTYPE_SPELLINGS)) or "Use 'fp32', 'bf16' or 'fp16'."
    raise WrongValueError("must be the name of a dtype", value, nearest)


def get_torch_dtype(token: str) -> torch.dtype:
    """Return the `torch.dtype` of a canonical token. The first call imports torch."""
    import torch

    dtype = getattr(torch, TORCH_NAMES.get(token, token))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{token!r} names no torch.dtype")  # noqa: TRY004  the type of the token is right
    return dtype


Kind = Literal["bool", "int", "float", "name", "names", "format", "dtype", "rows"]
"""The kind of a `StatedField`: the type of its values."""


def coerce(value: object, kind: Kind, *, switch: bool = False) -> Any:
    """Return a value in the form of a kind, without changing its meaning.

    Args:
        value: The value. Text may have the spellings of YAML and command lines.
        kind: The kind of the field.
        switch: Whether False means None, for a name. YAML reads an unquoted ``off`` as False.

    Raises:
        WrongValueError: The value is not of this kind.
    """
    if isinstance(value, str) and kind in _FROM_TEXT:
        value = _FROM_TEXT[kind](value)
    if kind == "name":
        return _coerce_name(value, switch=switch)
    if kind == "format":
        if is_torch_dtype(value) or str(value).lower().removeprefix("torch.") in DTYPE_SPELLINGS:
            return parse_dtype(value)
        return _coerce_name(value, switch=switch)
    return _COERCIONS[kind](value)


def _coerce_bool(value: object) -> bool:
    if _is_bool(value):
        return bool(value)
    raise WrongValueError("must be true or false", value)


def _coerce_int(value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not _is_bool(value) and hasattr(value, "__index__"):
        return operator.index(value)
    raise WrongValueError("must be a whole number", value)


def _coerce_float(value: object) -> float:
    if isinstance(value, int | float) and not _is_bool(value):
        return value
    if not _is_bool(value) and not isinstance(value, str) and hasattr(value, "__float__"):
        return float(value)
    raise WrongValueError("must be a number", value)


def _coerce_name(value: object, *, switch: bool) -> str | None:
    value = getattr(value, "value", value)  # Megatron's Fp8Recipe and Fp4Recipe are string enums
    if switch and (value is False or str(value).lower() in {"none", "null"}):
        return None
    if isinstance(value, str):
        return str(value)
    remedy = ""
    if value is True:
        remedy = "YAML reads an unquoted yes or on as true."
    raise WrongValueError("must be a name", value, remedy)


def _coerce_names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Iterable):
        names = tuple(value)
        if all(isinstance(name, str) for name in names):
            return names
    raise WrongValueError("must be a list of names", value)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ == "bool_"  # the bool of NumPy


def parse_number(text: str) -> float | str:
    """Return the number that a text states, or the text itself if it is not a number."""
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return text


def _parse_switch(text: str) -> bool | str:
    """Return the boolean that a text states, or the text itself if it is not a switch."""
    if text.lower() in TRUE_WORDS:
        return True
    if text.lower() in FALSE_WORDS:
        return False
    return text


_FROM_TEXT: dict[str, Callable[[str], object]] = {
    "bool": _parse_switch,
    "int": parse_number,
    "float": parse_number,
}
_COERCIONS: dict[str, Callable[[object], Any]] = {
    "bool": _coerce_bool,
    "int": _coerce_int,
    "float": _coerce_float,
    "names": _coerce_names,
    "dtype": parse_dtype,
    "rows": normalise_rows,
}


def to_plain_data(value: Any) -> Any:
    """Return a value as data for JSON: a dtype as its token, an unknown object as its repr."""
    if isinstance(value, str):
        return getattr(value, "value", value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if is_torch_dtype(value):
        return parse_dtype(value)
    return repr(value)
