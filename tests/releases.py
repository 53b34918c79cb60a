"""The release of Megatron Core that a run of the tests asks: the installed one, or a newer one (``--megatron next``).

``make setup`` unpacks the newer one into a folder of the environment, which is on no path unless it is asked for. Its
wheels are for Python 3.12. It runs on 3.11 with two additions, which ``python -m tests.releases`` makes: the name
`typing.override`, and the compiled helper of the data sets, which is the installed release's, from the same source.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import typing
from pathlib import Path

import pytest
import typing_extensions

ROOT = Path(__file__).resolve().parents[1]
NEXT = Path(os.environ.get("BRIDGE_MEGATRON_NEXT") or Path(sys.prefix) / "megatron-next")
"""Folder with the newer release, and with what it needs beyond the environment."""
CHOICES = ("installed", "next", "rest")
"""All tests on the installed release; those that ask Megatron on the newer one; on the installed one what is left, and
the part of them that tells the releases apart."""
ASKING = (
    *("tests/runtime/audit", "tests/runtime/megatron", "tests/rehearse", "tests/rules", "tests/sync", "tests/trainers"),
    *("tests/training", "tests/front/test_runs.py", "tests/recipes/test_peer.py"),
)
"""Folders and files whose tests ask Megatron."""
ON_BOTH = (
    *("tests/runtime/audit", "tests/rules", "tests/sync", "tests/trainers", "tests/front/test_runs.py"),
    "tests/recipes/test_peer.py",
    *(
        "tests/runtime/megatron/test_device.py",
        "tests/runtime/megatron/test_gpt.py",
        "tests/runtime/megatron/test_hybrid_runs.py",
    ),
    *(
        "tests/runtime/megatron/test_import.py",
        "tests/runtime/megatron/test_model_kinds.py",
        "tests/runtime/megatron/test_replacement.py",
    ),
    *(
        "tests/runtime/megatron/test_te_cpu.py",
        "tests/runtime/megatron/test_variants.py",
        "tests/training/test_checkpoint_faults.py",
    ),
    *("tests/training/test_loop.py", "tests/training/test_loop_low_precision.py"),
    *("tests/training/test_loop_parallel.py", "tests/training/test_loop_resume.py", "tests/training/test_releases.py"),
)
"""The part of them that ``make test`` runs on the installed release too."""
ABSENT = f"needs the newer Megatron Core in {NEXT}: run make setup"


_AT_START = """import typing

if not hasattr(typing, "override"):
    from typing_extensions import override

    typing.override = override
"""
"""The module that Python imports at the start of a process."""
_DATASETS = Path("megatron") / "core" / "datasets"


def main() -> None:
    """Make what the unpacked release needs beyond its wheel."""
    (NEXT / "sitecustomize.py").write_text(_AT_START)
    if any((NEXT / _DATASETS).glob(f"helpers_cpp*{sysconfig.get_config_var('EXT_SUFFIX')}")):
        return
    installed = Path(sysconfig.get_paths()["purelib"]) / _DATASETS
    if (installed / "helpers.cpp").read_bytes() != (NEXT / _DATASETS / "helpers.cpp").read_bytes():
        raise SystemExit(f"{NEXT / _DATASETS}: the source of the helper is not that of {installed}. Compile it.")
    for compiled in installed.glob("helpers_cpp*.so"):
        shutil.copy(compiled, NEXT / _DATASETS)


def use_next() -> None:
    """Let this process, and those that it starts, import the newer release."""
    sys.path.insert(0, str(NEXT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(NEXT), os.environ.get("PYTHONPATH")]))
    if not hasattr(typing, "override"):  # as the folder's own sitecustomize.py does at the start of a process
        typing.override = typing_extensions.override


def is_there() -> bool:
    """Return whether the folder is complete."""
    return (NEXT / "sitecustomize.py").is_file() and (NEXT / "megatron" / "core").is_dir()


def leaves_out(choice: str, path: Path) -> bool:
    """Return whether a run of the tests does without a file."""
    place = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    if path.is_dir() or path.suffix != ".py" or path.name == "conftest.py" or not place.startswith("tests/"):
        return False
    asks, is_on_both = (any(f"{place}/".startswith(f"{one}/") for one in these) for these in (ASKING, ON_BOTH))
    if choice == "next":
        return not asks
    return choice == "rest" and is_there() and asks and not is_on_both


def is_next() -> bool:
    """Return whether this run of the tests asks the newer release."""
    return str(NEXT) in sys.path


def skip_all(items: list[pytest.Item]) -> None:
    """Skip every test where the folder is not there."""
    for item in items:
        item.add_marker(pytest.mark.skip(reason=ABSENT))


if __name__ == "__main__":
    main()
