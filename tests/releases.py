"""The release of Megatron Core that a run of the tests asks: the installed one, or a newer one (``--megatron next``).

``make setup`` unpacks the newer one into a folder of the environment, which is on no path unless it is asked for. Its
wheels are for Python 3.12. It runs on 3.11 with two additions, which ``python -m tests.releases`` makes: the name
`typing.override`, and the compiled helper of the data sets, which is the installed release's, from the same source.

``--megatron=FOLDER`` asks a source tree of Megatron-LM instead, of a release that the package index does not have.
The tree comes first on the path; Triton and `typing.override` are those of the unpacked release behind it.
``python -m tests.releases FOLDER`` copies the compiled helper into the tree.
``python -m tests.releases --list`` prints the tests of one release alone.
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
NEXT = Path(sys.prefix) / "megatron-next"
"""Folder with the newer release, and with what it needs beyond the environment."""
CHOICES = ("installed", "next", "rest")
"""All tests on the installed release; those that ask Megatron on the newer one; on the installed one what is left, and
the part of them that tells the releases apart. Every other choice is the folder of a source tree."""
LIVE_PLAN = (
    *("tests/plan/test_fields.py", "tests.model.test_hybrid_pattern.py", "tests.plan.test_memory_report.py"),
    *("tests/plan/test_memory_fsdp.py", "tests/plan/test_memory_in_flight.py", "tests/plan/test_memory_kept.py"),
    *("tests/model/test_modules.py", "tests/plan/test_offload.py", "tests/plan/test_variants.py"),
)
"""Files that compare the plan with live models of Megatron."""
ASKING = (
    *LIVE_PLAN,
    *("tests/runtime/audit", "tests/runtime/megatron", "tests/rehearse", "tests/rules", "tests/sync", "tests/trainers"),
    *("tests/training", "tests/front/test_runs.py", "tests/recipes/test_peer.py"),
)
"""Folders and files whose tests ask Megatron."""
ON_BOTH = (
    *LIVE_PLAN,
    *("tests/runtime/audit", "tests/rules", "tests/sync", "tests/trainers", "tests/front/test_runs.py"),
    "tests/recipes/test_peer.py",
    *(
        "tests.runtime.megatron.test_cuda_shim.py",
        "tests/runtime/megatron/test_gpt.py",
        "tests/runtime/megatron/test_hybrid_runs.py",
    ),
    *(
        "tests/runtime/megatron/test_import.py",
        "tests/runtime/megatron/test_model_kinds.py",
        "tests.runtime.megatron.test_patching.py",
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
NO_TRAINING = "needs megatron-core 0.19, whose wheel has megatron.training; that of 0.16 has none: --megatron next"
FROM_ONE_TO_THE_OTHER = "a release continues runs of an older one: --megatron=FOLDER for those of the newer release"
LATER_PARTS = "needs parts of DeepSeek-V4, which Megatron-LM has after 0.19 alone: --megatron=FOLDER of such a clone"
OF_ONE_RELEASE = {
    "tests/examples/test_examples.py::test_megatron_lms_parser_takes_the_recipe": NO_TRAINING,
    "tests/read/test_megatron_lm.py::parser": NO_TRAINING,
    "tests/recipes/test_peer.py::test_megatron_lms_own_model_config_is_looked_through": NO_TRAINING,
    "tests/recipes/test_peer.py::test_megatrons_own_container_writes_our_config_and_bridges_reader_builds_its_own": (
        NO_TRAINING
    ),
    "tests/trainers/test_megatron_lm.py": NO_TRAINING,
    "tests/trainers/test_audit_megatron_lm.py": NO_TRAINING,
    "tests/runtime/megatron/test_compressed_attention.py": LATER_PARTS,
    "tests/training/test_releases.py::test_a_run_of_an_older_release_continues_on_the_newer_one": (
        FROM_ONE_TO_THE_OTHER
    ),
}
"""Each file, test or fixture that one release of Megatron Core alone can run, with the reason; ten at most."""
ABSENT = f"needs the newer Megatron Core in {NEXT}: run make setup"

_FIRST: list[str] = []
"""Folders that this run of the tests, and the processes that it starts, search before the environment."""
_AT_START = """import typing

