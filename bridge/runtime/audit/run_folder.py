"""`RunFolder`: the files of a run, read as data while it goes on or after its end."""

from __future__ import annotations

import csv
import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bridge.errors import RunConfigError
from bridge.precision import strict_yaml
from bridge.runtime.audit import quantisation
from bridge.runtime.audit.record import RECORD_FILE as RECORD
from bridge.runtime.audit.record import Record

CONFIG_FILE = "config.yaml"
"""The config of the run, the file by which its folder is known."""
SUMMARY_FILE = "summary.json"
METRICS_FILE = "metrics.jsonl"
SYNC, FINDINGS = "sync.json", "findings.json"
RUN_FILES = (
    CONFIG_FILE,
    SUMMARY_FILE,
    METRICS_FILE,
    SYNC,
    FINDINGS,
    RECORD,
    quantisation.QUANTISATION_FILE,
)
"""Files that the training command writes and that are read here."""
DAMAGED_FILE_REMEDY = "Run it again, or delete the file."
"""What is to be done about a damaged file."""
MAX_JSON_BYTES = 64 * 2**20
"""The metrics of a million steps are smaller."""


@dataclass(frozen=True)
class RunFolder:
    """A folder that the training command wrote.

    A file that the run has not written is None or empty.
    """

    path: Path

    @classmethod
    def from_path(cls, path: Path) -> RunFolder:
        """Return the folder of a run."""
        if not cls.is_run(path):
            rule = f"must be the folder of a run, which has a {CONFIG_FILE}"
            raise RunConfigError.of("RUN", rule, str(path), "The run prints its folder at the end.")
        return cls(path)

    @staticmethod
    def is_run(path: Path) -> bool:
        """Return whether a run has written its config into a folder."""
        return (path / CONFIG_FILE).is_file()

    @cached_property
    def config(self) -> dict[str, Any]:
        """The run as it was, every field, after the precision was written into it."""
        name = str(self.path / CONFIG_FILE)
        content = strict_yaml.read_bytes(name, error=RunConfigError)
        text = strict_yaml.decode_text(content, name, error=RunConfigError)
        documents = strict_yaml.load_documents(text, name, error=RunConfigError)
        if documents and isinstance(documents[0], dict):
            return documents[0]
        return {}

    @cached_property
    def sync(self) -> dict[str, Any]:
        """The report of the sync: `rows` and `findings`."""
        return self.read_json(SYNC)

    @cached_property
    def findings(self) -> dict[str, Any]:
        """The result of the check before the run."""
        return self.read_json(FINDINGS)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The figures at the end; None of a run that has not come to its end."""
        return self.read_json(SUMMARY_FILE) or None

    @property
    def stopped(self) -> str | None:
        """How a scheduler or Ctrl-C ended a run before its last step; None for any other."""
        summary = self.summary or {}
        number = summary.get("stop_signal")
        if number is None:
            return None
        step, steps = summary["iteration"], self.config.get("train", {}).get("train_iters")
        return f"stopped by {signal.Signals(number).name} after step {step} of {steps}"

    @property
    def record(self) -> Record | None:
        """What ran; None before the first step."""
        path = self.path / RECORD
        if not path.is_file():
            return None
        return Record.read(path)

    @property
    def quantisation(self) -> list[quantisation.QuantisationRow]:
        """The errors of the quantisers so far; none where nothing was measured."""
        path = self.path / quantisation.QUANTISATION_FILE
        if not path.is_file():
            return []
        try:
            return quantisation.parse_rows(self.text_of(path))
        except (ValueError, TypeError, KeyError, csv.Error) as error:
            rule = f"must be a table as the training command writes it ({error})"
            raise RunConfigError.of(str(path), rule, path.name, DAMAGED_FILE_REMEDY) from None

    def has_ended(self) -> bool:
        """Return whether the run has come to its end by now."""
        return (self.path / SUMMARY_FILE).is_file()

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of a kind ("train", "validation") so far.

        A line that is being written is left out.
        """
        of_kind = []
        for values in self.records():
            if values["kind"] == kind:
                of_kind.append(values)
        return of_kind

    def records(self, torn: Callable[[int], None] = lambda _line: None) -> list[dict[str, Any]]:
        """Return all records of steps and validations so far.

        `torn` gets the number of a line that is no record.
        """
        path = self.path / METRICS_FILE
        if not path.is_file():
            return []
        records = []
        for number, line in enumerate(self.text_of(path).splitlines(), start=1):
            try:
                values = json.loads(line)
                step, kind, loss = int(values["step"]), str(values["kind"]), values["loss"]
                records.append({**values, "step": step, "kind": kind, "loss": loss})
            except (ValueError, TypeError, KeyError, RecursionError):
                torn(number)
        return records

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the mapping in a JSON file of the folder, empty where there is none."""
        path = self.path / name
        if not path.is_file():
            return {}
        try:
            content = json.loads(self.text_of(path))
        except (ValueError, RecursionError) as error:
            rule = f"must be JSON as the training command writes it ({error})"
            raise RunConfigError.of(str(path), rule, name, DAMAGED_FILE_REMEDY) from None
        if not isinstance(content, dict):
            return {}
        return content

    def text_of(self, path: Path) -> str:
        """Return the text of a file of the folder."""
        content = strict_yaml.read_bytes(path, error=RunConfigError, limit=MAX_JSON_BYTES)
        return content.decode(errors="replace")
