"""`Job` and `JobAnswer`: the JSON that `rehearse` and its worker process exchange.

`rehearse` writes a `Job` to a file. The worker writes a `JobAnswer` next to it. The ranks that the
worker forks write a `RankOutcome` each.
"""

from typing import Any, TypedDict

Sections = dict[str, Any]
"""Section or top-level key of a run -> its fields or its value."""


class Job(TypedDict):
    """The work of a worker process."""

    sections: Sections
    """The sections of the small run, with mixed_precision, target and precision_backend."""
    launches: list[dict[str, Any]]
    """The fields of the `LaunchLayout` of each launch."""
    steps: int
    """Steps before the checkpoint."""
    variables: dict[str, str]
    """Environment variables of the run about Transformer Engine."""
    saves_without_state: bool
    """Whether the target saves grouped experts that have no extra state (rule PB436)."""


class LeftOutSetting(TypedDict):
    """A setting of the run that the rehearsal does not have."""

    path: str
    value: Any
    rule: str
    """The reason."""


class StepRecord(TypedDict):
    """The record of an audited step."""

    step: int | None
    gemms: list[dict[str, Any]]
    """The fields of each `GemmRow`."""
    census: list[dict[str, Any]]
    """The fields of each `CensusRow`."""


class RankError(TypedDict, total=False):
    """The error that ended a rank: `findings`, or the four keys of another error."""

    at: float
    """Time of the error, in seconds since the epoch."""
    findings: list[dict[str, Any]]
    """The fields of each `Finding` of an error of this project."""
    type: str
    """Name of the exception class."""
    message: str
    location: str
    """File and line in Megatron Core or Transformer Engine, or empty."""
    fields: list[str]
    """section.field of each setting in the condition that raised the error."""


class RankOutcome(TypedDict, total=False):
    """The outcome of a rank of a launch. A key is absent if the rank ended before its phase."""

    phase: str
    """The phase that the rank was in at its end."""
    error: RankError
    ended: str
    """The exit code of a rank that wrote no outcome."""
    loss: float | None
    resumed_loss: float | None
    parameters: int
    records: list[StepRecord]
    """The records of the first rank: the first and the last audited step."""


class LaunchOutcome(TypedDict):
    """The outcome of a launch."""

    layout: dict[str, Any]
    """The fields of its `LaunchLayout`."""
    seconds: float
    ranks: list[RankOutcome]


class JobAnswer(TypedDict):
    """The answer of a worker process."""

    left_out: list[LeftOutSetting]
    launches: list[LaunchOutcome]
    versions: dict[str, str | None]
    """Product -> the release that ran; None if it did not run."""


class Refusal(TypedDict):
    """The answer of a worker process that could not launch anything."""

    refused: str
    """The message of the error."""
