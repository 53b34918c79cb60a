"""`Statements`: which fields of a precision were set, and by which source; its readers.

Megatron goes on naming fields, so the class has few public names of its own. The rooms read it by
the functions below.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections.abc import Collection, Mapping
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from bridge.errors import BridgeWarning, UnknownFieldError, close_matches, did_you_mean
from bridge.precision.fields import StatedField, get_field_default, get_field_descriptors

_KEPT = ("_values", "_sources", "_aside", "_of_recipe", "_open")


class _Origin:
    """Read by `dataclasses.replace` on an object: the object itself.

    On the class: None, the InitVar's default.
    """

    def __get__(self, holder: Any, owner: type) -> Any:
        return holder


ORIGIN: Any = _Origin()
"""Default of the InitVar `_origin`, which a dataclass of statements declares before its fields.

`dataclasses.replace` hands the constructor the caller's changes first and then every
remaining field in order of declaration. With this one declared first, what stands
before it was named by the caller.
"""


class _Signature:
    """The fields as parameters, for `inspect.signature` and what is built on it.

    A subclass has its own.
    """

    def __get__(self, holder: object, owner: Any) -> inspect.Signature:
        parameters = []
        for field in dataclasses.fields(owner):
            parameter = inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_get_signature_default(field),
                annotation=field.type,
            )
            parameters.append(parameter)
        return inspect.Signature(parameters)


def _get_signature_default(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field as the signature of a dataclass shows it."""
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return dataclasses._HAS_DEFAULT_FACTORY  # type: ignore[attr-defined]
    return inspect.Parameter.empty


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
        _untold: frozenset[str]
    else:
        __signature__ = _Signature()

        def __init__(self, **named_values: object) -> None:
            origin = named_values.get("_origin")
            names = list(named_values)
            notes = {}
            if origin is not None:
                notes = vars(origin)
                # Behind `_origin` stand fields that the caller did not name.
                names = names[: names.index("_origin")]
            for kept in _KEPT:
                vars(self)[kept] = dict(notes.get(kept, ()))
            vars(self)["_recipe"] = notes.get("_recipe")
            stated = get_field_descriptors(type(self))
            changes = {}
            for name in names:
                if name not in self.__dataclass_fields__ or name == "_origin":
                    raise TypeError(str(_make_unknown_field_error(name, type(self))))
                if name in stated:
                    changes[name] = named_values[name]
            self._set_plain_fields(named_values)
            self._state(changes)
            if hasattr(self, "__post_init__"):
                self.__post_init__()

        def _set_plain_fields(self, named_values: Mapping[str, object]) -> None:
            """Set the fields that a subclass declares as any dataclass does."""
            stated = get_field_descriptors(type(self))
            for field in dataclasses.fields(self):
                if field.name in stated:
                    continue
                value = named_values.get(field.name, get_field_default(field))
                if value is MISSING:
                    raise TypeError(f"{type(self).__name__}() is missing the field {field.name!r}")
                setattr(self, field.name, value)

        def __getattr__(self, name: str) -> Any:
            """Refuse a name that does not exist, with the nearest field."""
            if name.startswith("_"):
                raise AttributeError(name)
            raise _make_unknown_field_error(name, type(self))

    if not TYPE_CHECKING:
        _untold = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # @dataclass leaves a constructor that is already there alone, so that subclasses keep track
        # of what was stated.
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            inherited = _find_inherited(cls, name)
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
    def sources(self) -> Mapping[str, str]:
        """Field -> the source that stated it, where that is known; a view, read-only by intent."""
        return self._sources

    def override(self, source: str | None = None, /, **values: object) -> Self:
        """Set fields over what the config states, and return the config itself.

        Args:
            source: Where the values are from, for reports: "command line", "team.yaml".
            values: Fields by name.

        Raises:
            PrecisionTypeError: A value of the wrong type. Nothing is changed.
            UnknownFieldError: A name that is no field. Nothing is changed.
        """
        self._state(values, source=source)
        return self

    def state(self, source: str | None = None, /, **values: object) -> Self:
        """Set fields as `override`, by its name in 0.1; deprecated."""
        message = (
            f"{type(self).__name__}.state() is called override() since 0.2. "
            "Replace the name; the arguments stay."
        )
        warnings.warn(message, BridgeWarning, stacklevel=2)
        return self.override(source, **values)

    def _field(self, name: str) -> StatedField:
        config_class: Any = type(self)
        field = get_field_descriptors(config_class).get(name)
        if field is None:
            raise _make_unknown_field_error(name, type(self))
        return field

    def _read(self, field: StatedField) -> Any:
        if field.twin is None:
            return self._values.get(field.name, field.default)
        leading, other = field.twin, field.name
        if field.leads:
            leading, other = field.name, field.twin
        return self._values.get(leading, self._values.get(other, field.default))

    def _state(self, values: Mapping[str, object], *, source: str | None = None) -> None:
        checked = {name: self._field(name).check(value) for name, value in values.items()}
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
        config_class: Any = type(self)
        for field in get_field_descriptors(config_class).values():
            if not field.needs or field.name in checked:
                continue
            if field.needs in checked or self._field(field.needs).twin in checked:
                self._follow(field.name, field.needs, source)

    def _follow(self, name: str, needed: str, source: str | None) -> None:
        """Turn a switch of an earlier layer off with the one it needs, and on again with it.

        Only a statement of a named source (a recipe, a file) gives way: one source that states both
        contradicts itself.
        """
        is_on = self._read(self._field(needed))
        stated_by = self._sources.get(name)
        if is_on and name in self._aside:
            self._put(name, True, self._aside.pop(name))
        elif not is_on and self._values.get(name) is True and stated_by not in (None, source):
            self._aside[name] = str(stated_by)
            self._put(name, False, f"follows {needed}")

    def _put(self, name: str, value: object, source: str | None) -> None:
        self._values[name] = value
        self._sources.pop(name, None)
        if source is not None:
            self._sources[name] = source

    def _unstate(self, name: str) -> None:
        twin = self._field(name).twin
        for notes in (self._values, self._sources, self._aside, self._open):
            notes.pop(name, None)
            if twin is not None:
                notes.pop(twin, None)

    def __setattr__(self, name: str, value: object) -> None:
        is_private = name.startswith("_")
        if is_private or hasattr(type(self), name) or name in type(self).__dataclass_fields__:
            object.__setattr__(self, name, value)
            return
        raise _make_unknown_field_error(name, type(self))

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        for kept in _KEPT:
            state[kept] = dict(state[kept])
        return state

    def __eq__(self, other: object) -> bool:
        """Compare as Megatron Bridge's dataclass does: by what every field reads as."""
        if type(other) is not type(self):
            return NotImplemented
        return dataclasses.asdict(self) == dataclasses.asdict(other)

    def __repr__(self) -> str:
        parts = []
        for name in list_field_names(self):
            if name in self._open:
                parts.append(f"{name}=None")
            elif name in self._values:
                value = self._values[name]
                if self._field(name).kind == "dtype":
                    value = getattr(self, name)  # as torch shows it
                parts.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"


