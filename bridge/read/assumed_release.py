"""`infer_release`: the release of Megatron Core that a file is assumed to be of, by the fields in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bridge.preflight.file_reading import INSTALLED_FOR_OPEN_FILE, get_installed_reason
from bridge.target.fields import OWNER_FIELDS, list_known_releases
from bridge.target.versions import Version, get_installed_version

EVERY_FIELD_REASON = "the file has every field of Megatron, and none that came later"


class AssumedRelease(NamedTuple):
    """A release, and why it is assumed."""

    release: Version | None
    """None: none is installed, and the file does not tell."""
    reason: str
    """A clause."""


def infer_release(
    sections: Mapping[str, Mapping[str, Any]], *, is_complete: bool
) -> AssumedRelease:
    """Return the release that a file's fields of Megatron point to.

    Args:
        sections: model, optimizer and ddp as the file has them.
        is_complete: Whether the framework saved every field of its release. A file that somebody wrote
            has a few fields, and tells only from which release on it can be. It is then of the
            installed release, where that is not an earlier one.
    """
    releases = list_known_releases()
    newest = 0
    newest_field = ""
    for owner_name, fields in sections.items():
        for name in fields:
            first = _find_first_release_index(owner_name, name, releases)
            if first > newest:
                newest = first
                newest_field = f"{owner_name}.{name}"
    here = get_installed_version("mcore")
    if not is_complete and (here is None or here >= releases[newest]):
        return AssumedRelease(here, get_installed_reason(INSTALLED_FOR_OPEN_FILE))
    if not newest_field:
        return AssumedRelease(releases[0], EVERY_FIELD_REASON)
    before = releases[newest - 1]
    reason = f"{newest_field} stands in the file, and {before} does not have it"
    return AssumedRelease(releases[newest], reason)


def _find_first_release_index(owner_name: str, name: str, releases: Sequence[Version]) -> int:
    """Return the place of the first release that has a field; 0 for an unknown field."""
    row = OWNER_FIELDS.get(owner_name, {}).get(name)
    if row is None or row.has is None:
        return 0
    for index, release in enumerate(releases):
        if row.has.holds(release):
            return index
    return 0
