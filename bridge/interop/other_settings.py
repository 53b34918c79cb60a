"""Settings of other systems that bear on precision and have no field: rows of a JSON file next to their reader."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["OtherSetting", "other_settings"]


@dataclass(frozen=True, kw_only=True)
class OtherSetting:
    """A setting that is reported where it is written with another value than its default."""

    option: str
    """The flag, or the dotted path in a configuration."""
    detail: str
    remedy: str
    default: object = False
    """Without effect at this value."""
    reason: str = "unsupported"
    is_file: bool = False
    """It names a file that is not read, whatever its name will be."""


def other_settings(path: Path, remedy: str) -> dict[str, OtherSetting]:
    """Return the rows of a file by their options; `remedy` is that of rows without one."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {option: OtherSetting(**{"option": option, "remedy": remedy, **row}) for option, row in rows.items()}
