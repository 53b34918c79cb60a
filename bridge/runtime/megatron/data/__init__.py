"""The data of a run: its corpus, and the batches of a rank.

    corpus.py       `open_corpus`: a text, tokenised into a ``.bin``/``.idx`` pair, or such a pair
    pair_path.py    `PairPath`: the path of a pair, and the damage of its files
    batches.py      `build_splits`, `iterate_batches`: Megatron's data sets, and the batches of a rank

Every rank opens the same corpus. The first rank writes the files of the cache.
"""
