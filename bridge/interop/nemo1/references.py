"""OmegaConf's `${...}` in a NeMo 1.x file, by OmegaConf's own grammar, as far as the file answers it.

References to other keys are followed, `oc.decode`, `oc.select` and `oc.deprecated` too. An environment variable has the
default that stands with it, and that is recorded; without one, and for resolvers that compute, the file has no answer.
No environment variable is read and no resolver is run, so that OmegaConf's own resolution cannot be used.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

from bridge.errors import PayloadError

__all__ = ["References"]

DEEPEST = 16
LONGEST = 2000
"""Characters of a text with references; the grammar takes a millisecond for ten."""
MISSING = "???"
_ABSENT = object()


class References:
    """The references of one configuration.

    Args:
        payload: The configuration, from its top.
    """

    def __init__(self, payload: Mapping[Any, Any]) -> None:
        self.payload = payload
        self.assumed: dict[str, tuple[str, Any]] = {}
        """Path of a setting -> the environment variable that decides it, and the default that was taken."""

    def raw(self, path: str, absent: object = None) -> Any:
        """Return a value by its dotted path as it is written, `absent` where there is none."""
        value: Any = self.payload
        for word in path.split("."):
            if not isinstance(value, Mapping) or word not in value:
                return absent
            value = value[word]
        return value

    def follow(self, value: Any, where: str, depth: int = 0) -> Any:
        """Return the value that a written one comes to.

        Args:
            value: The written value.
            where: Its path, for references that are relative and for messages.
            depth: How many references led here.

        Raises:
            PayloadError: The file does not answer it.
        """
        if value == MISSING:
            rule = "must be given where the run is started, and the file leaves it open"
            raise PayloadError(f"{where}: {rule}, got {value!r}. Write the value itself.")
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth > DEEPEST or len(value) > LONGEST:
            rule = "leads in a circle" if depth > DEEPEST else "is too long"
            raise PayloadError(f"{where}: the reference {value!r:.60} {rule}. Write the value itself.")
        return self._parsed(value, where, depth)

    def _parsed(self, text: str, where: str, depth: int, rule: str = "configValue") -> Any:
        from omegaconf.errors import OmegaConfBaseException
        from omegaconf.grammar_parser import parse
        from omegaconf.grammar_visitor import GrammarVisitor

        key = partial(self._key, written=text, where=where, depth=depth)
        resolver = partial(self._resolver, written=text, where=where, depth=depth)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return GrammarVisitor(key, resolver, None).visit(parse(text, parser_rule=rule))
        except (OmegaConfBaseException, RecursionError):
            raise PayloadError(f"{where}: must be a reference of OmegaConf's, got {text!r:.80}. Correct it.") from None

    def _key(self, path: str, _memo: object, *, written: str, where: str, depth: int) -> Any:
        found = self._value(path, where)
        if found is _ABSENT:
            raise PayloadError(f"{where}: the reference {written!r:.80} leads nowhere. Write the value itself.")
        return self.follow(found, where, depth + 1)

    def _resolver(
        self, name: str, args: tuple[Any, ...], args_str: tuple[str, ...], *, written: str, where: str, depth: int
    ) -> Any:
        del args_str
        if name == "oc.env" and len(args) > 1:
            self.assumed[where] = (str(args[0]), args[1])
            return args[1]
        if name == "oc.env" and args:
            rule = f"comes from the environment variable {args[0]}, which no file holds"
            remedy = f"Write the value itself, or a default as in ${{oc.env:{args[0]},VALUE}}."
            raise PayloadError(f"{where}: {rule}, got {written!r:.80}. {remedy}")
        if name == "oc.decode" and args:
            return self._parsed(args[0], where, depth, "singleElement") if isinstance(args[0], str) else args[0]
        if name in ("oc.select", "oc.deprecated") and args:
            found = self._value(str(args[0]), where)
            if found in (None, _ABSENT):
                found = args[1] if name == "oc.select" and len(args) > 1 else None
            return self.follow(found, where, depth + 1)
        rule = f"is computed by the resolver {name!r} when the run is started"
        raise PayloadError(f"{where}: {rule}, got {written!r:.80}. Write the value that it comes to.")

    def _value(self, path: str, where: str) -> Any:
        """Return a value by an absolute path, or by one that begins with dots and is relative to where it stands."""
        dots = len(path) - len(path.lstrip("."))
        if dots:
            path = ".".join([*where.split(".")[:-dots], path[dots:]])
        return self.raw(path, _ABSENT)
