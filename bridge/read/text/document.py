"""`Document`: a file of another system, read safely.

    document = Document.load("ds_config.json")
    document.kind       # "json"
    document.content    # {"fp16": {"enabled": True}}, parsed when it is read first
    document.parts      # the documents of a YAML file with several documents

Nothing in a file is run, imported or instantiated. A file that cannot be a configuration is refused
with a single sentence: a file that is too large, is not UTF-8, is nested too deeply, has too many
aliases, or has a key of the precision twice.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bridge.errors import PayloadError
from bridge.precision import strict_yaml
from bridge.precision.strict_yaml import MAX_BYTES
from bridge.read.megatron_lm.flags import may_repeat
from bridge.read.text import strict_json
from bridge.read.text.checkpoint_arguments import CHECKPOINT_SUFFIX, format_checkpoint_arguments
from bridge.read.text.document_kind import END_OF_PRINTED_ARGUMENTS, detect_document_kind

if TYPE_CHECKING:
    from bridge.read.launch.launch import Launch

ZIP_SIGNATURE = b"PK\x03\x04"
"""The first bytes of a file of `torch.save`."""
MAX_KEY_PARTS = 64
LONG_KEY_PATTERN = re.compile(
    r"""(?:\.[ \t]*+(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+)"""
    rf"{{{MAX_KEY_PARTS}}}"
)
"""A TOML key with too many parts. `tomllib` needs time that grows with the square of the parts."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A file, or a single YAML document of a file with several documents."""

    path: str
    text: str
    kind: str
    """yaml, json, toml, shell, python, env or text."""
    part: int | None = None
    """The number of the document in a YAML file, from 1. None: the file is a single document."""
    of: Any = field(default=None, repr=False)
    """The parsed content, if the caller has parsed it already."""
    repeated: list[tuple[str, object, int]] = field(default_factory=list, repr=False)
    """Key, last value and line of each key that occurs twice in one mapping and does not affect
    precision. The list is filled when the content is parsed."""
    launches: dict[tuple[tuple[str, str], ...], tuple[Launch, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Variables of the environment -> the launches of a script with them. `read_document_launches`
    fills it, so that a second reader does not follow the script again."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the document of a file.

        Raises:
            PayloadError: The path is not a regular file, or the file is too large or not text.
        """
        return cls.from_bytes(strict_yaml.read_bytes(path), str(path))

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Self:
        """Return the document of a file's content.

        Args:
            data: The content.
            path: The file's name, which may show its kind.

        Raises:
            PayloadError: The content is too large or is not text.
        """
        is_log = END_OF_PRINTED_ARGUMENTS.encode() in data
        if len(data) > MAX_BYTES and is_log:
            # A log has the arguments first. The lines after them do not state a precision.
            data = data[:MAX_BYTES].rpartition(b"\n")[0]
        if data.startswith(ZIP_SIGNATURE) and path.endswith(CHECKPOINT_SUFFIX):
            return cls.from_text(format_checkpoint_arguments(data, path), path, kind="text")
        return cls.from_text(strict_yaml.decode_text(data, path), path)

    @classmethod
    def from_text(cls, text: str, path: str = "<text>", *, kind: str | None = None) -> Self:
        """Return the document of a text.

        Args:
            path: The file's name in messages.
            kind: The kind; None: it is detected from the name and the text.

        Raises:
            PayloadError: The text has a character that no configuration has, or a very long key.
        """
        text = strict_yaml.normalise_text(text, path)
        if path.endswith(".toml"):
            _refuse_long_keys(text, path)
        if kind is None:
            kind = detect_document_kind(path, text)
        return cls(path=path, text=text, kind=kind)

    @cached_property
    def contents(self) -> tuple[Any, ...]:
        """The parsed values: a single value, or a value for each document of a YAML file.

        If the kind is not a data format (a shell script, for example), the value is the text.
        """
        if self.of is not None:
            return (self.of,)
        if self.kind == "yaml":
            documents = strict_yaml.load_documents(
                self.text, self.path, may_repeat=may_repeat, repeated=self.repeated
            )
            return documents or (None,)
        if self.kind == "json":
            return (strict_json.loads(self.text, self.path),)
        if self.kind == "toml":
            return (_parse_toml(self.text, self.path),)
        return (self.text,)

    @property
    def content(self) -> Any:
        """The parsed value. For several YAML documents, the first value that is not empty."""
        for value in self.contents:
            if value is not None:
                return value
        return None

    @property
    def mapping(self) -> dict[str, Any]:
        """The parsed value if it is a mapping, else an empty mapping."""
        if self.kind not in ("yaml", "json", "toml"):
            return {}
        content = self.content
        if not isinstance(content, dict):
            return {}
        return content

    @property
    def parts(self) -> tuple[Document, ...]:
        """The document itself, or each non-empty document of a YAML file with several documents."""
        if self.kind != "yaml" or self.part is not None:
            return (self,)
        filled = [value for value in self.contents if value is not None]
        if len(filled) < 2:
            return (self,)
        return tuple(replace(self, part=number, of=value) for number, value in enumerate(filled, 1))


def _parse_toml(text: str, path: str) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        PayloadError: The text is not TOML, or is nested too deeply.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        rule, remedy = strict_yaml.TOO_DEEP
        raise PayloadError(f"{path}: {rule}. {remedy}.") from None
    except tomllib.TOMLDecodeError as error:
        raise PayloadError(f"{path}: must be TOML; {error}. Correct it there.") from None


def _refuse_long_keys(text: str, path: str) -> None:
    """Refuse TOML with a key of more than `MAX_KEY_PARTS` parts.

    Raises:
        PayloadError: The text has such a key.
    """
    key = LONG_KEY_PATTERN.search(text)
    if key is not None:
        line = text.count("\n", 0, key.start()) + 1
        rule = f"a key must not have more than {MAX_KEY_PARTS} parts"
        raise PayloadError(f"{path}, line {line}: {rule}, got more. Write tables.")
