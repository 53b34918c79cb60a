"""`Statements`: a record of the fields of a precision that were stated, and of their sources.

A later release of Megatron may add a field of any name. So the class has few public attributes
besides its fields, and other modules read it with the functions of this module.
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
from bridge.precision.stated_field import StatedField, get_field_default, get_field_descriptors

_KEPT = ("_values", "_sources", "_put_aside", "_of_recipe", "_reset")
"""Attributes that are copied with an object. Each is a dictionary with fields as keys.

_values: the stated value. _sources: the source of the statement. _put_aside: the source of a switch that
was turned off with the switch that it needs. _of_recipe: the source of a field that the recipe
stated. _reset: the source of a field that was reset to None.
"""


class _Origin:
    """A descriptor that returns the object that it is read on, or None on the class.

    `dataclasses.replace` reads every field of the old object. So the constructor of the new object
    gets the old object.
    """

    def __get__(self, instance: Any, owner: type) -> Any:
        return instance


ORIGIN: Any = _Origin()
"""The default of the InitVar `_origin`, which a dataclass of statements declares before its fields.

`dataclasses.replace` passes the caller's changes to the constructor first, and then every other
field in order of declaration. `_origin` is declared first. So the caller passed the arguments
before `_origin`.
"""


class _Signature:
    """A descriptor that returns the signature of the constructor of each class.

    The constructor itself has only `**named_values`.
    """

    def __get__(self, instance: object, owner: Any) -> inspect.Signature:
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
    """Return the default of a field in the signature of a dataclass."""
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return dataclasses._HAS_DEFAULT_FACTORY  # type: ignore[attr-defined]
    return inspect.Parameter.empty


class Statements:  # noqa: PLW1641  mutable, so it has no hash
    """The statements about an object's `StatedField`s, and their sources."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
        _values: dict[str, Any]
        _sources: dict[str, str]
        _put_aside: dict[str, str]
        _of_recipe: dict[str, str]
        _reset: dict[str, str]
        _recipe: str | None
        _ambiguous: frozenset[str]
    else:
        __signature__ = _Signature()

        def __init__(self, **named_values: object) -> None:
            origin = named_values.get("_origin")
            names = list(named_values)
            notes = {}
            if origin is not None:
                notes = vars(origin)
                # The caller did not name the fields after `_origin`.
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
            """Set the fields of a subclass that are not `StatedField`s."""
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
        _ambiguous = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Each subclass gets this constructor, which records statements. @dataclass does not replace
        # a constructor that a class already has.
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            inherited = _find_inherited(cls, name)
            if isinstance(inherited, StatedField) and not isinstance(value, StatedField):
                # The subclass changes the default. The field stays a `StatedField`.
                field = dataclasses.replace(inherited, default=inherited.check(value))
                setattr(cls, name, field)
                field.__set_name__(cls, name)
        if "__init__" not in vars(cls):
            cls.__init__ = Statements.__init__  # type: ignore[method-assign]

    @property
    def stated(self) -> frozenset[str]:
        """Names of the fields that were stated."""
        return frozenset(self._values)

    @property
    def sources(self) -> Mapping[str, str]:
        """Field -> the source that stated it, if it is known. Do not change the mapping."""
        return self._sources

    def override(self, source: str | None = None, /, **values: object) -> Self:
        """Set fields in addition to the stated fields, and return the config itself.

        Args:
            source: The source of the values, for reports: "command line", "team.yaml".
            values: Fields by name.

        Raises:
            PrecisionTypeError: A value has a wrong type. Nothing is changed.
            UnknownFieldError: A name is not a field. Nothing is changed.
        """
        self._state(values, source=source)
        return self

    def state(self, source: str | None = None, /, **values: object) -> Self:
        """Set fields like `override`. Deprecated: the name of `override` in 0.1."""
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
        """Record statements, and turn switches off whose needed switch was turned off."""
        checked = {name: self._field(name).check(value) for name, value in values.items()}
        for name, value in checked.items():
            field = self._field(name)
            self._put_aside.pop(name, None)
            self._reset.pop(name, None)
            if value is None and field.unstates:
                if name in self._values:
                    self._unstate(name)
                self._reset[name] = source or "stated"
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
        """Turn a switch off or on again together with the switch that it needs.

        Only a switch of another, named source (a recipe, a file) is turned off. If one source states
        both switches, it contradicts itself, and a rule reports that.
        """
        is_on = self._read(self._field(needed))
        stated_by = self._sources.get(name)
        if is_on and name in self._put_aside:
            self._put(name, True, self._put_aside.pop(name))
        elif not is_on and self._values.get(name) is True and stated_by not in (None, source):
            self._put_aside[name] = str(stated_by)
            self._put(name, False, f"follows {needed}")

    def _put(self, name: str, value: object, source: str | None) -> None:
        self._values[name] = value
        self._sources.pop(name, None)
        if source is not None:
            self._sources[name] = source

    def _unstate(self, name: str) -> None:
        twin = self._field(name).twin
        for notes in (self._values, self._sources, self._put_aside, self._reset):
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
        """Compare the values of all fields, stated or not, like the dataclass of Megatron Bridge."""
        if type(other) is not type(self):
            return NotImplemented
        return dataclasses.asdict(self) == dataclasses.asdict(other)

    def __repr__(self) -> str:
        parts = []
        for name in list_field_names(self):
            if name in self._reset:
                parts.append(f"{name}=None")
            elif name in self._values:
                value = self._values[name]
                if self._field(name).kind == "dtype":
                    value = getattr(self, name)  # a torch.dtype, not a token
                parts.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"


