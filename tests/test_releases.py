"""The list of the tests that one release of Megatron Core alone can run, and the skips of the whole suite."""

import ast
import re
from pathlib import Path

import pytest

from tests import releases

TESTS = releases.ROOT / "tests"
PAGE = releases.ROOT / "docs" / "explain" / "versions.md"
SKIPS = ("skip", "skipif", "importorskip", "xfail")
OF_A_RELEASE = re.compile(r"releases\.|--megatron|mcore|megatron[-_. ]core \d|\b0\.\d\d|[\"']megatron\.(?!core\b)")
"""In the text of a skip: it depends on the release of Megatron Core."""
OTHERS = ("releases.ABSENT", "releases.is_there()")
"""Words of a skip that depends on the folder of the newer release, and not on the release."""


def skips_of(path: Path) -> list[tuple[str, str]]:
    """Return each skip of a file that depends on the release: the test or fixture that has it, and its text."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    place = path.relative_to(releases.ROOT).as_posix()
    found = []
    for node in tree.body:
        is_test = isinstance(node, ast.FunctionDef | ast.ClassDef)
        name = f"{place}::{node.name}" if is_test else place
        for call in ast.walk(node):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            words = ast.get_source_segment(text, call) or ""
            for other in OTHERS:
                words = words.replace(other, "")
            if call.func.attr in SKIPS and OF_A_RELEASE.search(words):
                found.append((name, words))
    return found


def test_each_skip_of_a_release_is_in_the_list_with_its_reason():
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        if path.name not in ("releases.py", "test_releases.py") or path.parent != TESTS:
            found += skips_of(path)
    assert {place for place, _ in found} == releases.OF_ONE_RELEASE.keys()
    names = {value: name for name, value in vars(releases).items() if isinstance(value, str)}
    for place, words in found:
        assert f"releases.{names[releases.OF_ONE_RELEASE[place]]}" in words, place


def test_the_list_is_short_and_each_reason_is_a_sentence():
    assert len(releases.OF_ONE_RELEASE) <= 10
    for place, reason in releases.OF_ONE_RELEASE.items():
        assert (releases.ROOT / place.partition("::")[0]).is_file()
        assert len(reason.split()) > 4


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ('pytest.skip("needs megatron-core 0.19")', True),
        ('pytest.importorskip("megatron.training.models")', True),
        ('pytest.mark.skipif(installed("mcore") is None, reason="another")', True),
        ('pytest.importorskip("megatron.core")', False),
        ("pytest.mark.skipif(not releases.is_there(), reason=releases.ABSENT)", False),
        ('pytest.skip("needs Chromium")', False),
    ],
)
def test_a_skip_of_a_release_is_recognised(line, is_found, tmp_path, monkeypatch):
    monkeypatch.setattr(releases, "ROOT", tmp_path)
    file = tmp_path / "test_more.py"
    file.write_text(f"def test_it():\n    {line}\n")
    assert [place for place, _ in skips_of(file)] == ["test_more.py::test_it"] * is_found


def test_the_page_about_versions_shows_the_list():
    assert releases.table() in PAGE.read_text(encoding="utf-8")
