"""Versions of products: parsed, installed on this machine, and ranges that rules depend on.

A comparison with an unknown version, or with a version that is too short, returns None.
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
"""Product -> its name in messages."""
UNPACKED_FOLDER = "megatron-next"
"""Folder of the Python environment that ``make setup`` fills with a newer Megatron Core.

It is not on the import path.
"""
_COMPLETION_MARKER = "sitecustomize.py"
"""The last file that is written into `UNPACKED_FOLDER`."""
_OPERATOR_WORDS = {">=": "from", "<": "before", "!=": "not"}
"""Operator of a version specifier -> its name in messages."""


def parse_version(text: str) -> Version:
    """Return the leading numbers of a version ("2.8.0.dev0" -> 2.8.0).

    Raises:
        RunConfigError: The text does not begin with a number.
    """
    match = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    if match is None:
        rule = "must begin with a number"
        raise RunConfigError.of("version", rule, text, "Write 2.8, for example.")
    return Version(match[1])


def format_dotted(numbers: Iterable[int]) -> str:
    """Return numbers as text with dots: the compute capability (8, 9) is "8.9"."""
    return ".".join(map(str, numbers))


def _is_in(version: Version | None, versions: SpecifierSet) -> bool | None:
    """Return whether a version is in a set of versions, or None if that is not known.

    The version 0.17 can mean 0.17.0 or 0.17.1. The answer is known only if it is the same for the
    first and the last version that 0.17 can mean.
    """
    if version is None:
        return None
    contains_first = versions.contains(version)
    if len(version.release) > 2:
        return contains_first
    last = Version(f"{version}.9999")
    if versions.contains(last) == contains_first:
        return contains_first
    return None


@functools.cache
def _make_minimum(least: str) -> SpecifierSet:
    """Return the versions from `least` on. Cached, since rules often ask for the same versions."""
    return SpecifierSet(f">={least}")


def is_at_least(version: Version | None, least: str) -> bool | None:
    """Return whether a version is `least` or later, or None if that is not known."""
    return _is_in(version, _make_minimum(least))


@functools.cache
def get_installed_version(product: str) -> Version | None:
    """Return the installed version of a product, or None. The product is not imported."""
    version_text = get_installed_text(product)
    if version_text is not None:
        with suppress(RunConfigError):
            return parse_version(version_text)
    return None


@functools.cache
def get_installed_text(product: str) -> str | None:
    """Return the installed version as the product writes it ("0.20.0rc0"), or None.

    A source tree of Megatron Core on the import path counts as installed.
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
    """Return the version of the Megatron Core in the folder `UNPACKED_FOLDER` of an environment.

    Args:
        prefix: Prefix of the Python environment. None: the environment of this process.

    Returns:
        None if the folder is absent or incomplete.
    """
    if prefix is None:
        prefix = Path(sys.prefix)
    folder = prefix / UNPACKED_FOLDER
    package_info = folder / "megatron" / "core" / "package_info.py"
    if not (folder / _COMPLETION_MARKER).is_file() or not package_info.is_file():
        return None
    package_info_text = package_info.read_text(encoding="utf-8")
    numbers = re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", package_info_text, re.MULTILINE)
    with suppress(RunConfigError):
        return parse_version(".".join(numbers))
    return None


def find_newer_megatron(prefix: Path | None = None) -> Version | None:
    """Return the version of the unpacked Megatron Core if it is newer than the installed version.

    Args:
        prefix: Prefix of the Python environment. None: the environment of this process.

    Returns:
        None if it is not newer. It counts as newer if no Megatron Core is installed.
    """
    installed = get_installed_version("mcore")
    unpacked = find_unpacked_megatron(prefix)
    if unpacked is None or (installed is not None and unpacked <= installed):
        return None
    return unpacked


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRange:
    """A range of the versions of one product."""

    product: str
    """A key of `PRODUCT_TITLES`."""
    versions: SpecifierSet
    """The range in pip's spelling: ``>=0.17.1,<0.20``."""

    def holds(self, version: Version | None) -> bool | None:
        """Return whether a version is in the range, or None if that is not known."""
        return _is_in(version, self.versions)

    def __str__(self) -> str:
        """Return the range for a message: "megatron-core from 0.17.1 and before 0.20"."""
        limits = []
        for limit in sorted(self.versions, key=lambda limit: limit.operator, reverse=True):
            limits.append(f"{_OPERATOR_WORDS[limit.operator]} {limit.version}")
        return f"{PRODUCT_TITLES[self.product]} {' and '.join(limits)}"