def _find_inherited(cls: type, name: str) -> Any:
    """Return an attribute from the body of the nearest base class that has it, or None."""
    for base in cls.__mro__[1:]:
        if name in vars(base):
            return vars(base)[name]
    return None


StatementsT = TypeVar("StatementsT", bound=Statements)


def list_field_names(owner: Statements | type[Statements]) -> tuple[str, ...]:
    """Return the names of all fields of a config or of its class, in order of declaration."""
    config_class: Any = owner
    if not isinstance(owner, type):
        config_class = type(owner)
    return tuple(get_field_descriptors(config_class))


def get_stated_values(config: Statements) -> Mapping[str, Any]:
    """Return stated field -> value, with dtypes as tokens. Do not change the mapping."""
    return config._values


def is_stated(config: Statements, name: str) -> bool:
    """Return whether a field was stated, under one of the names of its setting."""
    return name in config._values or config._field(name).twin in config._values


def is_reset_to_none(config: Statements, name: str) -> bool:
    """Return whether the last statement of a field was None, which removes earlier statements."""
    return name in config._reset


def get_source(config: Statements, name: str) -> str:
    """Return the source that stated a field, or "default" for an unstated field."""
    field = config._field(name)
    for name_of_setting in (name, field.twin):
        if name_of_setting in config._values:
            return config._sources.get(name_of_setting) or "stated"
    return "default"


def get_field_value(config: Statements, name: str) -> Any:
    """Return the stated value of a field or its default, with a dtype as its token."""
    return config._read(config._field(name))


def check_value(config: Statements, name: str, value: object) -> Any:
    """Return a value in the form in which the field stores it.

    Raises:
        PrecisionTypeError: The value has a wrong type.
    """
    return config._field(name).check(value)


def get_switches_put_aside(config: Statements) -> dict[str, str]:
    """Return switch -> the source that had turned it on.

    A switch is put aside if a later statement turned off the switch that it needs.
    """
    return dict(config._put_aside)


def copy_with_only(config: StatementsT, names: Collection[str]) -> StatementsT:
    """Return a copy in which only these fields stay stated."""
    copied = copy.copy(config)
    for name in (*config._values, *config._reset):
        if name not in names:
            delattr(copied, name)
    return copied


def get_recipe_name(config: Statements) -> str | None:
    """Return the name of the registered recipe that a config was made from, or None."""
    return config._recipe


def mark_recipe(config: Statements, recipe: str, *, over: Collection[str] = ()) -> None:
    """Record the recipe that a config comes from.

    The statements that the config has now count as statements of the recipe. So do the statements
    of another recipe that this recipe is built on.

    Args:
        recipe: The name of the recipe.
        over: Fields whose statements do not come from the recipe.
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
    """Record the fields that have the default of another program, and may have been stated."""
    config._ambiguous = frozenset(names)


def get_ambiguous_fields(config: Statements) -> frozenset[str]:
    """Return the fields that have the default of another program.

    It is not known whether they were stated.
    """
    return config._ambiguous


def _make_unknown_field_error(name: str, owner: type[Statements]) -> UnknownFieldError:
    matches = close_matches(name, list_field_names(owner))
    remedy = did_you_mean(matches) or "`precision-bridge explain` lists the fields."
    return UnknownFieldError(f"mixed_precision.{name}: no such field. {remedy}", matches)
