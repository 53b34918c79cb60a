"""`Document`: a file of another system, read safely and only as far as it is asked.

Nothing in it is run, imported or instantiated. What cannot be a configuration (too large, not
UTF-8, deeper or with more aliases than any person writes, a key of the precision twice) is refused
with one sentence.
"""

import re
import tomllib
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from bridge.errors import PayloadError
from bridge.precision import strict_yaml
from bridge.precision.strict_yaml import MAX_BYTES
from bridge.read.megatron_lm.flags import may_repeat
from bridge.read.megatron_lm.printed import SUFFIX as CHECKPOINT
from bridge.read.megatron_lm.printed import arguments_text
from bridge.read.text import strict_json

PRINTED = "- end of arguments -"
"""In the log of a run of Megatron-LM."""
ARCHIVE = b"PK\x03\x04"
"""The first bytes of a file of `torch.save`."""
MAX_KEY_PARTS = 64
DOTTED = re.compile(
    r"""(?:\.[ \t]*+(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+)"""
    rf"{{{MAX_KEY_PARTS}}}"
)
"""A key of TOML with more parts than anybody writes; `tomllib` takes time with the square of their
number."""

SUFFIXES = {
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".toml": "toml",
    ".py": "python",
    ".env": "env",
}
SUFFIXES |= dict.fromkeys((".sh", ".bash", ".slurm", ".sbatch", ".sub", ".slrm"), "shell")


@dataclass(frozen=True, kw_only=True)
class Document:
    """One file, or one YAML document of a file that holds several."""

    path: str
    text: str
    kind: str
    """yaml, json, toml, shell, python, env or text."""
    part: int | None = None
    """Which document of a YAML file with several, from 1."""
    of: Any = field(default=None, repr=False)
    """The parsed content, where the caller parsed it."""
    repeated: list[tuple[str, object, int]] = field(default_factory=list, repr=False)
    """Key, last value and line of each key that stands twice in one mapping and bears on no
    precision."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file.

        PayloadError for a device or a named pipe, and for what is not there, too large or no text.
        """
        return cls.of_bytes(strict_yaml.read_bytes(path), str(path))

    @classmethod
    def of_bytes(cls, data: bytes, path: str) -> Self:
        """Return the document of a file's contents; raises as `load`."""
        if (
            len(data) > MAX_BYTES and PRINTED.encode() in data
        ):  # a log, whose rest says nothing of the precision
            data = data[:MAX_BYTES].rpartition(b"\n")[0]
        if data.startswith(ARCHIVE) and path.endswith(CHECKPOINT):
            return cls.of_text(arguments_text(data, path), path, kind="text")
        return cls.of_text(strict_yaml.decoded(data, path), path)

    @classmethod
    def of_text(cls, text: str, path: str = "<text>", *, kind: str | None = None) -> Self:
        """Return the document of a text; without `kind`, name and contents tell."""
        text = strict_yaml.plain_text(text, path)
        found = DOTTED.search(text) if path.endswith(".toml") else None
        if found is not None:
            line = text.count("\n", 0, found.start()) + 1
            rule = f"a key must not have more than {MAX_KEY_PARTS} parts"
            raise PayloadError(f"{path}, line {line}: {rule}, got more. Write tables.")
        return cls(path=path, text=text, kind=kind if kind is not None else _kind(path, text))

    @cached_property
    def contents(self) -> tuple[Any, ...]:
        """The parsed values: one, or one per document of a YAML file.

        The text itself for what is no data format.
        """
        if self.of is not None:
            return (self.of,)
        if self.kind == "yaml":
            return strict_yaml.load_all(
                self.text, self.path, may_repeat=may_repeat, repeated=self.repeated
            ) or (None,)
        if self.kind == "json":
            return (strict_json.loads(self.text, self.path),)
        if self.kind == "toml":
            try:
                return (tomllib.loads(self.text),)
            except RecursionError:
                rule, remedy = strict_yaml.TOO_DEEP
                raise PayloadError(f"{self.path}: {rule}. {remedy}.") from None
            except tomllib.TOMLDecodeError as error:
                raise PayloadError(
                    f"{self.path}: must be TOML; {error}. Correct it there."
                ) from None
        return (self.text,)

    @property
    def content(self) -> Any:
        """The parsed value; of several YAML documents the first that is not empty."""
        return next((value for value in self.contents if value is not None), None)

    @property
    def mapping(self) -> dict[str, Any]:
        """The parsed value where it is a mapping, else an empty one: what `recognise` asks."""
        content = self.content if self.kind in ("yaml", "json", "toml") else None
        return content if isinstance(content, dict) else {}

    @property
    def parts(self) -> tuple["Document", ...]:
        """The document itself, or one per non-empty document of a YAML file with several."""
        if self.kind != "yaml" or self.part is not None:
            return (self,)
        filled = [value for value in self.contents if value is not None]
        if len(filled) < 2:
            return (self,)
        return tuple(replace(self, part=place, of=value) for place, value in enumerate(filled, 1))


def _kind(path: str, text: str) -> str:
    """Return the kind by the file's name, or by how the text begins."""
    name = Path(path).name.lower()
    if name == ".env" or name.startswith(".env."):
        return "env"
    suffix = Path(name).suffix
    if suffix in SUFFIXES:
        return SUFFIXES[suffix]
    if PRINTED in text:
        return "text"
    start = text.lstrip()[:400]
    if re.match(r"#!.*python", start):
        return "python"
    if start.startswith("#!") or re.search(r"^#SBATCH ", start, re.MULTILINE):
        return "shell"
    if start.startswith("{"):
        return "json"
    lines = [
        line
        for line in text.splitlines()[:200]
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if lines and all(re.match(r"(export\s+)?[A-Za-z_]\w*=", line) for line in lines):
        return "env"
    if re.search(
        r"^\s*(torchrun|python3?|srun|sbatch|deepspeed|accelerate|export)\s|^\w+=\(",
        text,
        re.MULTILINE,
    ):
        return "shell"
    if lines and sum(
        bool(re.match(r"\s*(- )?[\"']?[\w.-]+[\"']?\s*:(\s|$)", line)) for line in lines
    ) * 2 > len(lines):
        return "yaml"
    return "text"
