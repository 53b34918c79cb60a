"""`Answer`: a sentence of a report, with a state that decides its mark and colour."""

from dataclasses import dataclass
from typing import Literal

State = Literal["good", "bad", "unknown"]
"""Whether an answer is good news, a problem, or only a note."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A sentence of a report about a run."""

    state: State
    sentence: str