if not hasattr(typing, "override"):
    from typing_extensions import override

    typing.override = override
"""
"""The module that Python imports at the start of a process."""
_DATASETS = Path("megatron") / "core" / "datasets"


def main(words: list[str]) -> None:
    """Make what the unpacked release, or a source tree, needs beyond its files."""
    if words:
        _copy_helper(Path(words[0]))
    else:
        (NEXT / "sitecustomize.py").write_text(_AT_START)
        _copy_helper(NEXT)


def _copy_helper(folder: Path) -> None:
    """Copy the compiled helper of the installed release, where a folder has none and its source is the same."""
    if _has_helper(folder):
        return
    installed = Path(sysconfig.get_paths()["purelib"]) / _DATASETS
    if (installed / "helpers.cpp").read_bytes() != (folder / _DATASETS / "helpers.cpp").read_bytes():
        raise SystemExit(
            f"{folder / _DATASETS}: the source of the helper is not that of {installed}. "
            f"Run make -C {folder / _DATASETS}."
        )
    for compiled in installed.glob("helpers_cpp*.so"):
        shutil.copy(compiled, folder / _DATASETS)


def _has_helper(folder: Path) -> bool:
    """Return whether the helper is compiled for this Python."""
    return any((folder / _DATASETS).glob(f"helpers_cpp*{sysconfig.get_config_var('EXT_SUFFIX')}"))


def use(choice: str) -> None:
    """Let this process, and those that it starts, import the chosen release."""
    if choice in ("installed", "rest") or not is_there():
        return
    if choice != "next":
        _FIRST.append(str(Path(choice).resolve()))
    _FIRST.append(str(NEXT))
    sys.path[:0] = _FIRST
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*_FIRST, os.environ.get("PYTHONPATH")]))
    if not hasattr(typing, "override"):  # as the folder's own sitecustomize.py does at the start of a process
        typing.override = typing_extensions.override


def fault_of(choice: str) -> str | None:
    """Return why a choice is none, or None: a source tree has to be complete."""
    if choice in CHOICES:
        return None
    if not Path(choice, "megatron", "core", "package_info.py").is_file():
        return f"--megatron={choice}: neither {', '.join(CHOICES)} nor a folder that holds megatron/core"
    if not is_there():
        return f"--megatron={choice}: {ABSENT}, which brings Triton"
    if not _has_helper(Path(choice)):
        return (
            f"--megatron={choice}: the helper of the data sets is not compiled. Run python -m tests.releases {choice}"
        )
    return None


def is_there() -> bool:
    """Return whether the folder of the newer release is complete."""
    return (NEXT / "sitecustomize.py").is_file() and (NEXT / "megatron" / "core").is_dir()


def table() -> str:
    """Return the tests of one release alone as a Markdown table."""
    lines = ["| Tests | Why one release alone |", "|---|---|"]
    for place, reason in OF_ONE_RELEASE.items():
        lines.append(f"| `{place}` | {reason} |")
    return "\n".join(lines)


def leaves_out(choice: str, path: Path) -> bool:
    """Return whether a run of the tests does without a file."""
    place = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    if path.is_dir() or path.suffix != ".py" or path.name == "conftest.py" or not place.startswith("tests/"):
        return False
    asks, is_on_both = (any(f"{place}/".startswith(f"{one}/") for one in these) for these in (ASKING, ON_BOTH))
    if choice == "rest":
        return is_there() and asks and not is_on_both
    return choice != "installed" and not asks


def first_folders() -> list[str]:
    """Return the folders of the release that this run of the tests asks; none for the installed one."""
    return list(_FIRST)


def skip_all(items: list[pytest.Item]) -> None:
    """Skip every test where the folder is not there."""
    for item in items:
        item.add_marker(pytest.mark.skip(reason=ABSENT))


if __name__ == "__main__":
    if "--list" in sys.argv[1:]:
        print(table())  # noqa: T201  a command prints
    else:
        main(sys.argv[1:])
