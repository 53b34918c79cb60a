"""The text of a run: its bytes as Megatron's ``.bin``/``.idx`` pair, or an existing pair.

Text is cut into pieces of a few KiB at line ends. The pieces are shuffled with a fixed seed, and
written as documents. Megatron splits the documents in their order, so that without the shuffle the
validation split would be the end of the file. In CPython's alphabetical documentation the end is
easier than the beginning, by 0.25 nats of unigram entropy.
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
MAX_SCANNED_TOKENS = 2**28
"""Most tokens of an existing pair whose ids are checked here; the embedding checks the others."""

_INDEX_HEADER = struct.Struct("<9sQBQQ")
"""The head of an ``.idx``: magic, version, code of the dtype, number of sequences, of documents."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """A ``.bin``/``.idx`` pair on disk and its vocabulary."""

    prefix: str
    """Path of both files without the suffix."""
    vocab_size: int
    """Number of token ids."""
    name: str
    """Name of the text, for messages."""
    index_dir: Path
    """Folder of the sample indices that Megatron builds for the pair."""


def open_corpus(path: str | None, *, vocab_size: int | None, cache_dir: str | None) -> Corpus:
    """Return the corpus of a run; a collective call.

    The first rank tokenises text while the other ranks wait.

    Args:
        path: A text file, or the prefix of an existing pair. None means CPython's documentation.
        vocab_size: Vocabulary of the tokenizer that made an existing pair, else None.
        cache_dir: Folder of tokenised text. None means the user's cache.

    Raises:
        DataError: The file is missing, empty or incomplete, or `vocab_size` is missing,
            superfluous or too small.
    """
    cache = _get_cache_folder(cache_dir)
    if path is not None:
        fault = find_path_fault(path)
        if fault is not None:
            raise DataError(str(fault))
        prefix, is_file = _parse_pair_path(path)
        if all(is_file.values()):
            return _open_pair(prefix, vocab_size, cache)
    if vocab_size is not None:
        raise DataError(
            f"data.vocab_size: text is tokenised to bytes and always has {BYTES_VOCAB_SIZE} ids, "
            f"got {vocab_size}. Leave it at None; it belongs to an existing .bin/.idx pair."
        )
    return _open_text(path, cache)


def _open_text(path: str | None, cache: Path) -> Corpus:
    """Return the corpus of a text, whose tokens the first rank writes into the cache."""
    name, text = _read_text(path)
    pieces: list[bytes] = []
    for part in text:
        pieces.extend(_split_into_pieces(part))
    target = cache / f"bytes-{_hash_pieces(pieces)}"
    if torch.distributed.get_rank() == 0 and not _is_cached(target):
        _write_pair(pieces, target)
    torch.distributed.barrier()
    if not _is_complete(target):
        raise DataError(
            f"data.cache_dir: rank 0 wrote {target}.bin, but rank {torch.distributed.get_rank()} "
            f"does not see it, got {str(cache)!r}. Choose a folder that all machines share."
        )
    return Corpus(
        prefix=str(target), vocab_size=BYTES_VOCAB_SIZE, name=name, index_dir=cache / "indices"
    )


def _is_cached(target: Path) -> bool:
    """Return whether tokenised text is in the cache and complete; damage is logged."""
    if not _is_complete(target):
        return False
    damage = find_pair_fault(target)
    if damage is None:
        return True
    log.warning("data.cache_dir: %s. The text is tokenised again.", damage)
    return False


def _get_cache_folder(cache_dir: str | None) -> Path:
    """Return the folder of tokenised text, by default the user's cache."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    if home:
        return Path(home) / "precision-bridge"
    return Path.home() / ".cache" / "precision-bridge"


def find_path_fault(path: str) -> Finding | None:
    """Return the fault of a path without a text file or ``.bin``/``.idx`` pair; None for others."""
    prefix, is_file = _parse_pair_path(path)
    if all(is_file.values()):
        return None
    if any(is_file.values()):
        present, absent = sorted(is_file, key=is_file.__getitem__, reverse=True)
        return Finding(
            path="data.path",
            rule=f"{prefix}{present} is there but {prefix}{absent} is not",
            value=path,
            remedy="A Megatron data set is both files.",
        )
    if Path(path).suffix not in is_file and Path(path).expanduser().is_file():
        return None  # a text file
    return Finding(
        path="data.path",
        rule="no such file, and no .bin/.idx pair of that prefix",
        value=path,
        remedy="Give a text file or the prefix of a Megatron data set.",
    )


def _parse_pair_path(path: str) -> tuple[Path, dict[str, bool]]:
    """Return the prefix of a pair that a path may name, and suffix -> whether that file exists."""
    suffixes = (".bin", ".idx")
    prefix = Path(path).expanduser()
    if prefix.suffix in suffixes:
        prefix = prefix.with_suffix("")
    return prefix, {suffix: Path(f"{prefix}{suffix}").is_file() for suffix in suffixes}


