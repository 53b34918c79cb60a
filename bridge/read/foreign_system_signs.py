"""`list_candidates`: the foreign systems that a document may be written for, by the signs in it.

    list_candidates(Document.load("ds_config.json"))
    # [Candidate(system="deepspeed", title="DeepSpeed", certainty=0.95,
    #            evidence="has `fp16` as a block together with `zero_optimization`")]

The signs are the rows of `recognised` in the table of a system. Systems that run Megatron Core have
further signs, in the function `recognise` of their module. `bridge.convert.systems` reads and
writes their precisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from bridge.read.foreign.table import load_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from bridge.read.foreign.document_signs import Recognition
    from bridge.read.text.document import Document

DOCUMENT_KINDS = MappingProxyType(
    {
        "megatron-lm": ("shell", "yaml", "json", "text", "env"),
        "megatron-bridge": ("yaml", "json", "python"),
        "nemo1": ("yaml",),
        "nemo2": ("python", "yaml", "json"),
        "axolotl": ("yaml",),
        "huggingface": ("json", "yaml"),
        "deepspeed": ("json",),
    }
)
"""Name of a system -> the kinds of document that it has. Only these are searched for its signs."""
SYSTEM_TITLES = {
    "megatron-lm": "Megatron-LM",
    "megatron-bridge": "Megatron Bridge",
    "nemo2": "NeMo 2.x",
    "huggingface": "Hugging Face TrainingArguments",
}
"""Name of a system -> its `System.title`, if this differs from the title of its table."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One system that a document may be written for."""

    system: str
    """Its name, as in `--from NAME`."""
    title: str
    certainty: float
    """0 to 1."""
    evidence: str
    """The sign, as a clause after "it"."""


def list_candidates(document: Document) -> list[Candidate]:
    """Return every system whose signs a document has, the most certain first."""
    candidates: list[Candidate] = []
    for name, kinds in DOCUMENT_KINDS.items():
        if document.kind not in kinds:
            continue
        recognised = _get_recogniser(name)(document)
        if recognised is None:
            continue
        candidate = Candidate(
            system=name,
            title=SYSTEM_TITLES.get(name) or load_table(name).title,
            certainty=recognised.certainty,
            evidence=recognised.evidence,
        )
        candidates.append(candidate)
    return sorted(candidates, key=lambda candidate: -candidate.certainty)


def _get_recogniser(name: str) -> Callable[[Document], Recognition | None]:
    """Return the function that searches a document for the signs of a system.

    The module of a system is imported only here, since it takes longer than most files to read.
    """
    if name == "megatron-lm":
        from bridge.read.megatron_lm import recognition

        return recognition.recognise
    if name == "megatron-bridge":
        from bridge.read.megatron_bridge import importer

        return importer.recognise
    if name == "nemo1":
        from bridge.read.nemo import nemo1

        return nemo1.recognise
    if name == "nemo2":
        from bridge.read.nemo import nemo2

        return nemo2.recognise
    return load_table(name).recognise
