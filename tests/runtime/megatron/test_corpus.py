"""Corpora: CPython's documentation, text files, existing pairs, and everything that can be wrong with them."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from bridge.errors import DataError
from bridge.runtime.megatron.data.batches import Splits, build_splits, compute_unigram_entropy, iterate_batches
from bridge.runtime.megatron.data.corpus import END_OF_DOCUMENT, open_corpus
from bridge.runtime.megatron.model.gpt import GPTConfig
from bridge.runtime.megatron.process.training_process import training_process


@pytest.fixture(scope="module")
def process():
    with training_process(GPTConfig(num_layers=1, hidden_size=8, num_attention_heads=1), seed=1) as started:
        yield started


def corpus_of(path, tmp_path, vocab_size=None):
    return open_corpus(None if path is None else str(path), vocab_size=vocab_size, cache_dir=str(tmp_path / "cache"))


def splits_of(corpus, **changes):
    arguments = {"seq_length": 32, "split": "90,5,5", "seed": 1, "train_samples": 64, "validation_samples": 16}
    return build_splits(corpus, **{**arguments, **changes})


def ids_of(corpus):
    return np.fromfile(f"{corpus.prefix}.bin", dtype=np.uint16)


def write_pair(prefix: Path, documents):
    """Write documents of ids as another tool would."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for ids in documents:
        builder.add_document(np.array(ids, dtype=np.uint16), [len(ids)])
    builder.finalize(f"{prefix}.idx")


def test_documentation_of_cpython_is_all_there(process, tmp_path):
    from pydoc_data.topics import topics

    corpus = corpus_of(None, tmp_path)
    ids = ids_of(corpus)
    assert corpus.vocab_size == 256
    assert (ids != END_OF_DOCUMENT).sum() == sum(len(text.encode()) for text in topics.values())
    assert ids.max() < 256


