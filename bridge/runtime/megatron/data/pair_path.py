"""`PairPath`: the path of a ``.bin``/``.idx`` pair of Megatron, and the damage of its files.

The ``.bin`` has the token ids. The ``.idx`` has these parts, in this order:

    head         magic, version, code of the dtype, number of sequences, number of documents
    lengths      the number of tokens of each sequence
    pointers     the first byte of each sequence in the .bin
    documents    the first sequence of each document

Source: megatron-core 0.16.1, datasets/indexed_dataset.py, `_IndexWriter`.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import DType

from bridge.errors import Finding

DATA_SUFFIX = ".bin"
INDEX_SUFFIX = ".idx"

INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEAD = struct.Struct("<9sQBQQ")
LENGTH_BYTES = 4
"""Bytes of the number of tokens of a sequence."""
POINTER_BYTES = 8
"""Bytes of the pointer to a sequence."""
DOCUMENT_BYTES = 8
"""Bytes of the number of a document's first sequence."""


@dataclass(frozen=True, slots=True)
class PairPath:
    """The path of a ``.bin``/``.idx`` pair, which may exist in part or not at all."""

    prefix: Path
    """The path of both files without the suffix."""

    @classmethod
    def parse(cls, path: str) -> "PairPath":
        """Return the pair that a path may name: by its prefix, its ``.bin`` or its ``.idx``."""
        prefix = Path(path).expanduser()
        if prefix.suffix in (DATA_SUFFIX, INDEX_SUFFIX):
            prefix = prefix.with_suffix("")
        return cls(prefix)

    @property
    def data_file(self) -> Path:
        """The file with the token ids."""
        return Path(f"{self.prefix}{DATA_SUFFIX}")

    @property
    def index_file(self) -> Path:
        """The file with the places of sequences and documents."""
        return Path(f"{self.prefix}{INDEX_SUFFIX}")

    def is_complete(self) -> bool:
        """Return whether both files exist."""
        return self.index_file.is_file() and self.data_file.is_file()

    def find_damage(self) -> str | None:
        """Return a clause about a file that was not written to its end.

        The result is None without such a file.

        Megatron's reader is not called: when an index that it refused is garbage-collected, it
        prints a traceback.
        """
        file = self.index_file
        with file.open("rb") as stream:
            head = stream.read(INDEX_HEAD.size).ljust(INDEX_HEAD.size, b"\0")
        magic, _, code, sequences, documents = INDEX_HEAD.unpack(head)
        known_codes = {dtype.value for dtype in DType}
        lengths_bytes = LENGTH_BYTES * sequences
        pointers_bytes = POINTER_BYTES * sequences
        parts_bytes = lengths_bytes + pointers_bytes + DOCUMENT_BYTES * documents
        is_index = magic == INDEX_MAGIC and code in known_codes
        if not is_index or file.stat().st_size < INDEX_HEAD.size + parts_bytes:
            return f"{file} is damaged"
        needed_bytes = 0
        if sequences:
            parts = np.memmap(file, mode="r")[INDEX_HEAD.size :]
            lengths = parts[:lengths_bytes].view(np.int32)
            pointers = parts[lengths_bytes:][:pointers_bytes].view(np.int64)
            needed_bytes = int(pointers[-1]) + int(lengths[-1]) * DType.size(code)
        data_bytes = self.data_file.stat().st_size
        if data_bytes < needed_bytes:
            return f"{self.data_file} has {data_bytes} bytes, and its index names {needed_bytes}"
        return None


def find_path_fault(path: str) -> Finding | None:
    """Return the fault of a path, or None if it names a text file or a complete pair."""
    pair = PairPath.parse(path)
    has_data, has_index = pair.data_file.is_file(), pair.index_file.is_file()
    if has_data and has_index:
        return None
    if has_data or has_index:
        present, absent = pair.data_file, pair.index_file
        if has_index:
            present, absent = pair.index_file, pair.data_file
        return Finding(
            path="data.path",
            rule=f"{present} is there but {absent} is not",
            value=path,
            remedy="A Megatron data set is both files.",
        )
    is_pair = Path(path).suffix in (DATA_SUFFIX, INDEX_SUFFIX)
    if not is_pair and Path(path).expanduser().is_file():
        return None  # a text file
    return Finding(
        path="data.path",
        rule="no such file, and no .bin/.idx pair of that prefix",
        value=path,
        remedy="Give a text file or the prefix of a Megatron data set.",
    )
