"""The fields of a precision, `stated(default)`, and `Statements`: which of them were set, and by which source.

A field is a descriptor. Its object keeps the statements in dictionaries: the values, their sources, the switches that a
later statement made impossible, and the fields that were left open by a stated None. An unstated field reads as its
default. Values are checked for type only: what a value means is the business of `finalize()`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from bridge.errors import PrecisionTypeError, UnknownFieldError, WrongValueError, close_matches, did_you_mean, listed
from bridge.precision.modules import WrongRowsError
from bridge.precision.subjects import Subject
from bridge.precision.values import coerce, torch_dtype

LAYER_COUNTS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
"""How many layers `first_last_layers_bf16` keeps at either end."""
NAMED, KEY = "option", "key of a --yaml-cfg file"
"""Values of `StatedField.flag`."""
COMMAND_LINE = "command line"
"""The source of a value that the command line states."""
_KEPT = ("_values", "_sources", "_aside", "_of_recipe", "_open")


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
        path = f"mixed_precision.{self.name}"
        if isinstance(value, str):
            value = dict(self.spellings).get(value.lower(), value)
        try:
            return coerce(value, self.kind, switch=self.optional)
        except WrongRowsError as error:
            lines = [str(PrecisionTypeError.of(path, fault.rule, fault.value, fault.remedy)) for fault in error.faults]
            parts: dict[str, Any] = {"path": path, "rule": error.rule, "value": error.value, "remedy": error.remedy}
            raise PrecisionTypeError("\n".join(lines), faults=error.faults, **parts) from None
        except WrongValueError as error:
            remedy = f"Use {listed(self.examples)}." if self.examples else error.remedy
            raise PrecisionTypeError.of(path, error.rule, value, remedy) from None


def default_of(field: Field[Any]) -> Any:
    """Return the default of a dataclass field, made again where it has a factory; `MISSING` without one."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def stated(default: Any, kind: str, subject: Subject | None = None, **options: Any) -> Any:
    """Declare a field of `MixedPrecisionConfig`; see `StatedField`."""
    return StatedField(default=default, kind=kind, subject=subject, **options)


class _Origin:
    """Read by `dataclasses.replace` on an object: the object itself. On the class: None, the InitVar's default."""

    def __get__(self, holder: Any, owner: type) -> Any:
        return holder


ORIGIN: Any = _Origin()
"""Default of the InitVar `_origin`, which a dataclass of statements declares before its fields.

`dataclasses.replace` hands the constructor the caller's changes first and then every remaining field in order of
declaration. With this one declared first, what stands before it was named by the caller.
"""


class _Signature:
    """The fields as parameters, for `inspect.signature` and what is built on it; subclasses have their own."""

    def __get__(self, holder: object, owner: Any) -> inspect.Signature:
        parameters = []
        for field in dataclasses.fields(owner):
            default = field.default
            if default is MISSING:
                made = field.default_factory is not MISSING
                default = dataclasses._HAS_DEFAULT_FACTORY if made else inspect.Parameter.empty  # type: ignore[attr-defined]
            parameters.append(
                inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=field.type)
            )
        return inspect.Signature(parameters)


