"""Batches: Megatron's `GPTDataset` over a corpus, and this rank's share of it in the order of the samples."""

import itertools
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from bridge.errors import DataError
from bridge.runtime.megatron.agreement import from_first_rank
from bridge.runtime.megatron.causal_attention import own_part
from bridge.runtime.megatron.data.corpus import END_OF_DOCUMENT, Corpus

log = logging.getLogger(__name__)

COUNT_TOKENS = 2**26
"""Tokens per split that the unigram statistics read at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """The samples a run trains on and is validated with."""

    train: Any
    validation: Any
    """None where the split gives validation nothing, or none was asked for."""


def build_splits(
    corpus: Corpus,
    *,
    seq_length: int,
    split: str,
    seed: int,
    train_samples: int,
    validation_samples: int,
) -> Splits:
    """Build (or read back from the cache) the indices of the samples that the run will read; a collective call.

    The documents repeat as often as it takes. DataError where the split is malformed or leaves a part with less than
    one sample.
    """
    _require_parts(split)
    vocabulary = SimpleNamespace(  # in place of a tokenizer: the text is ids already
        vocab_size=corpus.vocab_size,
        eod=END_OF_DOCUMENT,
        pad=-1,  # an id that does not occur, so that no token's loss is masked
        unique_identifiers={
            "kind": "ids",
            "vocab_size": corpus.vocab_size,
        },  # in the name of the cached sample index
    )
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([corpus.prefix], None),
        split=split,
        path_to_cache=str(corpus.index_dir),
        tokenizer=vocabulary,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    _require_samples(corpus, config, seq_length, split, validation_samples > 0)
    from_first_rank(lambda: _drop_damaged(corpus.index_dir))
    sizes = [train_samples, validation_samples or None, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return Splits(train=built[0], validation=built[1] if validation_samples else None)


def _drop_damaged(folder: Path) -> None:
    """Delete sample indices that a killed run left torn, or that are pickles: Megatron would unpickle them."""
    for path in sorted(folder.glob("*.npy")):
        try:
            np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError):
            log.warning("data.cache_dir: %s is damaged and is made again.", path)
            path.unlink(missing_ok=True)


def _require_parts(split: str) -> None:
    """Refuse anything but three numbers, of which Megatron would pick out what looks like one."""
    try:
        parts = [float(part) for part in split.split(",")]
    except ValueError:
        parts = []
    if len(parts) != 3 or min(parts) < 0 or not 0 < sum(parts) < math.inf:
        rule = "must be three numbers for training, validation and test"
        raise DataError(f"data.split: {rule}, got {split!r}. Write '90,5,5', for example.")


def _require_samples(
    corpus: Corpus, config: Any, seq_length: int, split: str, with_validation: bool
) -> None:
    """Refuse a split in which a part that is needed has less than one sample: Megatron's own error is obscure."""
    documents = GPTDataset.build_low_level_dataset(
        corpus.prefix, config
    )  # unmaps its arrays when it is collected
    lengths = documents.sequence_lengths
    for part, name in ((0, "training"), (1, "validation"))[: 1 + with_validation]:
        first, last = (
            round(bound * len(lengths)) for bound in config.split_matrix[part] or (0.0, 0.0)
        )
        tokens = int(lengths[first:last].sum())
        if tokens <= seq_length:
            remedy = "Give more text, another split or shorter sequences"
            remedy += ", or switch validation off with train.eval_iters=0." if part else "."
            raise DataError(
                f"data.split: the {name} part of {corpus.name} must hold more than one sequence of {seq_length} "
                f"tokens, got {tokens} tokens with {split!r}. {remedy}"
            )


def batches(
    dataset: Any,
    *,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    where: torch.device,
    context: tuple[int, int] = (0, 1),
    num_workers: int = 0,
    start: int = 0,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's micro-batches, for ever.

    Sample k of the run is the same whatever the layout: the ranks take turns of `micro_batch_size` samples, from
    `start` on, which were consumed already over all ranks. Context-parallel ranks share each sample; `context` is this
    one, and their number.
    """
    turns = itertools.count(
        start + data_parallel_rank * micro_batch_size, data_parallel_size * micro_batch_size
    )
    indices = (
        [index % len(dataset) for index in range(first, first + micro_batch_size)]
        for first in turns
    )
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=indices,
        num_workers=num_workers,
        pin_memory=where.type == "cuda",
        generator=torch.Generator(),  # else each loader draws from dropout's state, and resuming is not exact
    )
    for batch in loader:
        yield {
            name: own_part(tensor, *context).to(where, non_blocking=True)
            for name, tensor in batch.items()
        }


def unigram_entropy(splits: Splits, vocab_size: int) -> float:
    """Return the loss of the best model without context, in nats per token of the validation split.

    It is the cross-entropy of the validation tokens under the token frequencies of the training split (each count plus
    one, so that an unseen token costs a finite amount): the loss of a model that has learnt how often each token
    occurs and nothing else. Without validation, the training split's own entropy. At most `COUNT_TOKENS` of each split
    are counted.
    """
    train = _counts(splits.train, vocab_size)
    seen = train if splits.validation is None else _counts(splits.validation, vocab_size)
    log_probability = np.log((train + 1) / (train.sum() + vocab_size))
    return float(-(seen * log_probability).sum() / seen.sum())


def _counts(dataset: Any, vocab_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    counts = np.zeros(vocab_size, dtype=np.int64)
    tokens = 0
    for document in dataset.indices:
        ids = dataset.dataset[int(document)]
        counts += np.bincount(ids, minlength=vocab_size)
        tokens += len(ids)
        if tokens >= COUNT_TOKENS:
            break
    return counts
