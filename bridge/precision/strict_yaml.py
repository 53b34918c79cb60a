"""YAML as plain data: no tags that run code, no key twice, bounded depth and size; regular files in UTF-8 only.

Plain scalars mean what they mean to PyYAML, with three exceptions that training frameworks
make or want: ``1e-5`` is a number (YAML 1.2), ``12:30:00`` is not (YAML 1.1 counts in
sixties), and a date stays text.

libyaml composes nodes by recursion, so a first pass over its events bounds depth, and
size with aliases written out.
"""

import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from bridge.errors import BridgeError, PayloadError

MAX_BYTES = 512 * 1024
"""Larger than any configuration, and still read in well under two seconds."""
MAX_DEPTH = 64
TOO_DEEP = (f"nesting must not be deeper than {MAX_DEPTH}", "This is no configuration")
MAX_NODES = 200_000
"""Of a document with every alias written out."""

LONG = re.compile(r"[-+]?[0-9_]{4301}")
"""A number that Python does not convert."""

PIPES = ("/dev/fd/", "/dev/stdin", "/proc/")
"""A shell's process substitution: a pipe that another process fills."""
ODD_FILES = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
)
CORE = "tag:yaml.org,2002:"
MERGE = f"{CORE}merge"
TAGS = tuple(
    f"{CORE}{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null", "set")
)
RESOLVED: tuple[tuple[str, str, list[str]], ...] = (
    ("null", r"(?:~|null|Null|NULL|)\Z", ["~", "n", "N", ""]),
    (
        "bool",
        r"(?:yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF)\Z",
        list("yYnNtTfFoO"),
    ),
    ("int", r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0o?[0-7_]+|[1-9][0-9_]*|0)\Z", list("-+0123456789")),
    ("float", r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?\Z", list("-+0123456789.")),
    ("float", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z", list("-+.")),
    ("merge", r"<<\Z", ["<"]),
)
"""Tag of a plain scalar, its pattern, and the characters it begins with;
the first that matches counts.
"""
BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_all(
    text: str,
    path: str,
    *,
    form: str = "YAML",
    error: type[BridgeError] = PayloadError,
    may_repeat: Callable[[str], bool] | None = None,
    repeated: list[tuple[str, object, int]] | None = None,
) -> tuple[Any, ...]:
    """Return the documents of a YAML text as plain Python values; an empty one is None.

    `may_repeat` says of a key with a scalar value whether it may stand twice, the last one is read
    then; `repeated` takes key, last value and line of each. Raises an `error` for what the module
    refuses; `form` names the language.
    """
    try:
        _check_bounds(text, path, error)
        loader = _Loader(text, path, error, may_repeat, repeated)
        documents = []
        while loader.check_data():
            documents.append(loader.get_data())
    except BridgeError:
        raise
    except (
        yaml.YAMLError,
        ValueError,
        LookupError,
    ) as found:  # the latter two: of a value that its tag does not fit
        mark = getattr(found, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        what = " ".join(
            str(getattr(found, "problem", None) or getattr(found, "reason", None) or found).split()
        )
        raise error(f"{path}{where}: must be {form}; {what}. Correct it there.") from None
    return tuple(documents)


def require_bounded(path: Path, *, error: type[BridgeError] = PayloadError) -> None:
    """Raise for a YAML file that another reader must not be given: no regular file, too large, too deep, or with a tag.

    What is no YAML is left to that reader.
    """
    text = decoded(read_bytes(path, error=error), str(path), error=error)
    with suppress(yaml.YAMLError):
        _check_bounds(text, str(path), error)


def read_bytes(
    path: str | Path, *, error: type[BridgeError] = PayloadError, limit: int = MAX_BYTES
) -> bytes:
    """Return up to `limit` + 1 bytes of a regular file, or of a pipe that a shell's process substitution fills.

    A device, a socket or a named pipe could block for ever.
    """
    file = Path(path)
    try:
        mode = file.stat().st_mode
        odd = next((name for is_odd, name in ODD_FILES if is_odd(mode)), None)
        if odd is None or str(file).startswith(PIPES):
            with file.open("rb") as stream:
                return stream.read(limit + 1)
    except OSError as found:
        reason = found.strerror or type(found).__name__
        raise error(f"{path}: cannot be read: {reason}. Give the path of a file.") from None
    except ValueError:
        raise error(f"{str(path)!r}: is no path. Give the path of a file.") from None
    raise error(f"{path}: must be a regular file, got {odd}. Give the path of a file.")


def decoded(data: bytes, path: str, *, error: type[BridgeError] = PayloadError) -> str:
    """Return the text of a file's bytes: UTF-8, or UTF-16 with a byte-order mark, with Unix line ends."""
    if len(data) > MAX_BYTES:
        rule = f"a configuration must not be larger than {MAX_BYTES // 1024} KiB"
        raise error(f"{path}: {rule}. Give the part of it that sets the precision.")
    try:
        text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as found:
        line = data.count(b"\n", 0, found.start) + 1
        rule = f"must be UTF-8 text, and byte {found.start} is not"
        raise error(f"{path}, line {line}: {rule}. Save it as UTF-8.") from None
    return plain_text(text, path, error=error)


def plain_text(text: str, path: str, *, error: type[BridgeError] = PayloadError) -> str:
    """Return a text without byte-order mark and with Unix line ends; raises `error` for one with a NUL."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise error(f"{path}, line {line}: must be text, and holds a NUL. Give a text file.")
    return text


def _check_bounds(text: str, path: str, error: type[BridgeError]) -> None:
    """Raise `error` for a text that is too deep, too large, or has a tag or an alias that cannot be read."""
    anchors: dict[str, int] = {}
    open_: list[tuple[str | None, int]] = []  # anchor of a collection, and the count before it
    count = 0
    for event in _events(text, path, error):
        if isinstance(event, yaml.DocumentStartEvent):
            anchors, count = {}, 0
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor:
                anchors[anchor] = count - before
        elif isinstance(event, yaml.NodeEvent):
            fault = _fault(event, anchors, len(open_))
            count += (
                anchors[str(event.anchor)]
                if isinstance(event, yaml.AliasEvent) and not fault
                else 1
            )
            if count > MAX_NODES:
                rule = f"must not hold more than {MAX_NODES} values, aliases written out"
                fault = fault or (rule, "Anchors that multiply are refused")
            if fault:
                mark: Any = event.start_mark
                raise error(f"{path}, line {mark.line + 1}: {fault[0]}. {fault[1]}.")
            if isinstance(event, yaml.CollectionStartEvent):
                open_.append((event.anchor, count - 1))
            elif isinstance(event, yaml.ScalarEvent) and event.anchor:
                anchors[event.anchor] = 1


def _events(text: str, path: str, error: type[BridgeError]) -> Iterator[Any]:
    """Yield the events of a text.

    From 0.2.6 on libyaml has a limit of depth too, which its look-ahead meets first.
    """
    try:
        yield from yaml.parse(text, Loader=BASE)
    except yaml.MarkedYAMLError as found:
        if "nesting depth" not in str(found.problem):
            raise
        line = found.problem_mark.line + 1 if found.problem_mark is not None else 1
        raise error(f"{path}, line {line}: {TOO_DEEP[0]}. {TOO_DEEP[1]}.") from None


def _fault(event: Any, anchors: dict[str, int], depth: int) -> tuple[str, str] | None:
    if isinstance(event, yaml.AliasEvent):
        known = event.anchor in anchors
        return (
            None
            if known
            else (f"the alias *{event.anchor} must follow its anchor", "Define the anchor first")
        )
    if event.tag not in (None, "!", *TAGS):
        tag = event.tag.replace(CORE, "!!")
        rule = f"must be plain data, and the tag {tag!r} is not: it is refused and nothing was run"
        return rule, "Write the value without the tag"
    if isinstance(event, yaml.ScalarEvent) and event.implicit[0] and LONG.match(event.value):
        return "a number must have fewer digits", "This is no configuration"
    return TOO_DEEP if isinstance(event, yaml.CollectionStartEvent) and depth >= MAX_DEPTH else None


class _Loader(BASE):  # type: ignore[misc]
    """PyYAML's safe loader that refuses a key twice, and reads scalars as the module says."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  PyYAML's own name

    def __init__(
        self,
        text: str,
        path: str,
        error: type[BridgeError],
        may_repeat: Callable[[str], bool] | None,
        repeated: list[tuple[str, object, int]] | None,
    ) -> None:
        super().__init__(text)
        self.path, self.error = path, error
        self.may_repeat, self.repeated = may_repeat, repeated
        self.checked: set[Any] = set()

    def wrong(self, node: Any, rule: str, remedy: str) -> BridgeError:
        return self.error(f"{self.path}, line {node.start_mark.line + 1}: {rule}. {remedy}.")

    def flatten_mapping(self, node: Any) -> None:
        """Refuse a key twice, and put what `<<` names before its own keys; of several mappings the first counts.

        PyYAML 6.0.4 merges keys of one letter, and several mappings, otherwise than
        YAML 1.1 and the releases before.
        """
        if node in self.checked:
            return
        self.checked.add(node)
        own: dict[Any, tuple[Any, Any]] = {}
        merged: list[tuple[Any, Any]] = []
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.wrong(
                    key_node, "a key must be a word", "Quote it, or write `key: value`"
                )
            if key_node.tag != MERGE:
                key = self.construct_object(key_node)
                if key in own:
                    self.repeat(key, key_node, value_node)
                own[key] = (key_node, value_node)
                continue
            parts = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            if not all(isinstance(part, yaml.MappingNode) for part in parts):
                raise self.wrong(key_node, "<< must name mappings", "Give it an alias of a mapping")
            for part in reversed(parts):
                self.flatten_mapping(part)
                merged += part.value
        node.value = [*merged, *own.values()]

    def repeat(self, key: object, key_node: Any, value_node: Any) -> None:
        """Note a key that stands twice, or raise."""
        scalar = isinstance(key, str) and isinstance(value_node, yaml.ScalarNode)
        if self.may_repeat is None or not scalar or not self.may_repeat(str(key)):
            raise self.wrong(
                key_node,
                f"the key {key!r} must not stand twice in one mapping",
                "Keep one of the two",
            )
        if self.repeated is not None:
            self.repeated.append(
                (str(key), self.construct_object(value_node), key_node.start_mark.line + 1)
            )

    def construct_yaml_set(self, node: Any) -> list[Any]:
        """Return the members of a ``!!set`` in the order of the file."""
        return list(self.construct_mapping(node))


for _tag, _pattern, _first in RESOLVED:
    _Loader.add_implicit_resolver(f"{CORE}{_tag}", re.compile(_pattern), _first)
_Loader.add_constructor(f"{CORE}set", _Loader.construct_yaml_set)
