"""The text a run learns from: bytes of text as Megatron's ``.bin``/``.idx``, or a pair that is there already.

Text is cut into pieces of a few KiB at line ends, the pieces are shuffled with a fixed seed and written as documents.
Megatron splits by document and in order: without the shuffle, validation would be the end of the file (for CPython's
alphabetical documentation that is an easier text than its beginning, by 0.25 nats of unigram entropy).
"""

import hashlib
import logging
import os
import random
import struct
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from bridge.errors import DataError, Finding

BYTES_VOCAB_SIZE = 256
"""One id per byte value."""
END_OF_DOCUMENT = 0
"""The byte that follows each piece of text: NUL, which text does not contain."""
PIECE_BYTES = 2048
"""A piece ends at the first line end after this many bytes."""
SHUFFLE_SEED = 20240
SCAN_TOKENS = 2**28
"""Ids of an existing pair are checked up to this many tokens; beyond, the embedding's own bounds check has to do."""

_INDEX = struct.Struct("<9sQBQQ")
"""The head of an ``.idx``: magic, version, code of the dtype, and the numbers of sequences and documents."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A ``.bin``/``.idx`` pair on disk and its vocabulary."""

    prefix: str
    """Path without the suffix."""
    vocab_size: int
    name: str
    index_dir: Path
    """Folder of the sample indices that Megatron builds for it."""