def test_text_is_all_there_in_another_order(process, tmp_path):
    lines = [f"line {number} of the text\n" for number in range(2000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    text = bytes(ids_of(corpus_of(tmp_path / "a.txt", tmp_path)).astype(np.uint8)).replace(b"\0", b"").decode()
    assert sorted(text.splitlines(keepends=True)) == sorted(lines)
    assert text != "".join(lines)


def test_text_without_line_ends_and_any_bytes(process, tmp_path):
    content = bytes(range(1, 256)) * 100
    (tmp_path / "b.bin.txt").write_bytes(content)
    ids = ids_of(corpus_of(tmp_path / "b.bin.txt", tmp_path))
    assert np.array_equal(np.bincount(ids[ids != 0], minlength=256)[1:], np.full(255, 100))


def test_second_opening_reads_the_cache(process, tmp_path):
    first = corpus_of(None, tmp_path)
    written = Path(f"{first.prefix}.bin").stat().st_mtime_ns
    assert corpus_of(None, tmp_path) == first
    assert Path(f"{first.prefix}.bin").stat().st_mtime_ns == written
    assert [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")] == []


class Evil:
    """A pickle of this makes a file."""

    def __init__(self, folder: Path) -> None:
        self.command = f"touch {folder}/ran"

    def __reduce__(self):
        return os.system, (self.command,)


def test_torn_files_of_the_cache_are_made_anew_and_no_code_of_them_is_run(process, tmp_path):
    corpus = corpus_of(None, tmp_path)
    splits_of(corpus)
    indices = sorted(corpus.index_dir.glob("*.npy"))
    files = [Path(f"{corpus.prefix}.bin"), Path(f"{corpus.prefix}.idx"), *indices]
    whole = {path: path.read_bytes() for path in files}
    assert len(indices) == 9  # three of each split
    for path, content in whole.items():
        forged = [pickle.dumps(Evil(tmp_path))] if path in indices else []
        for torn in (b"", content[: len(content) // 2], content[:-1], *forged):
            path.write_bytes(torn)
            splits_of(corpus_of(None, tmp_path))
            assert path.read_bytes() == content, path
    assert not (tmp_path / "ran").exists()


def test_a_torn_pair_is_one_sentence(process, tmp_path):
    write_pair(tmp_path / "pair", [[1, 2, 3, 4] * 20] * 40)
    os.truncate(tmp_path / "pair.bin", 6000)
    with pytest.raises(DataError) as raised:
        corpus_of(tmp_path / "pair", tmp_path, vocab_size=5)
    assert str(raised.value) == (
        f"data.path: {tmp_path}/pair.bin has 6000 bytes, and its index names 6400. Copy the data set again, or make it "
        "again."
    )
    for size in (0, 10, 300):
        os.truncate(tmp_path / "pair.idx", size)
        with pytest.raises(DataError, match=r"pair\.idx is damaged\."):
            corpus_of(tmp_path / "pair", tmp_path, vocab_size=5)


def test_changed_text_is_another_corpus(process, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some words\n" * 500)
    first = corpus_of(path, tmp_path)
    path.write_text("some words\n" * 501)
    assert corpus_of(path, tmp_path).prefix != first.prefix


def test_split_is_fair(process, tmp_path):
    splits = splits_of(corpus_of(None, tmp_path), seq_length=256)
    own = [
        compute_unigram_entropy(Splits(train=part, validation=None), 256) for part in (splits.train, splits.validation)
    ]
    assert own[0] == pytest.approx(own[1], abs=0.06)
    assert compute_unigram_entropy(splits, 256) == pytest.approx(own[1], abs=0.03)


def test_unigram_entropy_of_a_fair_coin_is_one_bit(process, tmp_path):
    write_pair(tmp_path / "coin", [[2, 3] * 500] * 20)
    corpus = corpus_of(tmp_path / "coin", tmp_path, vocab_size=4)
    assert compute_unigram_entropy(splits_of(corpus), 4) == pytest.approx(np.log(2), rel=1e-3)


def test_token_unseen_in_training_costs_a_finite_amount(process, tmp_path):
    write_pair(tmp_path / "unseen", [[2] * 100] * 19 + [[3] * 100])
    corpus = corpus_of(tmp_path / "unseen", tmp_path, vocab_size=4)
    assert compute_unigram_entropy(splits_of(corpus, split="95,5,0"), 4) == pytest.approx(np.log(1904), rel=1e-3)


def test_existing_pair_is_used_where_it_lies(process, tmp_path):
    write_pair(tmp_path / "pair", [[1, 2, 3, 4] * 20] * 40)
    for path in (tmp_path / "pair", tmp_path / "pair.bin", tmp_path / "pair.idx"):
        corpus = corpus_of(path, tmp_path, vocab_size=5)
        assert corpus.prefix == str(tmp_path / "pair")
    batch = next(
        iterate_batches(
            splits_of(corpus).train,
            micro_batch_size=2,
            data_parallel_rank=0,
            data_parallel_size=1,
            device=process.device,
        )
    )
    assert batch["tokens"].shape == (2, 32)
    assert set(batch["tokens"].unique().tolist()) == {1, 2, 3, 4}
    assert (batch["loss_mask"] == 1).all()


def test_samples_do_not_depend_on_the_layout(process, tmp_path):
    train = splits_of(corpus_of(None, tmp_path)).train

    def tokens(micro_batch_size, rank, ranks, count, start=0):
        source = iterate_batches(
            train,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
            device=process.device,
            start=start,
        )
        return [row.tolist() for _, batch in zip(range(count), source, strict=False) for row in batch["tokens"]]

    whole = tokens(8, 0, 1, 2)
    first, second = tokens(2, 0, 2, 4), tokens(2, 1, 2, 4)
    assert [*first[0:2], *second[0:2], *first[2:4], *second[2:4]] == whole[:8]
    assert tokens(8, 0, 1, 1, start=8) == whole[8:]


def test_samples_start_over_at_the_end(process, tmp_path):
    (tmp_path / "short.txt").write_text("ten bytes\n" * 500)
    train = splits_of(corpus_of(tmp_path / "short.txt", tmp_path), train_samples=8, validation_samples=0).train
    source = iterate_batches(
        train, micro_batch_size=7, data_parallel_rank=0, data_parallel_size=1, device=process.device
    )
    assert all(next(source)["tokens"].shape == (7, 32) for _ in range(len(train)))


def refused(path, tmp_path, vocab_size=None):
    with pytest.raises(DataError) as raised:
        corpus_of(path, tmp_path, vocab_size)
    return str(raised.value)


def test_missing_file_is_an_error(process, tmp_path):
    path = tmp_path / "none.txt"
    assert refused(path, tmp_path) == (
        f"data.path: no such file, and no .bin/.idx pair of that prefix, got '{path}'. Give a text file or the prefix "
        "of a Megatron data set."
    )


def test_half_a_pair_is_an_error(process, tmp_path):
    (tmp_path / "half.idx").touch()
    assert refused(tmp_path / "half", tmp_path) == (
        f"data.path: {tmp_path}/half.idx is there but {tmp_path}/half.bin is not, got '{tmp_path}/half'. A Megatron "
        "data set is both files."
    )


def test_empty_file_is_an_error(process, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    assert refused(tmp_path / "empty.txt", tmp_path) == (
        f"data.path: the file holds no text, got '{tmp_path}/empty.txt'. Give a text file of some 100 kB or more."
    )


def test_pair_without_vocabulary_is_an_error(process, tmp_path):
    write_pair(tmp_path / "pair", [[1, 2]])
    assert refused(tmp_path / "pair", tmp_path) == (
        f"data.vocab_size: the .bin/.idx pair '{tmp_path}/pair' does not say how many ids its tokenizer has, got None. "
        "Set it to the tokenizer's vocabulary size."
    )


def test_vocabulary_smaller_than_an_id_is_an_error(process, tmp_path):
    write_pair(tmp_path / "pair", [[1, 2], [700, 3]])
    assert refused(tmp_path / "pair", tmp_path, vocab_size=700) == (
        f"data.vocab_size: must be larger than the largest token id 700 in {tmp_path}/pair.bin, got 700. Set it to the "
        "vocabulary size of the tokenizer that made the data."
    )


def test_vocabulary_of_text_is_an_error(process, tmp_path):
    assert refused(None, tmp_path, vocab_size=300) == (
        "data.vocab_size: text is tokenised to bytes and always has 256 ids, got 300. Leave it at None; it belongs to "
        "an existing .bin/.idx pair."
    )


def test_folder_that_cannot_be_written_is_an_error(process, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    assert refused(None, tmp_path) == (
        f"data.cache_dir: cannot write the tokenised text, got '{tmp_path}/cache' (File exists). Choose a folder you "
        "can write to."
    )


def test_text_too_short_for_validation_is_an_error(process, tmp_path):
    (tmp_path / "short.txt").write_text("ten bytes\n" * 300)
    corpus = corpus_of(tmp_path / "short.txt", tmp_path)
    with pytest.raises(DataError) as raised:
        splits_of(corpus)
    assert str(raised.value) == (
        "data.split: the validation part of short.txt must hold more than one sequence of 32 tokens, got 0 tokens with "
        "'90,5,5'. Give more text, another split or shorter sequences, or switch validation off with "
        "train.eval_iters=0."
    )
    assert splits_of(corpus, validation_samples=0).validation is None


@pytest.mark.parametrize("split", ["most of it", "90,10", "0,0,0", "90,-5,15", "nan,1,1"])
def test_malformed_split_is_an_error(process, tmp_path, split):
    with pytest.raises(DataError) as raised:
        splits_of(corpus_of(None, tmp_path), split=split)
    assert str(raised.value) == (
        f"data.split: must be three numbers for training, validation and test, got {split!r}. "
        "Write '90,5,5', for example."
    )
