"""`ConvertedRun`: a run of a file, and the same run for another system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.convert.conversion import collect_losses, format_records, to_plain_data
from bridge.precision.mode import get_mode
from bridge.registry.mixed_precision_config import find_config_faults

if TYPE_CHECKING:
    from bridge.convert.conversion import ImportedRun
    from bridge.read.foreign.reports import ExportReport, Unmapped


@dataclass(frozen=True, kw_only=True)
class ConvertedRun:
    """A run of a file, as it was read and as it was written."""

    run: ImportedRun
    """The run as it was read."""
    exported: ExportReport | None
    """The run for the other system. None: it was only read, or the result is the recipe."""

    def losses(self) -> list[Unmapped]:
        """Return the records about settings whose precision is lost."""
        return collect_losses(self.run, self.exported)

    def to_dict(self) -> dict[str, Any]:
        """Return both as plain data. The mode and the payload are null if no mode is stated."""
        imported = self.run.imported
        config = to_plain_data(imported.config.to_dict())
        mode, payload = None, None
        faults: list[str] = []
        if imported.mode_is_stated:
            mode = get_mode(imported.config)
            payload = config
            faults = list(map(str, find_config_faults(imported.config)))
        files: dict[str, str] = {}
        records = format_records(imported.unmapped, "import")
        if self.exported is not None:
            payload = to_plain_data(self.exported.payload)
            files = dict(self.exported.files)
            records = records + format_records(self.exported.unmapped, "export")
        lost_fields = dict.fromkeys(record.field for record in self.losses())
        return {
            "source": self.run.source,
            "mode": mode,
            "decided_by": imported.decided_by,
            "semantics": imported.semantics,
            "config": config,
            "payload": payload,
            "files": files,
            "losses": records,
            "lost": list(lost_fields),
            "faults": faults,
        }
