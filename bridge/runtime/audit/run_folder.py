"""`RunFolder`: the files of a run as data, for readers during the run or after its end."""

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
from bridge.runtime.audit.record import RECORD_FILE, Record

CONFIG_FILE = "config.yaml"
"""The config of the run. A folder with this file is the folder of a run."""
SUMMARY_FILE = "summary.json"
"""Metrics at the end of the run."""
METRICS_FILE = "metrics.jsonl"
"""A record per logged step and validation."""
SYNC_FILE = "sync.json"
"""Report of the sync."""
FINDINGS_FILE = "findings.json"
"""Result of the check before the run."""
RUN_FILES = (
    CONFIG_FILE,
    SUMMARY_FILE,
    METRICS_FILE,
    SYNC_FILE,
    FINDINGS_FILE,
    RECORD_FILE,
    quantisation.QUANTISATION_FILE,
)
"""Files that the training command writes and that are read here."""
DAMAGED_FILE_REMEDY = "Run it again, or delete the file."
"""Remedy for a damaged file."""
MAX_JSON_BYTES = 64 * 2**20
"""Bytes of the largest file that is read; the metrics of a million steps are smaller."""


@dataclass(frozen=True)
class RunFolder:
    """A folder that the training command wrote.

    A property is None or empty if the run has not written its file.
    """

    path: Path

    @classmethod
    def from_path(cls, path: Path) -> RunFolder:
        """Return the folder of a run.

        Raises:
            RunConfigError: The path is not the folder of a run.
        """
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
        """Section -> field -> value of the run, after the precision was written into it."""
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
        return self.read_json(SYNC_FILE)

    @cached_property
    def findings(self) -> dict[str, Any]:
        """The result of the check before the run."""
        return self.read_json(FINDINGS_FILE)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The metrics at the end. None: the run has not come to its end."""
        return self.read_json(SUMMARY_FILE) or None

    @property
    def stopped(self) -> str | None:
        """A clause about the signal that ended the run before its last step. None: no signal."""
        summary = self.summary or {}
        number = summary.get("stop_signal")
        if number is None:
            return None
        steps = self.config.get("train", {}).get("train_iters")
        name = signal.Signals(number).name
        return f"stopped by {name} after step {summary['iteration']} of {steps}"

    @property
    def record(self) -> Record | None:
        """The record of the last audited step. None: no step was audited yet."""
        path = self.path / RECORD_FILE
        if not path.is_file():
            return None
        return Record.read(path)

    @property
    def quantisation(self) -> list[quantisation.QuantisationRow]:
        """The errors of the quantisers so far; empty if nothing was measured."""
        path = self.path / quantisation.QUANTISATION_FILE
        if not path.is_file():
            return []
        try:
            return quantisation.parse_rows(self.read_text(path))
        except (ValueError, TypeError, KeyError, csv.Error) as error:
            rule = f"must be a table as the training command writes it ({error})"
            raise RunConfigError.of(str(path), rule, path.name, DAMAGED_FILE_REMEDY) from None

    def has_ended(self) -> bool:
        """Return whether the run has come to its end by now."""
        return (self.path / SUMMARY_FILE).is_file()

    def read_metrics(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of a kind, "train" or "validation", so far."""
        chosen = []
        for record in self.read_records():
            if record["kind"] == kind:
                chosen.append(record)
        return chosen

    def read_records(
        self, on_torn_line: Callable[[int], None] = lambda _number: None
    ) -> list[dict[str, Any]]:
        """Return all records of steps and validations so far, in the order of the file.

        Args:
            on_torn_line: Called with the number of each line, from 1, that is not a record. The run
                may be writing the last line now. Other such lines are from a run that was killed.
        """
        path = self.path / METRICS_FILE
        if not path.is_file():
            return []
        records = []
        for number, line in enumerate(self.read_text(path).splitlines(), start=1):
            try:
                values = json.loads(line)
                step, kind, loss = int(values["step"]), str(values["kind"]), values["loss"]
                records.append({**values, "step": step, "kind": kind, "loss": loss})
            except (ValueError, TypeError, KeyError, RecursionError):
                on_torn_line(number)
        return records

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the mapping in a JSON file of the folder, empty without the file.

        Raises:
            RunConfigError: The file is damaged.
        """
        path = self.path / name
        if not path.is_file():
            return {}
        try:
            content = json.loads(self.read_text(path))
        except (ValueError, RecursionError) as error:
            rule = f"must be JSON as the training command writes it ({error})"
            raise RunConfigError.of(str(path), rule, name, DAMAGED_FILE_REMEDY) from None
        if not isinstance(content, dict):
            return {}
        return content

    def read_text(self, path: Path) -> str:
        """Return the text of a file of the folder. Bytes that are not UTF-8 are replaced.

        Raises:
            RunConfigError: The file cannot be read, or is larger than `MAX_JSON_BYTES`.
        """
        content = strict_yaml.read_bytes(path, error=RunConfigError, limit=MAX_JSON_BYTES)
        return content.decode(errors="replace")
