"""`infer_release`: the release of Megatron Core that a file is for, by the fields in it.

A field that came with a release shows that the file is for this release or a later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.preflight.megatron_release import (
    INSTALLED_FOR_OPEN_FILE,
    MegatronRelease,
    make_installed_release,
)
from bridge.target.fields import OWNER_FIELDS, list_known_releases
from bridge.target.versions import Version, get_installed_version

EVERY_FIELD_REASON = "the file has every field of Megatron, and none that came later"
NO_NEWER_FIELD_REASON = "every known release has the fields of the file"


def infer_release(
    sections: Mapping[str, Mapping[str, Any]], *, is_complete: bool
) -> MegatronRelease:
    """Return the release of Megatron Core that a file is assumed to be for.

    A complete file has every field of its release, so its newest field shows the release. A file
    that somebody wrote has a few fields. They show only the earliest release, and the installed one
    is assumed unless it is earlier.

    Args:
        sections: model, optimizer and ddp as the file has them.
        is_complete: Whether a framework saved every field of its release.
    """
    releases = list_known_releases()
    newest_index = 0
    newest_field = ""
    for owner_name, fields in sections.items():
        for name in fields:
            index = _find_first_release_index(owner_name, name, releases)
            if index > newest_index:
                newest_index = index
                newest_field = f"{owner_name}.{name}"
    installed = get_installed_version("mcore")
    if not is_complete and (installed is None or installed >= releases[newest_index]):
        return make_installed_release(installed, INSTALLED_FOR_OPEN_FILE)
    if not newest_field:
        reason = EVERY_FIELD_REASON if is_complete else NO_NEWER_FIELD_REASON
        return MegatronRelease(version=releases[0], reason=reason)
    previous = releases[newest_index - 1]
    reason = f"{newest_field} stands in the file, and {previous} does not have it"
    return MegatronRelease(version=releases[newest_index], reason=reason)


def _find_first_release_index(owner_name: str, name: str, releases: Sequence[Version]) -> int:
    """Return the index of the first release that has a field; 0 for an unknown field."""
    row = OWNER_FIELDS.get(owner_name, {}).get(name)
    if row is None or row.has is None:
        return 0
    for index, release in enumerate(releases):
        if row.has.holds(release):
            return index
    return 0
