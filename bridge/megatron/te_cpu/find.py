"""Transformer Engine's Python without CUDA: where it lies, and the sentence where it does not."""

import importlib.util
import re
import sys
from pathlib import Path

from bridge.errors import BackendUnavailableError

VERSIONS = ("2.9", "2.14", "2.20")
"""Releases of Transformer Engine that the stand-in was written for; the last one is tested most."""
PIP = "pip install --target {folder} transformer-engine=={version}.2 'pydantic>=2' einops"


def side_folder() -> Path:
    """Return the folder in the environment that ``make setup`` fills; it is on no path unless it is asked for."""
    return Path(sys.prefix) / "te"


def find_te() -> tuple[Path | None, str]:
    """Return the folder to be put on the path (None: it is on it) and the version."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is not None and spec.submodule_search_locations:
        root, folder = Path(next(iter(spec.submodule_search_locations))).parent, None
    else:
        root = folder = side_folder()
    version = _version(root)
    if version is None or release_of(version) not in VERSIONS:
        found = "it is not installed" if version is None else f"{version} is installed"
        command = PIP.format(folder=side_folder(), version=VERSIONS[-1])
        raise BackendUnavailableError(
            f"precision_backend=te_cpu: needs the Python files of Transformer Engine {', '.join(VERSIONS[:-1])} or "
            f"{VERSIONS[-1]}, and {found} in {root}. Run: {command}"
        )
    return folder, version


def release_of(version: str) -> str:
    """Return the release of a version: 2.20 of 2.20.2."""
    return ".".join(version.split(".")[:2])


def _version(root: Path) -> str | None:
    """Return the version that a package's metadata states; None without the package."""
    if not (root / "transformer_engine" / "pytorch" / "__init__.py").is_file():
        return None
    for path in sorted(root.glob("transformer_engine-*.dist-info")):
        stated = re.fullmatch(r"transformer_engine-(.+)\.dist-info", path.name)
        if stated:
            return stated[1]
    return None
