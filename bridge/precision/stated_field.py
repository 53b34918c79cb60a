"""The fields of a precision: `stated(default)` declares one.

A field is a descriptor. Its object (`Statements`) keeps the stated value. An unstated field reads
as its default. A field checks the type of a value only. `finalize()` checks its meaning.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from dataclasses import MISSING, Field, dataclass
from typing import TYPE_CHECKING, Any

from bridge.errors import PrecisionTypeError, WrongValueError, listed
from bridge.precision.coercion import Kind, coerce, get_torch_dtype
from bridge.precision.row_normalisation import WrongRowsError
from bridge.precision.subjects import Subject

if TYPE_CHECKING:
    from bridge.precision.statements import Statements

LAYER_COUNTS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
"""The fields that count the layers which `first_last_layers_bf16` keeps at either end."""
NAMED, KEY = "option", "key of a --yaml-cfg file"
"""Values of `StatedField.flag`: an option or a key of the field's name."""
COMMAND_LINE = "command line"
"""The source of a value that the command line states."""


@dataclass(kw_only=True, eq=False)
class StatedField:
    """The data descriptor of a field of `MixedPrecisionConfig`."""

    default: Any
    kind: Kind
    """The kind of its values: bool, int, float, name, names, format, dtype or rows.

    `names` is a list of names. `format` is a name or the token of a dtype. `rows` are the rows of
    `modules`.
    """
    optional: bool = False
    """Whether None is a value (``fp8=None``: no FP8)."""
    unstates: bool = False
    """Whether None removes a statement (``params_dtype=None``: derive it)."""
    twin: str | None = None
    """Another name of the same setting. A value that is stated under either name holds for both."""
    leads: bool = False
    """Whether this name is used if both names are stated with different values."""
    needs: str | None = None
    """A switch without which this switch has no meaning.

    If a recipe turns this switch on and a later statement turns the needed switch off, this switch
    is turned off too.
    """
    examples: tuple[str, ...] = ()
    """Example values for the error about a value of a wrong type."""
    choices: tuple[str, ...] = ()
    """The only values that Megatron accepts. Empty: only Megatron's code checks the value."""
    spellings: tuple[tuple[str, str], ...] = ()
    """Further spellings of values, each with its value."""
    subject: Subject | None = None
    """The subject under which it is listed. It also decides the outcome of a change on resume."""
    family: str | None = None
    """The family in which it has an effect: fp8, fp4 or low (either). None: in every run."""
    schemes: tuple[str, ...] = ()
    """The scaling schemes under which it has an effect. Empty: under every scheme."""
    stores_weights: bool = False
    """Whether it decides that weights are stored in FP8 or FP4, or depends on that."""
    is_live: bool = False
    """Whether Megatron reads it in every forward pass, so that a schedule may change it."""
    flag: str | None = NAMED
    """The form in which Megatron-LM takes it: `NAMED` or `KEY`. None: it has no form there."""
    name: str = ""
    """The name of the field, set by its class."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, holder: Statements | None, owner: type) -> Any:
        if holder is None:
            return self.default
        value = holder._read(self)  # noqa: SLF001  the holder's half of this descriptor
        if value is None:
            return None
        if self.kind == "rows":
            return copy.deepcopy(list(value))
        if self.kind == "dtype":
            return get_torch_dtype(value)
        return value

    def __set__(self, holder: Statements, value: object) -> None:
        holder._state({self.name: value})  # noqa: SLF001  as above

    def __delete__(self, holder: Statements) -> None:
        holder._unstate(self.name)  # noqa: SLF001  as above

    def check(self, value: object) -> Any:
        """Return `value` in the form in which the field keeps it.

        Raises:
            PrecisionTypeError: The value is of the wrong type for the field.
        """
        if value is None and (self.optional or self.unstates):
            return None
        if isinstance(value, str):
            value = dict(self.spellings).get(value.lower(), value)
        try:
            return coerce(value, self.kind, switch=self.optional)
        except WrongRowsError as error:
            raise self._make_rows_error(error) from None
        except WrongValueError as error:
            remedy = error.remedy
            if self.examples:
                remedy = f"Use {listed(self.examples)}."
            raise PrecisionTypeError.of(self._path, error.rule, value, remedy) from None

    @property
    def _path(self) -> str:
        return f"mixed_precision.{self.name}"

    def _make_rows_error(self, error: WrongRowsError) -> PrecisionTypeError:
        """Return the error of rows, with a line for each fault."""
        lines = []
        for fault in error.faults:
            line = PrecisionTypeError.of(self._path, fault.rule, fault.value, fault.remedy)
            lines.append(str(line))
        return PrecisionTypeError(
            "\n".join(lines),
            faults=error.faults,
            path=self._path,
            rule=error.rule,
            value=error.value,
            remedy=error.remedy,
        )


def get_field_default(field: Field[Any]) -> Any:
    """Return the default of a dataclass field, or `MISSING`. A default factory is called each time."""
    if field.default_factory is MISSING:
        return field.default
    return field.default_factory()


def stated(default: Any, kind: Kind, subject: Subject | None = None, **options: Any) -> Any:
    """Declare a field of a precision. The options are attributes of `StatedField`."""
    return StatedField(default=default, kind=kind, subject=subject, **options)


@functools.cache
def get_field_descriptors(owner: Any) -> dict[str, StatedField]:
    """Return the `StatedField`s of a class by name, in order of declaration."""
    rows = {}
    for field in dataclasses.fields(owner):
        row = inspect.getattr_static(owner, field.name, None)
        if isinstance(row, StatedField):
            rows[field.name] = row
    return rows