def _find_inherited(cls: type, name: str) -> Any:
    """Return the attribute of the nearest base class that has it in its own body, or None."""
    for base in cls.__mro__[1:]:
        if name in vars(base):
            return vars(base)[name]
    return None


S = TypeVar("S", bound=Statements)


def list_field_names(owner: Statements | type[Statements]) -> tuple[str, ...]:
    """Return the names of all fields of a config or of its class, in order of declaration."""
    config_class: Any = owner
    if not isinstance(owner, type):
        config_class = type(owner)
    return tuple(get_field_descriptors(config_class))


def get_stated_values(config: Statements) -> Mapping[str, Any]:
    """Return the stated fields and their values, dtypes as tokens; a view, read-only by intent."""
    return config._values


def is_stated(config: Statements, name: str) -> bool:
    """Return whether a field, or the other name of the same setting, was stated."""
    return name in config._values or config._field(name).twin in config._values


def is_reset_to_none(config: Statements, name: str) -> bool:
    """Return whether a field was last set to a None that takes its statement back."""
    return name in config._open


def get_source(config: Statements, name: str) -> str:
    """Return the source that set a field: "default" for an unstated field."""
    field = config._field(name)
    for known in (name, field.twin):
        if known in config._values:
            return config._sources.get(known) or "stated"
    return "default"


def get_field_value(config: Statements, name: str) -> Any:
    """Return the value that a field reads as, a dtype as its token."""
    return config._read(config._field(name))


def check_value(config: Statements, name: str, value: object) -> Any:
    """Return a value in the form in which the field keeps it.

    PrecisionTypeError for a value of the wrong type.
    """
    return config._field(name).check(value)


def get_switches_put_aside(config: Statements) -> dict[str, str]:
    """Return switch -> the source that had turned it on.

    They are the switches that went off because a later statement turned off the switch they need.
    """
    return dict(config._aside)


def copy_with_only(config: S, names: Collection[str]) -> S:
    """Return a copy in which no other field is stated than these."""
    copied = copy.copy(config)
    for name in (*config._values, *config._open):
        if name not in names:
            delattr(copied, name)
    return copied


def get_recipe_name(config: Statements) -> str | None:
    """Return the name of the registered recipe that a config was made from, or None."""
    return config._recipe


def mark_recipe(config: Statements, recipe: str, *, over: Collection[str] = ()) -> None:
    """Remember the recipe that a config came from.

    The config's statements so far are the recipe's, but for the fields `over`. The statements of a
    recipe that it is built on become its own.
    """
    of_inner_recipe = (None, f"recipe {config._recipe}")
    config._recipe = recipe
    for name in config._values:
        if config._sources.get(name) in of_inner_recipe:
            config._sources[name] = f"recipe {recipe}"
    sources = config._sources.items()
    config._of_recipe = {name: source for name, source in sources if name not in over}


def list_fields_over_recipe(config: Statements) -> tuple[str, ...]:
    """Return the names of the fields that were stated after the recipe, in order of declaration."""
    of_recipe = config._of_recipe
    over = []
    for name in list_field_names(config):
        is_of_recipe = name in of_recipe and config._sources.get(name) == of_recipe[name]
        if name in config._values and not is_of_recipe:
            over.append(name)
    return tuple(over)


def mark_ambiguous_fields(config: Statements, names: Collection[str]) -> None:
    """Remember the fields of another program's object that hold its default."""
    config._untold = frozenset(names)


def get_ambiguous_fields(config: Statements) -> frozenset[str]:
    """Return the fields that hold another program's default.

    Nobody can tell whether they were stated.
    """
    return config._untold


def _make_unknown_field_error(name: str, owner: type[Statements]) -> UnknownFieldError:
    matches = close_matches(name, list_field_names(owner))
    remedy = did_you_mean(matches) or "`precision-bridge explain` lists the fields."
    return UnknownFieldError(f"mixed_precision.{name}: no such field. {remedy}", matches)
