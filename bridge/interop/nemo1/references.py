"""OmegaConf's `${...}` in a NeMo 1.x file, as far as a file can answer for it.

References to other keys are followed, `oc.decode`, `oc.select` and `oc.deprecated` too. What comes from an environment
variable has the default that stands beside it, and that is noted; without one, and for resolvers that compute, there
is no answer in the file. No environment variable is read.
Source: OmegaConf 2.3.1 resolvers/oc, grammar.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bridge.errors import PayloadError
from bridge.precision import strict_yaml

__all__ = ["References"]

PATH = re.compile(r"\.*[\w.\-]*")
DEEPEST = 16
MISSING = "???"
ABSENT = "${}"
"""What no key can hold: OmegaConf refuses an empty reference."""


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
        """Return what a value comes to.

        Args:
            value: What is written.
            where: Its path, for references that are relative and for messages.
            depth: How many references led here.

        Raises:
            PayloadError: The file does not say.
        """
        if value == MISSING:
            rule = "must be given where the run is started, and the file leaves it open"
            raise PayloadError(f"{where}: {rule}, got {value!r}. Write the value itself.")
        if not isinstance(value, str) or "${" not in value:
            return value
        if depth > DEEPEST:
            raise PayloadError(f"{where}: the reference {value!r:.60} leads in a circle. Write the value itself.")
        whole = _body(value, 0)
        if whole is not None and whole[1] == len(value):
            return self._answer(whole[0], value, where, depth)
        return self._filled(value, where, depth)

    def _filled(self, text: str, where: str, depth: int) -> str:
        """Return a text with each reference in it replaced."""
        parts, at = [], 0
        while (begin := text.find("${", at)) >= 0:
            found = _body(text, begin)
            if found is None:
                break
            parts += [text[at:begin], str(self._answer(found[0], text, where, depth))]
            at = found[1]
        return "".join((*parts, text[at:]))

    def _answer(self, body: str, written: str, where: str, depth: int) -> Any:
        name, colon, rest = body.partition(":")
        if not colon:
            return self._key(body.strip(), written, where, depth)
        arguments = [argument.strip() for argument in _arguments(rest)]
        if name == "oc.env":
            return self._environment(arguments, written, where, depth)
        if name == "oc.decode":
            return _decoded(self.follow(_unquoted(arguments[0]), where, depth + 1))
        if name in ("oc.select", "oc.deprecated"):
            found = self._value(arguments[0], where)
            if found in (None, ABSENT) and name == "oc.select" and len(arguments) > 1:
                found = _decoded(_unquoted(arguments[1]))
            return self.follow(None if found == ABSENT else found, where, depth + 1)
        rule = f"is computed by the resolver {name!r} when the run is started"
        raise PayloadError(f"{where}: {rule}, got {written!r:.80}. Write the value that it comes to.")

    def _environment(self, arguments: list[str], written: str, where: str, depth: int) -> Any:
        variable = arguments[0]
        if len(arguments) < 2:
            rule = f"comes from the environment variable {variable}, which no file holds"
            remedy = f"Write the value itself, or a default as in ${{oc.env:{variable},VALUE}}."
            raise PayloadError(f"{where}: {rule}, got {written!r:.80}. {remedy}")
        default = _decoded(self.follow(_unquoted(arguments[1]), where, depth + 1))
        self.assumed[where] = (variable, default)
        return default

    def _key(self, path: str, written: str, where: str, depth: int) -> Any:
        found = self._value(path, where) if PATH.fullmatch(path) else ABSENT
        if found == ABSENT:
            raise PayloadError(f"{where}: the reference {written!r:.80} leads nowhere. Write the value itself.")
        return self.follow(found, where, depth + 1)

    def _value(self, path: str, where: str) -> Any:
        """Return a value by an absolute path, or by one that begins with dots and is relative to where it stands."""
        dots = len(path) - len(path.lstrip("."))
        if dots:
            path = ".".join([*where.split(".")[:-dots], path[dots:]])
        return self.raw(path, ABSENT)


def _body(text: str, begin: int) -> tuple[str, int] | None:
    """Return what stands within the `${` at `begin` and its `}`, and where the latter ends; None without one."""
    if not text.startswith("${", begin):
        return None
    depth = 0
    for at in range(begin, len(text)):
        if text.startswith("${", at):
            depth += 1
        elif text[at] == "}":
            depth -= 1
            if not depth:
                return text[begin + 2 : at], at + 1
    return None


def _arguments(text: str) -> list[str]:
    """Return a resolver's arguments: commas within further braces or quotes are none of its own."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "{[":
            depth += 1
        elif letter in "}]":
            depth -= 1
        elif letter == "," and not depth:
            parts.append("")
            continue
        parts[-1] += letter
    return parts


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


def _decoded(value: Any) -> Any:
    """Return the number, switch or null that a text spells, and anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        (found, *_) = strict_yaml.load_all(value, "default")
    except PayloadError:
        return value
    return found if not isinstance(found, Mapping | list) else value
