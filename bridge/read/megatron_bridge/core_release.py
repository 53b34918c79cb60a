"""`find_core_release`: the release of Megatron Core that a source tree of Megatron Bridge has.

Megatron Bridge pins Megatron Core as a submodule. The pinned release follows from the version of
Megatron Bridge, which its `package_info.py` states.
"""

from __future__ import annotations

import ast

from bridge.preflight.megatron_release import MegatronRelease
from bridge.read.foreign.table import load_table
from bridge.read.megatron_bridge.source_library import PACKAGE, Library, find_installed_root
from bridge.target.versions import parse_version

VERSION_MODULE = f"{PACKAGE}.package_info"
VERSION_NAMES = ("MAJOR", "MINOR")
REASON = (
    "the nearest known release to the submodule of Megatron Bridge {version}, whose source is read"
)


def find_core_release(library: Library) -> MegatronRelease | None:
    """Return the release of Megatron Core that a source tree of Megatron Bridge pins.

    Args:
        library: The source tree.

    Returns:
        The release. None: the version of Megatron Bridge is not known here, or the source is that
        of the installed package, which runs with the installed Megatron Core.
    """
    if library.root is None or library.root == find_installed_root():
        return None
    version = _find_version(library)
    releases = load_table("megatron_bridge").data["releases of Megatron Core"]
    if version not in releases:
        return None
    reason = REASON.format(version=version)
    return MegatronRelease(version=parse_version(releases[version]), reason=reason)


def _find_version(library: Library) -> str:
    """Return the version of Megatron Bridge, such as "0.7"; empty if its source does not state it."""
    module = library.module(VERSION_MODULE)
    if module is None:
        return ""
    numbers: list[str] = []
    for name in VERSION_NAMES:
        match module.assigned.get(name):
            case [ast.Constant(value=int() as number)]:
                numbers.append(str(number))
            case _:
                return ""
    return ".".join(numbers)
