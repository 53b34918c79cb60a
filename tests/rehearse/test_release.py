"""The release of Megatron Core that a rehearsal imports."""

import os
import sys
from pathlib import Path

import pytest

from bridge.rehearse import release
from bridge.rehearse.release import Release, find_release, list_local_releases
from bridge.target import versions
from bridge.target.versions import Version

OWN = Version("0.16.1")


@pytest.fixture
def at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The prefix of an environment that has 0.19.2 next to an installed 0.16.1."""
    package = tmp_path / versions.UNPACKED_FOLDER / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 2\nPRE_RELEASE = ''\n")
    (tmp_path / versions.UNPACKED_FOLDER / "sitecustomize.py").write_text("")
    install(monkeypatch, OWN)
    return tmp_path


def install(monkeypatch: pytest.MonkeyPatch, version: Version | None) -> None:
    """Let a release be the installed one."""
    for module in (release, versions):
        monkeypatch.setattr(module, "installed", lambda _product: version)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, "0.19.2"),
        ("0.20", "0.19.2"),
        ("0.19", "0.19.2"),
        ("0.19.1", "0.16.1"),
        ("0.18", "0.16.1"),
        ("0.15", "0.16.1"),
    ],
)
def test_it_is_the_newest_at_hand_that_the_target_admits(at_hand: Path, wanted: str | None, expected: str):
    chosen = find_release(None if wanted is None else Version(wanted), prefix=at_hand)
    assert str(chosen.version) == expected


def test_a_folder_that_is_not_whole_is_not_at_hand(at_hand: Path):
    (at_hand / versions.UNPACKED_FOLDER / "sitecustomize.py").unlink()
    assert find_release(None, prefix=at_hand) == Release(version=OWN)


def test_an_installed_release_that_is_as_new_is_taken(at_hand: Path, monkeypatch: pytest.MonkeyPatch):
    newer = Version("0.19.2")
    install(monkeypatch, newer)
    assert find_release(None, prefix=at_hand) == Release(version=newer)


def test_its_folder_comes_first_on_the_path_of_the_process(at_hand: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "before")
    chosen = find_release(None, prefix=at_hand)
    assert chosen.environment() == {"PYTHONPATH": os.pathsep.join((str(at_hand / versions.UNPACKED_FOLDER), "before"))}
    assert Release(version=OWN).environment() == {}
    assert str(at_hand) not in sys.path


def test_the_unpacked_release_runs_where_none_is_installed(at_hand: Path, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, None)
    assert [str(one.version) for one in list_local_releases(prefix=at_hand)] == ["0.19.2"]
    assert str(find_release(Version("0.19"), prefix=at_hand).version) == "0.19.2"
    assert find_release(Version("0.18"), prefix=at_hand) == Release(version=None)
