"""The YAML reader of all files: plain data, without tags that run code and without repeated keys.

Depth and size are bounded. Plain scalars are read as PyYAML reads them, with three exceptions that
training frameworks need: ``1e-5`` is a number (YAML 1.2), ``12:30:00`` is text (YAML 1.1 reads a
number in base 60), and a date is text.

libyaml composes nodes by recursion. So a first pass over its events bounds the depth, and the size
with every alias expanded.
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
"""Larger than any configuration. A file of this size is read in less than two seconds."""
MAX_DEPTH = 64
TOO_DEEP = (f"nesting must not be deeper than {MAX_DEPTH}", "This is no configuration")
MAX_NODES = 200_000
"""The limit of nodes in a document with every alias expanded."""

TOO_LONG_NUMBER = re.compile(r"[-+]?[0-9_]{4301}")
"""A number with more digits than Python converts."""

PIPE_PATHS = ("/dev/fd/", "/dev/stdin", "/proc/")
"""The path of a shell's process substitution, a pipe that another process fills."""
BLOCKING_FILE_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
)
TAG_PREFIX = "tag:yaml.org,2002:"
MERGE_TAG = f"{TAG_PREFIX}merge"
_PLAIN_TYPES = ("map", "seq", "str", "int", "float", "bool", "null", "set")
PLAIN_TAGS = tuple(f"{TAG_PREFIX}{name}" for name in _PLAIN_TYPES)
IMPLICIT_RESOLVERS: tuple[tuple[str, str, list[str]], ...] = (
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
"""Tag of a plain scalar, its pattern, and the characters with which it begins.

The first pattern that matches counts.
"""
BASE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_documents(
    text: str,
    path: str,
    *,
    form: str = "YAML",
    error: type[BridgeError] = PayloadError,
    may_repeat: Callable[[str], bool] | None = None,
    repeated: list[tuple[str, object, int]] | None = None,
) -> tuple[Any, ...]:
    """Return the documents of a YAML text as plain Python values. An empty document is None.

    Args:
        text: The YAML.
        path: Its path, for messages.
        form: The name of the language, for messages.
        error: The class of the errors for refused text.
        may_repeat: Whether a key with a scalar value may occur twice. Then the last value is used.
        repeated: List to which key, last value and line of each repeated key are appended.
    """
    try:
        _check_bounds(text, path, error)
        loader = _Loader(text, path, error, may_repeat, repeated)
        documents = []
        while loader.check_data():
            documents.append(loader.get_data())
    except BridgeError:
        raise
    # PyYAML raises ValueError or LookupError for a value that does not fit its tag.
    except (yaml.YAMLError, ValueError, LookupError) as fault:
        mark = getattr(fault, "problem_mark", None)
        where = ""
        if mark is not None:
            where = f", line {mark.line + 1}"
        problem = getattr(fault, "problem", None) or getattr(fault, "reason", None) or fault
        words = " ".join(str(problem).split())
        raise error(f"{path}{where}: must be {form}; {words}. Correct it there.") from None
    return tuple(documents)


def require_bounded(path: Path, *, error: type[BridgeError] = PayloadError) -> None:
    """Raise `error` for a YAML file that is unsafe for another reader.

    The file is not regular, is too large or too deep, or has a tag. If the file is not YAML, the
    other reader reports it.
    """
    text = decode_text(read_bytes(path, error=error), str(path), error=error)
    with suppress(yaml.YAMLError):
        _check_bounds(text, str(path), error)


def read_bytes(
    path: str | Path, *, error: type[BridgeError] = PayloadError, limit: int = MAX_BYTES
) -> bytes:
    """Return up to `limit` + 1 bytes of a regular file, or of a shell's process substitution.

    A device, a socket or a named pipe could block for ever.
    """
    file = Path(path)
    try:
        odd = _find_blocking_kind(file.stat().st_mode)
        if odd is None or str(file).startswith(PIPE_PATHS):
            with file.open("rb") as stream:
                return stream.read(limit + 1)
    except OSError as fault:
        reason = fault.strerror or type(fault).__name__
        raise error(f"{path}: cannot be read: {reason}. Give the path of a file.") from None
    except ValueError:
        raise error(f"{str(path)!r}: is no path. Give the path of a file.") from None
    raise error(f"{path}: must be a regular file, got {odd}. Give the path of a file.")


def _find_blocking_kind(mode: int) -> str | None:
    """Return the kind of a file that may block, or None if reading it cannot block."""
    for is_odd, kind in BLOCKING_FILE_KINDS:
        if is_odd(mode):
            return kind
    return None


def decode_text(data: bytes, path: str, *, error: type[BridgeError] = PayloadError) -> str:
    """Return the text of a file's bytes, with Unix line ends.

    The bytes are UTF-8, or UTF-16 with a byte-order mark.
    """
    if len(data) > MAX_BYTES:
        rule = f"a configuration must not be larger than {MAX_BYTES // 1024} KiB"
        raise error(f"{path}: {rule}. Give the part of it that sets the precision.")
    encoding = "utf-8-sig"
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding = "utf-16"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as fault:
        line = data.count(b"\n", 0, fault.start) + 1
        rule = f"must be UTF-8 text, and byte {fault.start} is not"
        raise error(f"{path}, line {line}: {rule}. Save it as UTF-8.") from None
    return normalise_text(text, path, error=error)


def normalise_text(text: str, path: str, *, error: type[BridgeError] = PayloadError) -> str:
    """Return a text without byte-order mark and with Unix line ends, or raise `error` for a NUL."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise error(f"{path}, line {line}: must be text, and holds a NUL. Give a text file.")
    return text


def _check_bounds(text: str, path: str, error: type[BridgeError]) -> None:
    """Raise `error` for a text that is too deep or too large, or has a tag that is not plain data.

    An alias that cannot be read is refused too.
    """
    anchors: dict[str, int] = {}
    open_: list[tuple[str | None, int]] = []  # anchor of a collection, and the count before it
    count = 0
    for event in _parse_events(text, path, error):
        if isinstance(event, yaml.DocumentStartEvent):
            anchors = {}
            count = 0
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor:
                anchors[anchor] = count - before
        elif isinstance(event, yaml.NodeEvent):
            fault = _find_fault(event, anchors, len(open_))
            if isinstance(event, yaml.AliasEvent) and not fault:
                count += anchors[str(event.anchor)]
            else:
                count += 1
            if count > MAX_NODES and not fault:
                rule = f"must not hold more than {MAX_NODES} values, aliases written out"
                fault = (rule, "Anchors that multiply are refused")
            if fault:
                mark: Any = event.start_mark
                raise error(f"{path}, line {mark.line + 1}: {fault[0]}. {fault[1]}.")
            if isinstance(event, yaml.CollectionStartEvent):
                open_.append((event.anchor, count - 1))
            elif isinstance(event, yaml.ScalarEvent) and event.anchor:
                anchors[event.anchor] = 1


def _parse_events(text: str, path: str, error: type[BridgeError]) -> Iterator[Any]:
    """Yield the events of a text.

    libyaml 0.2.6 and later also limits the depth. Its look-ahead may reach that limit first.
    """
    try:
        yield from yaml.parse(text, Loader=BASE_LOADER)
    except yaml.MarkedYAMLError as fault:
        if "nesting depth" not in str(fault.problem):
            raise
        line = 1
        if fault.problem_mark is not None:
            line = fault.problem_mark.line + 1
        raise error(f"{path}, line {line}: {TOO_DEEP[0]}. {TOO_DEEP[1]}.") from None


def _find_fault(event: Any, anchors: dict[str, int], depth: int) -> tuple[str, str] | None:
    """Return the rule that an event breaks and the remedy, or None if it breaks no rule."""
    if isinstance(event, yaml.AliasEvent):
        if event.anchor in anchors:
            return None
        return f"the alias *{event.anchor} must follow its anchor", "Define the anchor first"
    if event.tag not in (None, "!", *PLAIN_TAGS):
        tag = event.tag.replace(TAG_PREFIX, "!!")
        rule = f"must be plain data, and the tag {tag!r} is not: it is refused and nothing was run"
        return rule, "Write the value without the tag"
    if (
        isinstance(event, yaml.ScalarEvent)
        and event.implicit[0]
        and TOO_LONG_NUMBER.match(event.value)
    ):
        return "a number must have fewer digits", "This is no configuration"
    if isinstance(event, yaml.CollectionStartEvent) and depth >= MAX_DEPTH:
        return TOO_DEEP
    return None


class _Loader(BASE_LOADER):  # type: ignore[misc]
    """PyYAML's safe loader, with the restrictions of this module."""

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

    def make_error(self, node: Any, rule: str, remedy: str) -> BridgeError:
        return self.error(f"{self.path}, line {node.start_mark.line + 1}: {rule}. {remedy}.")

    def flatten_mapping(self, node: Any) -> None:
        """Refuse repeated keys, and put the keys of `<<` before the keys of the mapping.

        If several mappings have a key, the first counts. PyYAML 6.0.4 merges one-letter keys and
        several mappings in another way than YAML 1.1 and earlier releases.
        """
        if node in self.checked:
            return
        self.checked.add(node)
        own_pairs: dict[Any, tuple[Any, Any]] = {}
        merged: list[tuple[Any, Any]] = []
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                remedy = "Quote it, or write `key: value`"
                raise self.make_error(key_node, "a key must be a word", remedy)
            if key_node.tag == MERGE_TAG:
                merged += self.collect_merged_pairs(key_node, value_node)
                continue
            key = self.construct_object(key_node)
            if key in own_pairs:
                self.note_repeated_key(key, key_node, value_node)
            own_pairs[key] = (key_node, value_node)
        node.value = [*merged, *own_pairs.values()]

    def collect_merged_pairs(self, key_node: Any, value_node: Any) -> list[tuple[Any, Any]]:
        """Return the keys and values of the mappings that a `<<` names, the last mapping first."""
        parts = [value_node]
        if isinstance(value_node, yaml.SequenceNode):
            parts = value_node.value
        if not all(isinstance(part, yaml.MappingNode) for part in parts):
            raise self.make_error(
                key_node, "<< must name mappings", "Give it an alias of a mapping"
            )
        pairs: list[tuple[Any, Any]] = []
        for part in reversed(parts):
            self.flatten_mapping(part)
            pairs += part.value
        return pairs

    def note_repeated_key(self, key: object, key_node: Any, value_node: Any) -> None:
        """Report a repeated key, or raise an error."""
        is_scalar = isinstance(key, str) and isinstance(value_node, yaml.ScalarNode)
        if self.may_repeat is None or not is_scalar or not self.may_repeat(str(key)):
            rule = f"the key {key!r} must not stand twice in one mapping"
            raise self.make_error(key_node, rule, "Keep one of the two")
        if self.repeated is not None:
            line = key_node.start_mark.line + 1
            self.repeated.append((str(key), self.construct_object(value_node), line))

    def construct_yaml_set(self, node: Any) -> list[Any]:
        """Return the members of a ``!!set`` in the order of the file."""
        return list(self.construct_mapping(node))


for _tag, _pattern, _first in IMPLICIT_RESOLVERS:
    _Loader.add_implicit_resolver(f"{TAG_PREFIX}{_tag}", re.compile(_pattern), _first)
_Loader.add_constructor(f"{TAG_PREFIX}set", _Loader.construct_yaml_set)