def _open_pair(prefix: Path, vocab_size: int | None, cache: Path) -> Corpus:
    """Return the corpus of an existing pair, whose ids must be smaller than `vocab_size`."""
    if vocab_size is None:
        raise DataError(
            "data.vocab_size: an existing .bin/.idx pair does not say how many ids its tokenizer "
            f"has, got None for {str(prefix)!r}. Set it to the tokenizer's vocabulary size."
        )
    fault = find_pair_fault(prefix)
    if fault is not None:
        raise DataError(f"data.path: {fault}. Copy the data set again, or make it again.")
    dtype = IndexedDataset(str(prefix)).index.dtype
    ids = np.memmap(f"{prefix}.bin", dtype=dtype, mode="r")[:MAX_SCANNED_TOKENS]
    largest = -1
    if ids.size:
        largest = int(ids.max())
    if largest < 0:
        raise DataError(
            f"data.path: {prefix}.bin holds no tokens. Give a data set with text in it."
        )
    if largest >= vocab_size:
        raise DataError(
            f"data.vocab_size: must be larger than the largest token id {largest} in {prefix}.bin, "
            f"got {vocab_size}. "
            "Set it to the vocabulary size of the tokenizer that made the data."
        )
    return Corpus(
        prefix=str(prefix), vocab_size=vocab_size, name=prefix.name, index_dir=cache / "indices"
    )


def find_pair_fault(prefix: Path) -> str | None:
    """Return a clause on a file of a pair that was not written to its end; None without it.

    Megatron's reader is not called: when an index that it refused is garbage-collected, it prints a
    traceback.
    """
    file = Path(f"{prefix}.idx")
    with file.open("rb") as stream:
        head = stream.read(_INDEX_HEADER.size).ljust(_INDEX_HEADER.size, b"\0")
    magic, _, code, sequences, documents = _INDEX_HEADER.unpack(head)
    codes = {dtype.value for dtype in DType}
    index_bytes = _INDEX_HEADER.size + 12 * sequences + 8 * documents
    is_index = magic == b"MMIDIDX\x00\x00" and code in codes
    if not is_index or file.stat().st_size < index_bytes:
        return f"{file} is damaged"
    needed_bytes = 0
    if sequences:
        data = np.memmap(file, mode="r")[_INDEX_HEADER.size :]
        lengths = data[: 4 * sequences].view(np.int32)
        pointers = data[4 * sequences : 12 * sequences].view(np.int64)
        needed_bytes = int(pointers[-1]) + int(lengths[-1]) * DType.size(code)
    data_bytes = Path(f"{prefix}.bin").stat().st_size
    if data_bytes < needed_bytes:
        return f"{prefix}.bin has {data_bytes} bytes, and its index names {needed_bytes}"
    return None


def _read_text(path: str | None) -> tuple[str, list[bytes]]:
    """Return a name for messages, and the text in parts, each of which is cut into pieces separately.

    Raises:
        DataError: The file has no text.
    """
    if path is None:
        from pydoc_data.topics import topics

        texts = [text.encode() for _, text in sorted(topics.items())]
        return "CPython's reference documentation", texts
    content = Path(path).expanduser().read_bytes()
    if not content.strip():
        raise DataError(
            f"data.path: the file holds no text, got {path!r}. "
            "Give a text file of some 100 kB or more."
        )
    return Path(path).name, [content]


def _split_into_pieces(text: bytes) -> list[bytes]:
    """Return text cut at the first line end after every `PIECE_BYTES` bytes.

    A piece without a line end is cut after twice as many bytes.
    """
    pieces = []
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + PIECE_BYTES)
        if end < 0 or end > start + 2 * PIECE_BYTES:
            end = start + 2 * PIECE_BYTES - 1
        pieces.append(text[start : end + 1])
        start = end + 1
    return pieces


def _hash_pieces(pieces: list[bytes]) -> str:
    """Return a hash of the pieces, and of the constants that the files are made with."""
    content = hashlib.sha256(f"{SHUFFLE_SEED} {END_OF_DOCUMENT}".encode())
    for piece in pieces:
        content.update(len(piece).to_bytes(8, "little") + piece)
    return content.hexdigest()[:16]


def _is_complete(prefix: Path) -> bool:
    """Return whether both files exist; the index is renamed into place last."""
    return Path(f"{prefix}.idx").is_file() and Path(f"{prefix}.bin").is_file()


def _write_pair(pieces: list[bytes], prefix: Path) -> None:
    """Write the pieces, shuffled, as documents of byte ids.

    The files are renamed into place when they are complete.
    """
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        scratch = prefix.with_name(f".{prefix.name}-{uuid.uuid4().hex}")
        dtype = DType.optimal_dtype(BYTES_VOCAB_SIZE)
        builder = IndexedDatasetBuilder(f"{scratch}.bin", dtype=dtype)
        order = random.Random(SHUFFLE_SEED)  # noqa: S311 an order, not a secret
        for piece in order.sample(pieces, len(pieces)):
            ids = np.frombuffer(piece + bytes([END_OF_DOCUMENT]), dtype=np.uint8)
            builder.add_document(ids.astype(dtype), [len(ids)])
        builder.finalize(f"{scratch}.idx")
        for suffix in (".bin", ".idx"):
            Path(f"{scratch}{suffix}").replace(f"{prefix}{suffix}")
    except OSError as error:
        raise DataError(
            f"data.cache_dir: cannot write the tokenised text, got {str(prefix.parent)!r} "
            f"({error.strerror}). Choose a folder you can write to."
        ) from error
