"""The settings that an answer was made from, so that it can be as strong as the weakest of them.

    with reads() as paths:
        run.model.num_layers
    [*paths]                                 # ["model.num_layers"]

`TrackedValues` notes a setting when its key is read, `AttributeView` when its attribute is. A value that is
computed once and kept notes the same settings for each later reader, if its property is a
`tracked_property`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")

_PATHS: ContextVar[dict[str, None] | None] = ContextVar("_PATHS", default=None)
"""The settings that were read so far; None where nobody asks."""


@contextmanager
def track_reads() -> Iterator[dict[str, None]]:
    """Collect the paths of the settings that are read in the block, in order.

    An outer block has them too.
    """
    paths: dict[str, None] = {}
    outer = _PATHS.get()
    token = _PATHS.set(paths)
    try:
        yield paths
    finally:
        _PATHS.reset(token)
        if outer is not None:
            outer.update(paths)


def note_read(path: str) -> None:
    """Note that a setting was read."""
    paths = _PATHS.get()
    if paths is not None:
        paths[path] = None


class TrackedValues(dict[str, Any]):
    """The values of a section by field, which note what is read of them.

    Reading a key, present or not, notes it. Going through all of them notes nothing: a reader that
    copies a section has not asked about a setting yet.
    """

    def __init__(self, role: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.role = role

    def __getitem__(self, name: str) -> Any:
        note_read(f"{self.role}.{name}")
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, the default where there is none."""
        note_read(f"{self.role}.{name}")
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        note_read(f"{self.role}.{name}")
        return super().__contains__(name)


class AttributeView:
    """The values of a section as attributes."""

    __slots__ = ("values",)

    values: Mapping[str, Any]

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(name) from None


class tracked_property(Generic[T]):  # noqa: N801  used as a decorator, like functools.cached_property
    """A property that is computed once.

    It notes for each reader the settings that it was computed from.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.key = f"{name} and its reads"

    @overload
    def __get__(self, instance: None, owner: type) -> tracked_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        kept = instance.__dict__
        if self.key not in kept:
            with track_reads() as paths:
                value = self.compute(instance)
            kept[self.key] = (value, paths)
            return value
        value, paths = kept[self.key]
        outer = _PATHS.get()
        if outer is not None:
            outer.update(paths)
        return value
