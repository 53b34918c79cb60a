"""The batches of a rank: Megatron's `GPTDataset` over a corpus, and the rank's samples in order."""

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
from bridge.runtime.megatron.attention.context_parallel import take_rank_part
from bridge.runtime.megatron.data.corpus import END_OF_DOCUMENT, Corpus
from bridge.runtime.megatron.process.agreement import compute_on_first_rank

log = logging.getLogger(__name__)

MAX_COUNTED_TOKENS = 2**26
"""Largest number of tokens per split that the unigram statistics read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """The samples of a run, in Megatron's data sets."""

    train: Any
    validation: Any
    """None: the run has no validation."""


def build_splits(
    corpus: Corpus,
    *,
    seq_length: int,
    split: str,
    seed: int,
    train_samples: int,
    validation_samples: int,
) -> Splits:
    """Return the samples of a run. Megatron builds their indices, or reads them from the cache.

    This is a collective call. The documents repeat until there are enough samples.

    Args:
        corpus: The text.
        seq_length: Tokens of a sample.
        split: Parts of the documents for training, validation and test, as Megatron writes them.
        seed: Seed of the sample order.
        train_samples: Samples of the whole run.
        validation_samples: Samples of a validation. 0: no validation.

    Raises:
        DataError: The split is malformed, or a part has less than one sample.
    """
    _require_three_parts(split)
    config = _make_dataset_config(corpus, seq_length=seq_length, split=split, seed=seed)
    _require_samples(corpus, config, seq_length, split, validation_samples > 0)
    compute_on_first_rank(lambda: _delete_damaged_indices(corpus.index_dir))
    sizes = [train_samples, validation_samples or None, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    train, validation = built[:2]
    if not validation_samples:
        validation = None
    return Splits(train=train, validation=validation)


def _make_dataset_config(corpus: Corpus, *, seq_length: int, split: str, seed: int) -> Any:
    """Return Megatron's config of a data set over a corpus, whose tokens are ids already."""
    tokenizer = SimpleNamespace(
        vocab_size=corpus.vocab_size,
        eod=END_OF_DOCUMENT,
        pad=-1,  # an id that does not occur, so that no token's loss is masked
        # in the name of the cached sample index
        unique_identifiers={"kind": "ids", "vocab_size": corpus.vocab_size},
    )
    return GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([corpus.prefix], None),
        split=split,
        path_to_cache=str(corpus.index_dir),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )


def _delete_damaged_indices(folder: Path) -> None:
    """Delete sample indices that a killed run left incomplete, or that contain pickled objects.

    Megatron would unpickle an array of objects, which can run code.
    """
    for path in sorted(folder.glob("*.npy")):
        try:
            np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError):
            log.warning("data.cache_dir: %s is damaged and is made again.", path)
            path.unlink(missing_ok=True)


def _require_three_parts(split: str) -> None:
    """Refuse a split that is not three numbers. Megatron would ignore any other part."""
    try:
        parts = [float(part) for part in split.split(",")]
    except ValueError:
        parts = []
    if len(parts) != 3 or min(parts) < 0 or not 0 < sum(parts) < math.inf:
        rule = "must be three numbers for training, validation and test"
        raise DataError.of("data.split", rule, split, "Write '90,5,5', for example.")


def _require_samples(
    corpus: Corpus, config: Any, seq_length: int, split: str, with_validation: bool
) -> None:
    """Refuse a split in which a part that is needed has less than one sample.

    Megatron's error does not show the cause.
    """
    # the data set unmaps its arrays when it is collected
    documents = GPTDataset.build_low_level_dataset(corpus.prefix, config)
    lengths = documents.sequence_lengths
    remedies = {"training": "Give more text, another split or shorter sequences."}
    if with_validation:
        remedies["validation"] = (
            "Give more text, another split or shorter sequences, or switch validation off with "
            "train.eval_iters=0."
        )
    for bounds, (name, remedy) in zip(config.split_matrix, remedies.items(), strict=False):
        start, end = bounds or (0.0, 0.0)
        first = round(start * len(lengths))
        last = round(end * len(lengths))
        tokens = int(lengths[first:last].sum())
        if tokens <= seq_length:
            raise DataError(
                f"data.split: the {name} part of {corpus.name} must hold more than one sequence "
                f"of {seq_length} tokens, got {tokens} tokens with {split!r}. {remedy}"
            )


def iterate_batches(
    dataset: Any,
    *,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    device: torch.device,
    context_parallel_rank: int = 0,
    context_parallel_size: int = 1,
    num_workers: int = 0,
    start: int = 0,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's micro-batches, without end.

    Sample k of the run is the same in every layout: the data-parallel ranks take micro-batches in
    turn. Each context-parallel rank has a part of every sample.

    Args:
        dataset: A split.
        micro_batch_size: Samples of a micro-batch.
        data_parallel_size: Number of data-parallel ranks.
        device: Device of the batches.
        context_parallel_size: Number of context-parallel ranks.
        num_workers: Processes that load samples.
        start: Samples that all ranks together have consumed before.
    """
    first = start + data_parallel_rank * micro_batch_size
    step = data_parallel_size * micro_batch_size
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=_iterate_sample_indices(first, step, micro_batch_size, len(dataset)),
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        # Otherwise each loader would draw from dropout's state, and resuming would not be exact.
        generator=torch.Generator(),
    )
    for samples in loader:
        batch = {}
        for name, tensor in samples.items():
            part = take_rank_part(tensor, context_parallel_rank, context_parallel_size, dim=1)
            batch[name] = part.to(device, non_blocking=True)
        yield batch


def _iterate_sample_indices(
    first: int, step: int, micro_batch_size: int, samples: int
) -> Iterator[list[int]]:
    """Yield the numbers of the samples of each micro-batch, without end; the samples repeat."""
    for begin in itertools.count(first, step):
        yield [index % samples for index in range(begin, begin + micro_batch_size)]


def compute_unigram_entropy(splits: Splits, vocab_size: int) -> float:
    """Return the loss of the best model without context, in nats per token of the validation split.

    The model knows only the frequency of each token in the training split. Its loss is the
    cross-entropy of the validation tokens under these frequencies. Each count is increased by one,
    so that the loss of an unseen token is finite. Without validation the loss is the loss on the
    training split. At most `MAX_COUNTED_TOKENS` of each split are counted.
    """
    train_counts = _count_tokens(splits.train, vocab_size)
    counts = train_counts
    if splits.validation is not None:
        counts = _count_tokens(splits.validation, vocab_size)
    log_probability = np.log((train_counts + 1) / (train_counts.sum() + vocab_size))
    return float(-(counts * log_probability).sum() / counts.sum())


def _count_tokens(dataset: Any, vocab_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the number of times that each token occurs in a split, (vocab_size,)."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    tokens = 0
    for document in dataset.indices:
        ids = dataset.dataset[int(document)]
        counts += np.bincount(ids, minlength=vocab_size)
        tokens += len(ids)
        if tokens >= MAX_COUNTED_TOKENS:
            break
    return counts
