"""`find_vocab_size`: the vocabularies of published models, for files with a tokenizer and no size.

vocab_size_of("nvidia/Nemotron-H-8B-Base-8K")    # 131072
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from bridge.precision.package_yaml import package_yaml


def find_vocab_size(name: object) -> int | None:
    """Return the size of the vocabulary of a model or a tokenizer; None for an unknown name.

    Args:
        name: A name on Hugging Face ("nvidia/Nemotron-H-8B-Base-8K"), or a path that ends with its
            last part. The longest beginning of the table counts.
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
    """Return beginning of a name, in small letters -> size of the vocabulary."""
    rows = package_yaml(Path(__file__).with_suffix(".yaml"))
    return {str(beginning).lower(): size for beginning, size in rows.items()}
