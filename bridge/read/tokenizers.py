"""`find_vocab_size`: the size of a published model's vocabulary.

    find_vocab_size("nvidia/Nemotron-H-8B-Base-8K")    # 131072

It is used for a run that names a tokenizer and does not state the size of its vocabulary.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from bridge.precision.package_yaml import load_package_yaml


def find_vocab_size(name: object) -> int | None:
    """Return the size of the vocabulary of a model or a tokenizer; None for an unknown name.

    The table has beginnings of names. The longest one that fits counts.

    Args:
        name: A name on Hugging Face, or a path that ends with the last part of such a name.
    """
    if not isinstance(name, str):
        return None
    last_part = re.split(r"[/\\]", name.rstrip("/\\"))[-1].lower()
    longest = ""
    size = None
    for beginning, vocab_size in _load_vocab_sizes().items():
        if last_part.startswith(beginning) and len(beginning) > len(longest):
            longest = beginning
            size = vocab_size
    return size


@functools.cache
def _load_vocab_sizes() -> dict[str, int]:
    """Return beginning of a name, in lower case -> size of the vocabulary."""
    rows = load_package_yaml(Path(__file__).with_suffix(".yaml"))
    return {str(beginning).lower(): size for beginning, size in rows.items()}
