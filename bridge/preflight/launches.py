"""`Launches`: the runs that one file starts, and which of them a reading is about."""

from __future__ import annotations

from dataclasses import dataclass

MAX_NAMED_RUNS = 3
"""Other runs of a file that an answer names; more are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """The runs of a file, and the number of the run that was read."""

    labels: tuple[str, ...] = ()
    """A label of each run of the file; empty for a file of one run."""
    number: int = 1
    """The number of the run that was read, from 1."""
    branches: tuple[int, ...] = ()
    """Numbers of the runs that are the same launch on other branches of the script."""
    refused_numbers: tuple[int, ...] = ()
    """Numbers of the runs that train nothing on Megatron Core. They are named, not offered."""
    answered_numbers: tuple[int, ...] = ()
    """Numbers of the runs that are answered together with this one."""
    variables: tuple[str, ...] = ()
    """Variables of a launch script that only its environment or its command line sets."""

    @property
    def label(self) -> str:
        """The label of the run that was read, of a file with several runs."""
        return self.labels[self.number - 1]

    @property
    def sentences(self) -> tuple[str, ...]:
        """A sentence that names the unanswered runs of the file; empty if there are none."""
        left_out = {self.number, *self.answered_numbers}
        others = [number for number in range(1, len(self.labels) + 1) if number not in left_out]
        others.sort(key=lambda number: number in self.refused_numbers)
        if not others:
            return ()
        named = []
        for number in others[:MAX_NAMED_RUNS]:
            label = self.labels[number - 1]
            if number in self.refused_numbers:
                named.append(f"run {number} trains nothing on Megatron Core: {label}")
            else:
                named.append(f"--launch {number} is {label}")
        if len(others) > MAX_NAMED_RUNS:
            named.append(f"and {len(others) - MAX_NAMED_RUNS} more")
        sentence = (
            f"The file has {len(self.labels)} runs; this is run {self.number}, {self.label} "
            f"({'; '.join(named)})."
        )
        return (sentence,)
