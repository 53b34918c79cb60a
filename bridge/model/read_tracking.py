"""`track_reads`: the settings that a computation reads.

    with track_reads() as paths:
        run.model.num_layers
    [*paths]                                 # ["model.num_layers"]

The rules use it: if a setting that a rule reads is not known, the rule cannot be judged. So a rule
needs no list of the settings that it reads. `TrackedValues` notes a setting when its key is read.
An `AttributeView` of them notes a setting when its attribute is read. A `tracked_property` is
computed once. For each later reader it notes the settings that its computation read.

The paths are kept in a `ContextVar`, so that threads do not mix their reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")

_PATHS: ContextVar[dict[str, None] | None] = ContextVar("_PATHS", default=None)
"""The settings that were read in the innermost block. None: no block tracks reads."""


@contextmanager
def track_reads() -> Iterator[dict[str, None]]:
    """Collect the paths of the settings that are read in a ``with`` block, in order.

    The paths are also added to an outer block.

    Yields:
        A dictionary with the paths as keys. It serves as an ordered set.
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
    """The values of a section by field. Reading a key notes the setting.

    A missing key is noted too. Iterating over all values notes nothing: code that copies a section
    does not depend on any setting yet.
    """

    def __init__(self, section_name: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.section_name = section_name

    def __getitem__(self, name: str) -> Any:
        note_read(f"{self.section_name}.{name}")
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a field, or the default if there is none."""
        note_read(f"{self.section_name}.{name}")
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        note_read(f"{self.section_name}.{name}")
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
    """A property that is computed once, and that notes the settings of its computation.

    The settings are noted for each reader, not only for the first reader.
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
