"""`Answer`: one sentence of a report, with the state that its mark and colour show."""

from dataclasses import dataclass
from typing import Literal

State = Literal["good", "bad", "unknown"]
"""Whether an answer is good news, a problem, or only a note."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One sentence of a report about a run."""

    state: State
    sentence: str
