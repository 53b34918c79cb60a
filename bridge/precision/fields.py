"""`stated(default)`: a dataclass field that knows whether it was set.

The descriptor keeps what was stated in one dictionary per object; an unstated field reads as its default. Values are
checked for type only: what a value means is the business of `finalize()`. The spellings of YAML and command lines
("2", "off", "1e-5") are read in Python too: a switch is true, yes, on or 1, or false, no, off or 0, in any case.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass
from typing import TYPE_CHECKING, Any

from bridge.errors import PrecisionTypeError, WrongValueError, listed
from bridge.precision.dtypes import SPELLINGS, dtype_token, is_torch_dtype, torch_dtype
from bridge.precision.modules import WrongRowsError, plain_rows
from bridge.precision.subjects import Subject

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.precision.statements import Statements

LAYER_COUNTS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
"""How many layers `first_last_layers_bf16` keeps at either end."""
NAMED, KEY = "option", "key of a --yaml-cfg file"
"""Values of `StatedField.flag`."""
YES = frozenset({"true", "yes", "on", "1"})
NO = frozenset({"false", "no", "off", "0"})


@dataclass(kw_only=True, eq=False)
class StatedField:
    """Data descriptor behind one field of `MixedPrecisionConfig`."""

    default: Any
    kind: str
    """bool, int, float, name, names (several), format (a name; a dtype by its token), dtype or rows (of `modules`)."""
    optional: bool = False
    """None is a value of its own (``fp8=None``: no FP8)."""
    unstates: bool = False
    """None takes a statement back instead of being one (``params_dtype=None``: derive it)."""
    twin: str | None = None
    """Another name of the same setting; stated alone, either name stands for both."""
    leads: bool = False
    """Of two twins stated with different values, this one is read."""
    needs: str | None = None
    """A switch that this one has no meaning without: where an earlier layer turned this one on and a later one turns
    that one off, this one goes off with it."""
    examples: tuple[str, ...] = ()
    """Values to name where one of the wrong type was given."""
    choices: tuple[str, ...] = ()
    """The only values that Megatron takes; empty: its own code decides."""
    spellings: tuple[tuple[str, str], ...] = ()
    """Further spellings of values, each with the one it stands for."""
    subject: Subject | None = None
    """The subject under which it is listed, and whose meaning a change has on resume."""
    family: str | None = None
    """fp8, fp4 or low (either): it acts only while that family is on."""
    schemes: tuple[str, ...] = ()
    """The scaling schemes under which it reaches Transformer Engine; empty: whatever the scheme."""
    is_live: bool = False
    """Megatron reads it in every forward pass, so that a schedule may change it."""
    flag: str | None = NAMED
    """Megatron-LM has it as an option, or as a key of a file (`KEY`), of the field's own name; None: it has not."""
    name: str = ""
    """Set by the class that holds the field."""

    @property
    def stores_weights(self) -> bool:
        """Whether it is about weights stored in FP8 or FP4: one of two names of that switch, or one that needs it."""
        return self.twin is not None or self.needs is not None

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, holder: Statements | None, owner: type) -> Any:
        if holder is None:
            return self.default
        value = holder._read(self)  # noqa: SLF001  the holder's half of this descriptor
        if self.kind == "rows" and value is not None:
            return copy.deepcopy(list(value))
        return torch_dtype(value) if self.kind == "dtype" and value is not None else value

    def __set__(self, holder: Statements, value: object) -> None:
        holder._state({self.name: value})  # noqa: SLF001  as above

    def __delete__(self, holder: Statements) -> None:
        holder._unstate(self.name)  # noqa: SLF001  as above

    def check(self, value: object) -> Any:
        """Return `value` in the form it is kept in; PrecisionTypeError for one of the wrong type for the field."""
        if value is None and (self.optional or self.unstates):
            return None
        if isinstance(value, str):
            value = dict(self.spellings).get(value.lower(), value)
        try:
            return coerce(value, self.kind, switch=self.optional)
        except WrongRowsError as error:
            raise self._wrong_rows(error) from None
        except WrongValueError as error:
            path = f"mixed_precision.{self.name}"
            remedy = f"Use {listed(self.examples)}." if self.examples else error.remedy
            raise PrecisionTypeError.of(path, error.rule, value, remedy) from None

    def _wrong_rows(self, error: WrongRowsError) -> PrecisionTypeError:
        path, first = f"mixed_precision.{self.name}", error.faults[0]
        lines = [str(PrecisionTypeError.of(path, fault.rule, fault.value, fault.remedy)) for fault in error.faults]
        return PrecisionTypeError(
            "\n".join(lines), path=path, rule=first.rule, value=first.value, remedy=first.remedy, faults=error.faults
        )


