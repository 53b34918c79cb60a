"""`Deciders`: finds the decider of a setting whose value is assumed or open.

"Open" and "decider" have the meaning of `uncertainty.py`. A file states a setting, or leaves it to
a default, to the mode, to the start of the run, or to a source that is not read. An answer that
rests on such a setting names its decider.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.precision.stated_field import COMMAND_LINE
from bridge.preflight.file_reading import FileReading
from bridge.preflight.origins import Origins

MODE_SETTINGS = ("model.bf16", "model.fp16", "optimizer.bf16", "optimizer.fp16")
"""Settings that the mode of a run decides."""
EQUIVALENT_SETTINGS = {
    "model.hybrid_override_pattern": "model.hybrid_layer_pattern",
    "data.vocab_size": "model.vocab_size",
    "data.seq_length": "model.seq_length",
    "ddp.use_custom_fsdp": "ddp.use_megatron_fsdp",
}
"""Setting -> another name of the same setting; if one name is stated, both values are known."""
OVERRIDING_SOURCE = re.compile(r"--[\w-]+-size|DeepSpeed's engine")
"""A source that is not read and decides a setting even if the file states the setting.

A fork may have an option of a size in the place of a setting that the file states too:
`--moe-expert-parallel-size` of Megatron-DeepSpeed next to `--expert-model-parallel-size`. Under
DeepSpeed's engine its JSON decides, whatever the arguments state. The statement then decides nothing.
"""
NO_RELEASE_NAMED = "the file names no release"
"""Decider of an assumed release of Megatron Core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deciders:
    """The deciders of the settings of one run."""

    reading: FileReading
    """The file of the run."""
    origins: Origins | None
    """The sources of each key. None: not known."""
    model: Mapping[str, Any]
    """The values of the model's section."""

    def find(self, path: str) -> str | None:
        """Return the decider of a setting that is assumed or open; None if its value is known."""
        if path == "target.mcore":
            if self.reading.release.is_assumed:
                return NO_RELEASE_NAMED
            return None
        setters = self._get_setters(path)
        is_of_command_line = setters is not None and COMMAND_LINE in setters
        if is_of_command_line or self._is_stated(EQUIVALENT_SETTINGS.get(path, "")):
            return None
        if path in MODE_SETTINGS:
            return self._find_mode_decider()
        return self.find_unread_source(path) or self._find_value_decider(path)

    def is_open(self, path: str) -> bool:
        """Return whether the start of the run, or a source that is not read, decides a setting."""
        uncertainty = self.reading.uncertainty
        return path in uncertainty.unread_sources or path in uncertainty.open_values

    def find_unread_source(self, path: str) -> str | None:
        """Return the source that is not read and may change a setting.

        The source counts if the file does not state the setting, if the run has no plan, or if the
        source decides the setting whatever the file states.
        """
        uncertainty = self.reading.uncertainty
        source = uncertainty.unread_sources.get(path)
        if source is None:
            return None
        is_overriding = OVERRIDING_SOURCE.fullmatch(source) is not None
        if is_overriding or uncertainty.no_plan_reason is not None or not self._is_stated(path):
            return source
        return None

    def _find_value_decider(self, path: str) -> str | None:
        """Return the decider of a value that the file leaves to the start, or does not state."""
        uncertainty = self.reading.uncertainty
        if path in uncertainty.open_values:
            return f"the value {uncertainty.open_values[path]}"
        if path in self.reading.mode_dependent_settings:
            return self._unstated_mode_decider
        if self._is_stated(path):
            return None
        return uncertainty.default_decider

    @property
    def _unstated_mode_decider(self) -> str | None:
        """The decider of the mode if nothing states the mode."""
        uncertainty = self.reading.uncertainty
        if uncertainty.mode_decider is None:
            return None
        return uncertainty.default_decider or uncertainty.mode_decider.rstrip(",")

    def _find_mode_decider(self) -> str | None:
        """Return the decider of a switch of the mode; None if the mode is known."""
        decider = self._unstated_mode_decider
        if decider is not None:
            return decider
        if self.model.get("bf16") is True or self.model.get("fp16") is True:
            return None
        return self.reading.uncertainty.default_decider

    def _get_setters(self, path: str) -> Mapping[str, Any] | None:
        """Return the origins that set a key -> their values; None if nobody set it."""
        if self.origins is None:
            return None
        return self.origins.values.get(path)

    def _is_stated(self, path: str) -> bool:
        """Return whether a file or the command line states a value that is known at once."""
        if self._get_setters(path) is None or path in self.reading.uncertainty.open_values:
            return False
        return not any(derived.path == path for derived in self.reading.derived)
