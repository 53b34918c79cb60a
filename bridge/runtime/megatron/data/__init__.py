"""The data of a run: its corpus, and the batches of a rank.

corpus.py       `open_corpus`: a text, tokenised into a ``.bin``/``.idx`` pair, or an existing pair
pair_path.py    `PairPath`: the path of such a pair, and the damage of its files
batches.py      `build_splits`, `iterate_batches`: Megatron's data sets, and the batches of a rank
"""