def default_of(field: Field[Any]) -> Any:
    """Return the default of a dataclass field, made again where it has a factory; `MISSING` without one."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def stated(default: Any, kind: str, subject: Subject | None = None, **options: Any) -> Any:
    """Declare a field of `MixedPrecisionConfig`; see `StatedField`."""
    return StatedField(default=default, kind=kind, subject=subject, **options)


def coerce(value: object, kind: str, *, switch: bool = False) -> Any:
    """Return `value` as a `kind`, without ever changing what it means.

    Args:
        value: Anything; text in the spellings that YAML and command lines produce ("2", "off", "1e-5").
        kind: A kind of `StatedField`.
        switch: For names: False means None, as YAML reads an unquoted ``off``.

    Raises:
        WrongValueError: It cannot be read as that.
    """
    if isinstance(value, str) and kind in _FROM_TEXT:
        value = _FROM_TEXT[kind](value)
    if kind == "name":
        return _name(value, switch=switch)
    if kind == "format":
        is_dtype = is_torch_dtype(value) or str(value).lower().removeprefix("torch.") in SPELLINGS
        return dtype_token(value) if is_dtype else _name(value, switch=switch)
    return _COERCIONS[kind](value)


def _bool(value: object) -> bool:
    if _is_bool(value):
        return bool(value)
    raise WrongValueError("must be true or false", value)


def _int(value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not _is_bool(value) and hasattr(value, "__index__"):
        return operator.index(value)
    raise WrongValueError("must be a whole number", value)


def _float(value: object) -> float:
    if isinstance(value, int | float) and not _is_bool(value):
        return value
    if not _is_bool(value) and not isinstance(value, str) and hasattr(value, "__float__"):
        return float(value)
    raise WrongValueError("must be a number", value)


def _name(value: object, *, switch: bool) -> str | None:
    value = getattr(value, "value", value)  # Megatron's Fp8Recipe and Fp4Recipe are string enums
    if switch and (value is False or str(value).lower() in {"none", "null"}):
        return None
    if isinstance(value, str):
        return str(value)
    remedy = "YAML reads an unquoted yes or on as true." if value is True else ""
    raise WrongValueError("must be a name", value, remedy)


def _names(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Iterable):
        names = tuple(value)
        if all(isinstance(name, str) for name in names):
            return names
    raise WrongValueError("must be a list of names", value)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or type(value).__name__ == "bool_"  # NumPy's


def number_of_text(text: str) -> float | str:
    """Return the number that a text spells, or the text."""
    for parse in (int, float):
        try:
            return parse(text)
        except ValueError:
            continue
    return text


_FROM_TEXT: dict[str, Callable[[str], object]] = {
    "bool": lambda text: text.lower() in YES if text.lower() in YES | NO else text,
    "int": number_of_text,
    "float": number_of_text,
}
_COERCIONS: dict[str, Callable[[object], Any]] = {
    "bool": _bool,
    "int": _int,
    "float": _float,
    "names": _names,
    "dtype": dtype_token,
    "rows": plain_rows,
}
