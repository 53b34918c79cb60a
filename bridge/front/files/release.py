"""`release_of`: the release of Megatron Core that a file is of, by the fields that stand in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.rules.fields import FIELDS, known_releases
from bridge.rules.versions import installed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bridge.rules.versions import Version


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """A release of Megatron Core, and why it is assumed."""

    version: Version | None
    because: str
    """A clause: "model.moe_latent_size stands in the file, and 0.17.1 does not have it"."""


def release_of(sections: Mapping[str, Mapping[str, Any]], *, is_whole: bool) -> Release:
    """Return the release that a file's fields of Megatron point to.

    Args:
        sections: model, optimizer and ddp as the file has them.
        is_whole: The framework saved every field of its release. A file that somebody wrote has a few of them, and says
            only from which release on it can be: it is then of the installed release, where that is a later one.
    """
    releases = known_releases()
    newest, field = 0, ""
    for role, fields in sections.items():
        for name in fields:
            row = FIELDS.get(role, {}).get(name)
            if row is None or row.has is None:
                continue
            first = next((place for place, release in enumerate(releases) if row.has.holds(release)), 0)
            if first > newest:
                newest, field = first, f"{role}.{name}"
    here = installed("mcore")
    if not is_whole and (here is None or here >= releases[newest]):
        return Release(version=here, because="installed here, as the file leaves it open")
    if newest:
        before = releases[newest - 1]
        return Release(version=releases[newest], because=f"{field} stands in the file, and {before} does not have it")
    return Release(version=releases[0], because="the file has every field of Megatron, and none that came later")
