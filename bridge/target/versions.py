"""Versions that a rule depends on.

The answer is "unknown" (None) where a version is not known well enough.
"""

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
    "find_newer_megatron",
    "find_unpacked_megatron",
    "format_dotted",
    "get_installed_text",
    "get_installed_version",
    "is_at_least",
    "parse_version",
]

DISTRIBUTION_NAMES = {
    "mcore": ("megatron-core",),
    "te": ("transformer-engine",),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
}
"""Product -> names that its installed distribution can have."""
PRODUCT_TITLES = {
    "mcore": "megatron-core",
    "te": "Transformer Engine",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "torch": "torch",
}
UNPACKED_FOLDER = "megatron-next"
"""Folder of the environment that ``make setup`` fills with a newer
Megatron Core; it is on no path.
"""
_COMPLETION_MARKER = "sitecustomize.py"
"""The file that is written into it last."""
_OPERATOR_WORDS = {">=": "from", "<": "before", "!=": "not"}


def parse_version(text: str) -> Version:
    """Return the leading numbers of a version ("2.8.0.dev0" -> 2.8.0).

    RunConfigError where there are none.
    """
    match = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    if match is None:
        rule = "must begin with a number"
        raise RunConfigError.of("version", rule, text, "Write 2.8, for example.")
    return Version(match[1])


def format_dotted(numbers: Iterable[int]) -> str:
    """Return ``8.9`` of (8, 9), a compute capability."""
    return ".".join(map(str, numbers))


def _is_in(version: Version | None, versions: SpecifierSet) -> bool | None:
    """Return whether `version` is one of `versions`; None where that is not known.

    0.17 may be 0.17.0 or 0.17.1: the first and the last version that it stands for have to agree.
    """
    if version is None:
        return None
    is_first_in = versions.contains(version)
    if len(version.release) > 2:
        return is_first_in
    last = Version(f"{version}.9999")
    if versions.contains(last) == is_first_in:
        return is_first_in
    return None


_make_minimum = functools.cache(lambda least: SpecifierSet(f">={least}"))


def is_at_least(version: Version | None, least: str) -> bool | None:
    """Return whether `version` is `least` or later; None where that is not known."""
    return _is_in(version, _make_minimum(least))


@functools.cache
def get_installed_version(product: str) -> Version | None:
    """Return the version of a product, None without one. Nothing is imported for that."""
    text = get_installed_text(product)
    if text is not None:
        with suppress(RunConfigError):
            return parse_version(text)
    return None


@functools.cache
def get_installed_text(product: str) -> str | None:
    """Return the version as the product writes it ("0.20.0rc0"), None without one.

    Of Megatron Core it is also that of a source tree.
    """
    if product == "mcore":
        for folder in sys.path:
            file = Path(folder, "megatron", "core", "package_info.py")
            if file.is_file():
                return _parse_package_info(file.read_text(encoding="utf-8"))
    for name in DISTRIBUTION_NAMES[product]:
        with suppress(PackageNotFoundError):
            return installed_version(name)
    return None


def _parse_package_info(package_info: str) -> str:
    """Return the version that Megatron Core's package_info.py states."""
    numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", package_info, re.MULTILINE)
    pre_release = re.findall(r"^PRE_RELEASE = ['\"](.*)['\"]", package_info, re.MULTILINE)
    return ".".join(numbers) + "".join(pre_release)


def find_unpacked_megatron(prefix: Path | None = None) -> Version | None:
    """Return the version of the Megatron Core in an environment's folder.

    None where it is not there as a whole.
    """
    if prefix is None:
        prefix = Path(sys.prefix)
    folder = prefix / UNPACKED_FOLDER
    package = folder / "megatron" / "core" / "package_info.py"
    if not (folder / _COMPLETION_MARKER).is_file() or not package.is_file():
        return None
    text = package.read_text(encoding="utf-8")
    numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE)
    with suppress(RunConfigError):
        return parse_version(".".join(numbers))
    return None


def find_newer_megatron(prefix: Path | None = None) -> Version | None:
    """Return the unpacked Megatron Core where it is newer than the installed one, else None.

    It counts as newer where none is installed.
    """
    own = get_installed_version("mcore")
    unpacked = find_unpacked_megatron(prefix)
    if unpacked is None or (own is not None and unpacked <= own):
        return None
    return unpacked


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
        words = []
        for part in sorted(self.versions, key=lambda part: part.operator, reverse=True):
            words.append(f"{_OPERATOR_WORDS[part.operator]} {part.version}")
        return f"{PRODUCT_TITLES[self.product]} {' and '.join(words)}"
