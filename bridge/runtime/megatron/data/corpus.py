"""`open_corpus`: the text of a run as Megatron's ``.bin``/``.idx`` pair, or an existing pair.

Text is cut into pieces of a few KiB at line ends. The pieces are shuffled with a fixed seed, and
written as documents. Megatron splits the documents in their order. Without the shuffle the
validation split would be the end of the file. In CPython's alphabetical documentation the end is
easier than the beginning, by 0.25 nats of unigram entropy.
"""

import hashlib
import logging
import os
import random
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from bridge.errors import DataError
from bridge.runtime.megatron.data.pair_path import PairPath, find_path_fault

BYTES_VOCAB_SIZE = 256
"""One id per byte value."""
END_OF_DOCUMENT = 0
"""The byte that follows each piece of text: NUL, which text does not contain."""
PIECE_BYTES = 2048
"""A piece ends at the first line end after this many bytes."""
SHUFFLE_SEED = 20240
INDEX_FOLDER = "indices"
"""The folder of the cache with the sample indices that Megatron builds."""
MAX_SCANNED_TOKENS = 2**28
"""The largest number of tokens whose ids are checked here. The embedding checks the others."""

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
    """Return the corpus of a run in a collective call.

    The first rank tokenises text while the other ranks wait.

    Args:
        path: A text file, or the prefix of an existing pair. None: CPython's documentation.
        vocab_size: Vocabulary of the tokenizer that made an existing pair. None: the data are text.
        cache_dir: Folder of tokenised text. None: the user's cache.

    Raises:
        DataError: The file is missing, empty or incomplete, or `vocab_size` is missing,
            superfluous or too small.
    """
    cache = _get_cache_folder(cache_dir)
    if path is not None:
        fault = find_path_fault(path)
        if fault is not None:
            raise DataError(str(fault))
        pair = PairPath.parse(path)
        if pair.is_complete():
            return _open_pair(pair, vocab_size, cache)
    if vocab_size is not None:
        rule = f"text is tokenised to bytes and always has {BYTES_VOCAB_SIZE} ids"
        remedy = "Leave it at None; it belongs to an existing .bin/.idx pair."
        raise DataError.of("data.vocab_size", rule, vocab_size, remedy)
    return _open_text(path, cache)


def _get_cache_folder(cache_dir: str | None) -> Path:
    """Return the folder of tokenised text, by default the user's cache."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    if home:
        return Path(home) / "precision-bridge"
    return Path.home() / ".cache" / "precision-bridge"


def _open_pair(pair: PairPath, vocab_size: int | None, cache: Path) -> Corpus:
    """Return the corpus of an existing pair, whose ids must be smaller than `vocab_size`."""
    if vocab_size is None:
        rule = (
            f"the .bin/.idx pair {str(pair.prefix)!r} does not say how many ids its tokenizer has"
        )
        remedy = "Set it to the tokenizer's vocabulary size."
        raise DataError.of("data.vocab_size", rule, None, remedy)
    damage = pair.find_damage()
    if damage is not None:
        raise DataError(f"data.path: {damage}. Copy the data set again, or make it again.")
    dtype = IndexedDataset(str(pair.prefix)).index.dtype
    ids = np.memmap(pair.data_file, dtype=dtype, mode="r")[:MAX_SCANNED_TOKENS]
    largest = -1
    if ids.size:
        largest = int(ids.max())
    if largest < 0:
        remedy = "Give a data set with text in it."
        raise DataError(f"data.path: {pair.data_file} holds no tokens. {remedy}")
    if largest >= vocab_size:
        rule = f"must be larger than the largest token id {largest} in {pair.data_file}"
        remedy = "Set it to the vocabulary size of the tokenizer that made the data."
        raise DataError.of("data.vocab_size", rule, vocab_size, remedy)
    return Corpus(
        prefix=str(pair.prefix),
        vocab_size=vocab_size,
        name=pair.prefix.name,
        index_dir=cache / INDEX_FOLDER,
    )


def _open_text(path: str | None, cache: Path) -> Corpus:
    """Return the corpus of a text, whose tokens the first rank writes into the cache."""
    name, text = _read_text(path)
    pieces: list[bytes] = []
    for part in text:
        pieces.extend(_split_into_pieces(part))
    pair = PairPath(cache / f"bytes-{_hash_pieces(pieces)}")
    rank = torch.distributed.get_rank()
    if rank == 0 and not _is_cached(pair):
        _write_pair(pieces, pair)
    torch.distributed.barrier()
    if not pair.is_complete():
        rule = f"rank 0 wrote {pair.data_file}, but rank {rank} does not see it"
        remedy = "Choose a folder that all machines share."
        raise DataError.of("data.cache_dir", rule, str(cache), remedy)
    return Corpus(
        prefix=str(pair.prefix),
        vocab_size=BYTES_VOCAB_SIZE,
        name=name,
        index_dir=cache / INDEX_FOLDER,
    )


def _read_text(path: str | None) -> tuple[str, list[bytes]]:
    """Return a name for messages, and the text in parts that are cut into pieces separately.

    Raises:
        DataError: The file has no text.
    """
    if path is None:
        from pydoc_data.topics import topics

        texts = [text.encode() for _, text in sorted(topics.items())]
        return "CPython's reference documentation", texts
    content = Path(path).expanduser().read_bytes()
    if not content.strip():
        remedy = "Give a text file of some 100 kB or more."
        raise DataError.of("data.path", "the file holds no text", path, remedy)
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
    """Return a hash of the pieces, and of the constants with which the files are made."""
    content = hashlib.sha256(f"{SHUFFLE_SEED} {END_OF_DOCUMENT}".encode())
    for piece in pieces:
        content.update(len(piece).to_bytes(8, "little") + piece)
    return content.hexdigest()[:16]


def _is_cached(pair: PairPath) -> bool:
    """Return whether tokenised text is in the cache and complete. Damage is logged."""
    if not pair.is_complete():
        return False
    damage = pair.find_damage()
    if damage is None:
        return True
    log.warning("data.cache_dir: %s. The text is tokenised again.", damage)
    return False


def _write_pair(pieces: list[bytes], pair: PairPath) -> None:
    """Write the pieces, shuffled, as documents of byte ids.

    The files are renamed into place when they are complete, the index last.
    """
    folder = pair.prefix.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = PairPath(folder / f".{pair.prefix.name}-{uuid.uuid4().hex}")
        dtype = DType.optimal_dtype(BYTES_VOCAB_SIZE)
        builder = IndexedDatasetBuilder(str(scratch.data_file), dtype=dtype)
        order = random.Random(SHUFFLE_SEED)  # noqa: S311 an order, not a secret
        for piece in order.sample(pieces, len(pieces)):
            ids = np.frombuffer(piece + bytes([END_OF_DOCUMENT]), dtype=np.uint8)
            builder.add_document(ids.astype(dtype), [len(ids)])
        builder.finalize(str(scratch.index_file))
        scratch.data_file.replace(pair.data_file)
        scratch.index_file.replace(pair.index_file)
    except OSError as error:
        rule, remedy = "cannot write the tokenised text", "Choose a folder you can write to."
        raise DataError.of(
            "data.cache_dir", rule, str(folder), remedy, where=error.strerror
        ) from error
