"""Versions that a rule depends on, and the answer "unknown" where the version is not known well enough."""

import functools
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from bridge.errors import RunConfigError

__all__ = [
    "Version",
    "VersionRange",
    "at_least",
    "dotted",
    "installed",
    "installed_text",
    "newer_megatron",
    "parse_version",
    "unpacked_megatron",
]

DISTRIBUTIONS = {
    "mcore": ("megatron-core",),
    "te": ("transformer-engine",),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
}
"""Product -> names that its installed distribution can have."""
TITLES = {
    "mcore": "megatron-core",
    "te": "Transformer Engine",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "torch": "torch",
}
UNPACKED = "megatron-next"
"""Folder of the environment that ``make setup`` fills with a newer Megatron Core; it is on no path."""
_COMPLETE = "sitecustomize.py"
"""The file that is written into it last."""
_WORDS = {">=": "from", "<": "before", "!=": "not"}


def parse_version(text: str) -> Version:
    """Return the leading numbers of a version ("2.8.0.dev0" -> 2.8.0); RunConfigError where there are none."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    if found is None:
        raise RunConfigError.of(
            "version", "must begin with a number", text, "Write 2.8, for example."
        )
    return Version(found[1])


def dotted(numbers: Iterable[int]) -> str:
    """Return ``8.9`` of (8, 9), a compute capability."""
    return ".".join(map(str, numbers))


def _is_in(version: Version | None, versions: SpecifierSet) -> bool | None:
    """Return whether `version` is one of `versions`; None where it is unknown, or not known well enough.

    0.17 may be 0.17.0 or 0.17.1: the first and the last version that it stands for have to agree.
    """
    if version is None:
        return None
    last = version if len(version.release) > 2 else Version(f"{version}.9999")
    first, final = versions.contains(version), versions.contains(last)
    return first if first == final else None


_from = functools.cache(lambda least: SpecifierSet(f">={least}"))


def at_least(version: Version | None, least: str) -> bool | None:
    """Return whether `version` is `least` or later; None where it is unknown, or not known well enough."""
    return _is_in(version, _from(least))


@functools.cache
def installed(product: str) -> Version | None:
    """Return the version of a product, None without one. Nothing is imported for that."""
    with suppress(RunConfigError):
        text = installed_text(product)
        return parse_version(text) if text is not None else None
    return None


@functools.cache
def installed_text(product: str) -> str | None:
    """Return the version as the product writes it ("0.20.0rc0"); of Megatron Core also that of a source tree."""
    if product == "mcore":
        for folder in sys.path:
            file = Path(folder, "megatron", "core", "package_info.py")
            if file.is_file():
                text = file.read_text(encoding="utf-8")
                numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE)
                return ".".join(numbers) + "".join(
                    re.findall(r"^PRE_RELEASE = ['\"](.*)['\"]", text, re.MULTILINE)
                )
    for name in DISTRIBUTIONS[product]:
        with suppress(PackageNotFoundError):
            return installed_version(name)
    return None


def unpacked_megatron(prefix: Path | None = None) -> Version | None:
    """Return the version of the Megatron Core in an environment's folder, None where it is not there as a whole."""
    folder = (Path(sys.prefix) if prefix is None else prefix) / UNPACKED
    package = folder / "megatron" / "core" / "package_info.py"
    if not (folder / _COMPLETE).is_file() or not package.is_file():
        return None
    numbers = re.findall(
        r"^(?:MAJOR|MINOR|PATCH) = (\d+)", package.read_text(encoding="utf-8"), re.MULTILINE
    )
    with suppress(RunConfigError):
        return parse_version(".".join(numbers))
    return None


def newer_megatron(prefix: Path | None = None) -> Version | None:
    """Return the unpacked Megatron Core where it is newer than the installed one, or none is installed; else None."""
    own, other = installed("mcore"), unpacked_megatron(prefix)
    if other is None or (own is not None and other <= own):
        return None
    return other


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRange:
    """The versions of one product for which something holds."""

    product: str
    versions: SpecifierSet
    """As pip writes them: ``>=0.17.1,<0.20``."""

    def holds(self, version: Version | None) -> bool | None:
        """Return whether `version` is in the range; None where that is not known."""
        return _is_in(version, self.versions)

    def __str__(self) -> str:
        parts = sorted(self.versions, key=lambda one: one.operator, reverse=True)
        return f"{TITLES[self.product]} {' and '.join(f'{_WORDS[one.operator]} {one.version}' for one in parts)}"