class Statements:  # noqa: PLW1641  mutable, hence without a hash, as any such dataclass
    """The statements about an object's `StatedField`s, and their sources."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
        _values: dict[str, Any]
        _sources: dict[str, str]
        _aside: dict[str, str]
        _of_recipe: dict[str, str]
        _open: dict[str, str]
        _recipe: str | None
    else:
        __signature__ = _Signature()

        def __init__(self, **given: object) -> None:
            origin, named = given.get("_origin"), list(given)
            held = vars(origin) if origin is not None else {}
            vars(self).update({kept: dict(held.get(kept, ())) for kept in _KEPT}, _recipe=held.get("_recipe"))
            count = named.index("_origin") if origin is not None else len(named)
            changes = {name: given[name] for name in named[:count]}
            known, stated = self.__dataclass_fields__, stated_fields(type(self))
            for name in changes:
                if name not in known or name == "_origin":
                    raise TypeError(str(_unknown_field(name, type(self))))
            for field in [field for field in dataclasses.fields(self) if field.name not in stated]:
                value = given.get(field.name, default_of(field))
                if value is MISSING:
                    raise TypeError(f"{type(self).__name__}() is missing the field {field.name!r}")
                setattr(self, field.name, value)
            self._state({name: value for name, value in changes.items() if name in stated})
            if hasattr(self, "__post_init__"):
                self.__post_init__()

        def __getattr__(self, name: str) -> Any:
            """Refuse a name that does not exist, with the nearest field."""
            if name.startswith("_"):
                raise AttributeError(name)
            raise _unknown_field(name, type(self))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # @dataclass leaves a constructor that is already there alone, so that subclasses keep track of what was stated.
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            inherited = next((vars(b)[name] for b in cls.__mro__[1:] if name in vars(b)), None)
            if isinstance(inherited, StatedField) and not isinstance(value, StatedField):
                # Another default; still a field that knows what was stated.
                field = dataclasses.replace(inherited, default=inherited.check(value))
                setattr(cls, name, field)
                field.__set_name__(cls, name)
        if "__init__" not in vars(cls):
            cls.__init__ = Statements.__init__  # type: ignore[method-assign]

    @property
    def stated(self) -> frozenset[str]:
        """Names of the fields that were set."""
        return frozenset(self._values)

    @property
    def stated_values(self) -> Mapping[str, Any]:
        """The stated fields and their values, dtypes as tokens; a view, read-only by intent."""
        return self._values

    @property
    def sources(self) -> Mapping[str, str]:
        """Field -> the source that stated it, where that is known; a view, read-only by intent."""
        return self._sources

    @property
    def recipe(self) -> str | None:
        """Name of the registered recipe this config was made from, or None."""
        return self._recipe

    @property
    def put_aside(self) -> dict[str, str]:
        """Switch -> the source that had turned it on, where a later statement turned off the switch it needs."""
        return dict(self._aside)

    def is_stated(self, name: str) -> bool:
        """Return whether `name`, or the other name of the same setting, was stated."""
        return name in self._values or self._field(name).twin in self._values

    def is_left_open(self, name: str) -> bool:
        """Return whether `name` was last set to a None that takes its statement back."""
        return name in self._open

    def source_of(self, name: str) -> str:
        """Return the source that set `name`: "default" for an unstated field."""
        field = self._field(name)
        for known in (name, field.twin):
            if known in self._values:
                return self._sources.get(known) or "stated"
        return "default"

    def reading(self, name: str) -> Any:
        """Return what `name` reads as, a dtype as its token."""
        return self._read(self._field(name))

    def state(self, source: str | None = None, /, **values: object) -> Self:
        """Set fields and remember the source, "command line" or "team.yaml" say; returns the config itself.

        PrecisionTypeError for a value of the wrong type, UnknownFieldError for a name that is no field; nothing
        is changed then.
        """
        self._state(values, source=source)
        return self

    def only(self, names: Collection[str]) -> Self:
        """Return a copy in which no other field is stated than these."""
        copied = copy.copy(self)
        for name in (*self._values, *self._open):
            if name not in names:
                delattr(copied, name)
        return copied

    def checked(self, name: str, value: object) -> Any:
        """Return a value in the form in which the field keeps it; PrecisionTypeError for one of the wrong type."""
        return self._field(name).check(value)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the names of all precision fields, in order of declaration."""
        own_class: Any = cls
        return tuple(stated_fields(own_class))

    def _field(self, name: str) -> StatedField:
        own_class: Any = type(self)
        field = stated_fields(own_class).get(name)
        if field is None:
            raise _unknown_field(name, type(self))
        return field

    def _read(self, field: StatedField) -> Any:
        default = field.default
        if field.twin is None:
            return self._values.get(field.name, default)
        leading, other = (field.name, field.twin) if field.leads else (field.twin, field.name)
        return self._values.get(leading, self._values.get(other, default))

    def _state(self, given: Mapping[str, object], *, source: str | None = None) -> None:
        checked = {name: self._field(name).check(value) for name, value in given.items()}
        for name, value in checked.items():
            field = self._field(name)
            self._aside.pop(name, None)
            self._open.pop(name, None)
            if value is None and field.unstates:
                if name in self._values:
                    self._unstate(name)
                self._open[name] = source or "stated"
                continue
            self._put(name, value, source)
            if field.twin in self._values and field.twin not in checked:
                self._put(field.twin, value, source)
        own_class: Any = type(self)
        for field in stated_fields(own_class).values():
            if field.needs and field.name not in checked and {field.needs, self._field(field.needs).twin} & {*checked}:
                self._follow(field.name, field.needs, source)

    def _follow(self, name: str, needed: str, source: str | None) -> None:
        """Turn a switch of an earlier layer off with the one it needs, and on again with it.

        Only a statement of a named source (a recipe, a file) gives way: one source that states both contradicts itself.
        """
        is_on = self._read(self._field(needed))
        by = self._sources.get(name)
        if is_on and name in self._aside:
            self._put(name, True, self._aside.pop(name))
        elif not is_on and self._values.get(name) is True and by not in (None, source):
            self._aside[name] = str(by)
            self._put(name, False, f"follows {needed}")

    def _put(self, name: str, value: object, source: str | None) -> None:
        self._values[name] = value
        self._sources.pop(name, None)
        if source is not None:
            self._sources[name] = source

    def _unstate(self, name: str) -> None:
        for known in (name, self._field(name).twin or name):
            for kept in (self._values, self._sources, self._aside, self._open):
                kept.pop(known, None)

    def made_by(self, recipe: str, *, over: Collection[str] = ()) -> None:
        """Remember the recipe this config came from; its statements are all so far, but for the fields `over`.

        The statements of a recipe that it is built on become its own.
        """
        inner = (None, f"recipe {self._recipe}")
        self._recipe = recipe
        for name in self._values:
            if self._sources.get(name) in inner:
                self._sources[name] = f"recipe {recipe}"
        self._of_recipe = {name: source for name, source in self._sources.items() if name not in over}

    @property
    def stated_over_recipe(self) -> tuple[str, ...]:
        """Names of the fields that were stated after the recipe, in order of declaration."""
        own, stated = self._of_recipe, [name for name in self.field_names() if name in self._values]
        return tuple(name for name in stated if name not in own or self._sources.get(name) != own[name])

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_") or hasattr(type(self), name) or name in type(self).__dataclass_fields__:
            object.__setattr__(self, name, value)
            return
        raise _unknown_field(name, type(self))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), **{kept: dict(vars(self)[kept]) for kept in _KEPT}}

    def __eq__(self, other: object) -> bool:
        """Compare as Megatron Bridge's dataclass does: by what every field reads as, stated or not."""
        if type(other) is not type(self):
            return NotImplemented
        return dataclasses.asdict(self) == dataclasses.asdict(other)

    def __repr__(self) -> str:
        parts = []
        for name in self.field_names():
            if name in self._open:
                parts.append(f"{name}=None")
            elif name in self._values:  # a dtype as torch shows it, the rest as it was stated
                value = getattr(self, name) if self._field(name).kind == "dtype" else self._values[name]
                parts.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"


@functools.cache
def stated_fields(owner: Any) -> dict[str, StatedField]:
    """Return field -> its row, of a class that holds some, in order of declaration."""
    found = {field.name: inspect.getattr_static(owner, field.name, None) for field in dataclasses.fields(owner)}
    return {name: field for name, field in found.items() if isinstance(field, StatedField)}


def _unknown_field(name: str, owner: type[Statements]) -> UnknownFieldError:
    matches = close_matches(name, owner.field_names())
    remedy = did_you_mean(matches) or "`precision-bridge explain` lists the fields."
    return UnknownFieldError(f"mixed_precision.{name}: no such field. {remedy}", matches)
