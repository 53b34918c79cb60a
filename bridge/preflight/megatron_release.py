"""`MegatronRelease`: the release of Megatron Core that a run has, and the reason for it.

    MegatronRelease(version=parse_version("0.19.2"), reason=INSTALLED_HERE)

A file may state the release, or show it by its fields. If it does neither, the target decides,
and without a target the installed release.
"""

from __future__ import annotations

from dataclasses import dataclass

from bridge.target.fields import list_known_releases
from bridge.target.target import Target
from bridge.target.versions import Version, find_newer_megatron, parse_version

NEWEST_ASSUMED = "assumed: no release is read from the file, and this is the newest known one"
"""Reason of a release that is assumed."""
STATED_BY_TARGET = "stated by the target"
"""Reason of a release that the target states."""
OF_THIS_MACHINE = "of this machine, which is the target"
"""Reason of the installed release if the target is this machine."""
INSTALLED_HERE = "installed here"
"""Reason of the installed release if no target states one and no newer one is at hand."""
INSTALLED_FOR_OPEN_FILE = "installed here, as the file leaves it open"
"""Reason of the installed release for a file whose fields several releases have."""
NEWER_AT_HAND = (
    "assumed: it is installed here, and no target states one; "
    "{newer} is at hand: --target mcore{newer}"
)
"""Reason of the installed release if the release `newer` is at hand."""
NEWEST_LOCAL = "the newest at hand, as no target states one"
"""Reason of the release that a rehearsal imports."""
NONE_INSTALLED = "none is installed here, and no target states one"
"""Reason of an unknown release."""
NONE_INSTALLED_NEWER_LOCAL = NONE_INSTALLED + "; {newer} is at hand: --target mcore{newer}"
"""Reason of an unknown release if the release `newer` is at hand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronRelease:
    """A release of Megatron Core, and the reason why the run has it."""

    version: Version | None = None
    """The release. None: it is not known."""
    reason: str = ""
    """Why this release is taken, or why none is known."""
    is_assumed: bool = False
    """Whether the release is not known, and the newest known release is taken."""
    is_installed: bool = False
    """Whether it is the installed release because no target and no file states another."""

    @property
    def sentence(self) -> str:
        """The release and its reason, as a sentence of an answer."""
        if self.version is None:
            reason = self.reason or "the target states none"
            return f"No release of megatron-core is known: {reason}."
        return f"megatron-core {self.version} ({self.reason})."

    def or_of_target(self, target: Target, *, is_stated: bool) -> MegatronRelease:
        """Return this release if the file states one, and else the release of the target.

        Args:
            target: The target of the run, with the installed releases if it states none.
            is_stated: Whether the run states its target.
        """
        if self.version is not None:
            return self
        if target.mcore is None:
            if is_stated:
                return self
            return MegatronRelease(reason=get_installed_reason(NONE_INSTALLED))
        if target.is_detected:
            return MegatronRelease(version=target.mcore, reason=OF_THIS_MACHINE)
        if is_stated:
            return MegatronRelease(version=target.mcore, reason=STATED_BY_TARGET)
        return make_installed_release(target.mcore, INSTALLED_HERE)

    def or_rehearsed(self, version: str) -> MegatronRelease:
        """Return this release if a target or the file states it, and else the rehearsed one.

        Args:
            version: The release that a rehearsal imported.
        """
        if not self.is_installed:
            return self
        return MegatronRelease(
            version=parse_version(version), reason=NEWEST_LOCAL, is_installed=True
        )


def assume_newest_release() -> MegatronRelease:
    """Return the newest known release, for a file that shows no release."""
    return MegatronRelease(
        version=list_known_releases()[-1], reason=NEWEST_ASSUMED, is_assumed=True
    )


def make_installed_release(version: Version | None, reason: str) -> MegatronRelease:
    """Return the installed release.

    Args:
        version: The installed release. None: none is installed.
        reason: The reason if no newer release is at hand.
    """
    return MegatronRelease(version=version, reason=get_installed_reason(reason), is_installed=True)


def get_installed_reason(reason: str) -> str:
    """Return why the installed release is taken.

    Args:
        reason: The reason if no newer release is at hand.

    Returns:
        `reason`, or a sentence that names the newer release at hand.
    """
    newer = find_newer_megatron()
    if newer is None:
        return reason
    if reason == NONE_INSTALLED:
        return NONE_INSTALLED_NEWER_LOCAL.format(newer=newer)
    return NEWER_AT_HAND.format(newer=newer)
