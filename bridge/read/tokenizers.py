"""The vocabularies of published models, for runs whose file names a tokenizer and no size."""

from __future__ import annotations

import functools
import re
from pathlib import Path


def vocab_size_of(name: object) -> int | None:
    """Return the size of the vocabulary that a model's or a tokenizer's name stands for, None for an unknown name.

    Args:
        name: A name on Hugging Face ("nvidia/Nemotron-H-8B-Base-8K"), or a path that ends with its
            last part.
    """
    if not isinstance(name, str):
        return None
    last = re.split(r"[/\\]", name.rstrip("/\\"))[-1].lower()
    known = [
        (beginning, size) for beginning, size in _sizes().items() if last.startswith(beginning)
    ]
    return max(known, key=lambda row: len(row[0]))[1] if known else None


@functools.cache
def _sizes() -> dict[str, int]:
    """Return beginning of a name, in small letters -> size of the vocabulary."""
    import yaml  # most runs state their vocabulary

    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    return {str(name).lower(): size for name, size in yaml.safe_load(text).items()}
