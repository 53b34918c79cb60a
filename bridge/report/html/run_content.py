"""`RunContent`: the content of a report on one run, for the page, Markdown and JSON.

`content.py` makes it from a run folder of ours, and `log_content.py` from another trainer's log.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge.report.answer import Answer

Row = Mapping[str, Any]
"""One row of a table: column -> plain value."""


@dataclass(frozen=True, kw_only=True)
class RunContent:
    """The content of a report on one run. The fields are the keys of the JSON, in this order."""

    name: str
    """The precision of the run, or another name by which the reader knows the run."""
    folder: str
    """The folder or the log of the run."""
    source: str | None = None
    """The kind of log, such as "a log of Megatron-LM"; None: a run of ours."""
    figures: Mapping[str, Any]
    """Name of a metric, such as train_loss -> its value. None: not known."""
    compared: Answer | None = None
    """The result of the comparison with the other runs of the report."""
    base: Row | None = None
    """The plain recipe of the run's mode, and the fields in which the run's recipe differs."""
    plan: Sequence[Row] = ()
    """The planned formats of each group of equal layers."""
    ran: str = ""
    """The formats of the recorded GEMMs, as text."""
    recorded_gemms: int = 0
    """The number of recorded GEMMs."""
    backend: str = ""
    """The backend that ran the recorded GEMMs."""
    mismatches: Sequence[str] = ()
    """A sentence for each difference between the record and the plan."""
    sync: Sequence[Row] = ()
    """The rows of the sync that changed or kept a value."""
    findings: Sequence[Row] = ()
    """The findings of check and sync."""
    silenced: Sequence[Row] = ()
    """The silenced findings and early warnings."""
    warnings: Mapping[str, str]
    """Name of an early warning -> its sentence."""
    train: Sequence[Row]
    """The metrics of each training step that was recorded."""
    validation: Sequence[Row]
    """The metrics of each validation."""
    heat: Sequence[Row] = ()
    """The last quantisation error of each operand, layer and module."""
    memory: Sequence[Row]
    """The recorded and the predicted bytes of each kind of tensor."""
    environment: Mapping[str, Any]
    """Name of a part of the environment -> its release or text."""
    commands: Sequence[str]
    """The commands that started the run and that make its report."""
    verdict: Sequence[Answer]
    """The summary of the report."""