def open_corpus(path: str | None, *, vocab_size: int | None, cache_dir: str | None) -> Corpus:
    """Return the corpus that the data section names, tokenising text on rank 0 while the other ranks wait.

    The arguments are the fields of `DataConfig`. DataError where the file is missing, empty or half there, or
    `vocab_size` is missing, superfluous or too small.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(cache_dir).expanduser() if cache_dir else home / "precision-bridge"
    if path is not None:
        fault, (prefix, there) = path_fault(path), _pair(path)
        if fault is not None:
            raise DataError(str(fault))
        if all(there.values()):
            return _open_pair(prefix, vocab_size, cache)
    if vocab_size is not None:
        raise DataError(
            f"data.vocab_size: text is tokenised to bytes and always has {BYTES_VOCAB_SIZE} ids, got {vocab_size}. "
            "Leave it at None; it belongs to an existing .bin/.idx pair."
        )
    name, text = _read_text(path)
    pieces = [piece for part in text for piece in _pieces(part)]
    target = cache / f"bytes-{_digest(pieces)}"
    if torch.distributed.get_rank() == 0:
        damage = pair_fault(target) if _is_complete(target) else None
        if damage is not None:
            log.warning("data.cache_dir: %s. The text is tokenised again.", damage)
        if damage is not None or not _is_complete(target):
            _write(pieces, target)
    torch.distributed.barrier()
    if not _is_complete(target):
        raise DataError(
            f"data.cache_dir: rank 0 wrote {target}.bin, but rank {torch.distributed.get_rank()} does not see it, got "
            f"{str(cache)!r}. Choose a folder that all machines share."
        )
    return Corpus(
        prefix=str(target), vocab_size=BYTES_VOCAB_SIZE, name=name, index_dir=cache / "indices"
    )


def path_fault(path: str) -> Finding | None:
    """Return the fault of a path that names neither a text file nor both files of a ``.bin``/``.idx`` pair, or None."""
    prefix, there = _pair(path)
    rule = "no such file, and no .bin/.idx pair of that prefix"
    remedy = "Give a text file or the prefix of a Megatron data set."
    if any(there.values()):
        present, absent = sorted(there, key=there.__getitem__, reverse=True)
        rule, remedy = (
            f"{prefix}{present} is there but {prefix}{absent} is not",
            "A Megatron data set is both files.",
        )
    is_text = (
        not any(there.values())
        and Path(path).suffix not in there
        and Path(path).expanduser().is_file()
    )
    if is_text or all(there.values()):
        return None
    return Finding(path="data.path", rule=rule, value=path, remedy=remedy)


def _pair(path: str) -> tuple[Path, dict[str, bool]]:
    """Return the prefix that `path` may stand for, and suffix -> whether there is such a file."""
    given = Path(path).expanduser()
    prefix = given.with_suffix("") if given.suffix in (".bin", ".idx") else given
    return prefix, {suffix: Path(f"{prefix}{suffix}").is_file() for suffix in (".bin", ".idx")}


def _open_pair(prefix: Path, vocab_size: int | None, cache: Path) -> Corpus:
    if vocab_size is None:
        raise DataError(
            f"data.vocab_size: an existing .bin/.idx pair does not say how many ids its tokenizer has, got None "
            f"for {str(prefix)!r}. Set it to the tokenizer's vocabulary size."
        )
    fault = pair_fault(prefix)
    if fault is not None:
        raise DataError(f"data.path: {fault}. Copy the data set again, or make it again.")
    ids = np.memmap(f"{prefix}.bin", dtype=IndexedDataset(str(prefix)).index.dtype, mode="r")[
        :SCAN_TOKENS
    ]
    largest = int(ids.max()) if ids.size else -1
    if largest < 0:
        raise DataError(
            f"data.path: {prefix}.bin holds no tokens. Give a data set with text in it."
        )
    if largest >= vocab_size:
        raise DataError(
            f"data.vocab_size: must be larger than the largest token id {largest} in {prefix}.bin, got {vocab_size}. "
            "Set it to the vocabulary size of the tokenizer that made the data."
        )
    return Corpus(
        prefix=str(prefix), vocab_size=vocab_size, name=prefix.name, index_dir=cache / "indices"
    )


def pair_fault(prefix: Path) -> str | None:
    """Return which file of a pair was not written to its end, as a clause, or None.

    Megatron's own reader is not asked: where it refuses an index, it prints a traceback as it is collected.
    """
    file = Path(f"{prefix}.idx")
    with file.open("rb") as stream:
        magic, _, code, sequences, documents = _INDEX.unpack(
            stream.read(_INDEX.size).ljust(_INDEX.size, b"\0")
        )
    size = _INDEX.size + 12 * sequences + 8 * documents
    if (
        magic != (b"MMIDIDX\x00\x00")
        or code not in {dtype.value for dtype in DType}
        or file.stat().st_size < size
    ):
        return f"{file} is damaged"
    data = np.memmap(file, mode="r")[_INDEX.size :]
    lengths, pointers = (
        data[: 4 * sequences].view(np.int32),
        data[4 * sequences : 12 * sequences].view(np.int64),
    )
    needed = int(pointers[-1]) + int(lengths[-1]) * DType.size(code) if sequences else 0
    found = Path(f"{prefix}.bin").stat().st_size
    return (
        None if found >= needed else f"{prefix}.bin has {found} bytes, and its index names {needed}"
    )


def _read_text(path: str | None) -> tuple[str, list[bytes]]:
    """Return a name and the text, in parts that belong together."""
    if path is None:
        from pydoc_data.topics import topics

        return "CPython's reference documentation", [
            text.encode() for _, text in sorted(topics.items())
        ]
    content = Path(path).expanduser().read_bytes()
    if not content.strip():
        raise DataError(
            f"data.path: the file holds no text, got {path!r}. Give a text file of some 100 kB or more."
        )
    return Path(path).name, [content]


def _pieces(text: bytes) -> list[bytes]:
    """Cut text at the first line end after every `PIECE_BYTES` bytes; a text without line ends is cut there."""
    pieces = []
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + PIECE_BYTES)
        if end < 0 or end > start + 2 * PIECE_BYTES:
            end = start + 2 * PIECE_BYTES - 1
        pieces.append(text[start : end + 1])
        start = end + 1
    return pieces


def _digest(pieces: list[bytes]) -> str:
    """Return a name for the content and for everything that shapes the files made of it."""
    content = hashlib.sha256(f"{SHUFFLE_SEED} {END_OF_DOCUMENT}".encode())
    for piece in pieces:
        content.update(len(piece).to_bytes(8, "little") + piece)
    return content.hexdigest()[:16]


def _is_complete(prefix: Path) -> bool:
    """Return whether both files are there; the index is put in place last."""
    return Path(f"{prefix}.idx").is_file() and Path(f"{prefix}.bin").is_file()


def _write(pieces: list[bytes], prefix: Path) -> None:
    """Write the pieces, shuffled, as documents of byte ids; the files appear under their names when complete."""
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        scratch = prefix.with_name(f".{prefix.name}-{uuid.uuid4().hex}")
        builder = IndexedDatasetBuilder(
            f"{scratch}.bin", dtype=DType.optimal_dtype(BYTES_VOCAB_SIZE)
        )
        for piece in random.Random(SHUFFLE_SEED).sample(pieces, len(pieces)):  # noqa: S311 an order, not a secret
            ids = np.frombuffer(piece + bytes([END_OF_DOCUMENT]), dtype=np.uint8)
            builder.add_document(ids.astype(DType.optimal_dtype(BYTES_VOCAB_SIZE)), [len(ids)])
        builder.finalize(f"{scratch}.idx")
        for suffix in (".bin", ".idx"):
            Path(f"{scratch}{suffix}").replace(f"{prefix}{suffix}")
    except OSError as error:
        raise DataError(
            f"data.cache_dir: cannot write the tokenised text, got {str(prefix.parent)!r} ({error.strerror}). Choose a "
            "folder you can write to."
        ) from error
