"""The release of Megatron Core that an answer is of, and its reason, with a target and without."""

import pytest

from bridge.preflight import file_reading
from bridge.preflight.file_reading import FileReading
from bridge.target.target import Target
from bridge.target.versions import Version

OWN, NEWER = Version("0.16.1"), Version("0.19.2")
HERE = Target(mcore=OWN)


def line_of(reading: FileReading) -> str:
    """Return the sentence about the release."""
    return reading.lines[0]


@pytest.mark.parametrize(
    ("own", "newer", "sentence"),
    [
        (OWN, None, "megatron-core 0.16.1 (installed here)."),
        (
            OWN,
            NEWER,
            "megatron-core 0.16.1 (assumed: it is installed here, and no target states one; 0.19.2 is at hand: "
            "--target mcore0.19.2).",
        ),
        (
            None,
            None,
            "No release of megatron-core is known: none is installed here, and no target states one.",
        ),
        (
            None,
            NEWER,
            "No release of megatron-core is known: none is installed here, and no target states one; 0.19.2 is at "
            "hand: --target mcore0.19.2.",
        ),
    ],
)
def test_without_a_target_the_release_that_is_assumed_is_one_line(own, newer, sentence, monkeypatch):
    monkeypatch.setattr(file_reading, "find_newer_megatron", lambda: newer)
    assert line_of(FileReading().with_target_release(Target(mcore=own), is_stated=False)) == sentence


def test_a_release_that_the_target_states_or_is_is_no_assumption(monkeypatch):
    monkeypatch.setattr(file_reading, "find_newer_megatron", lambda: NEWER)
    stated = FileReading().with_target_release(HERE, is_stated=True)
    assert line_of(stated) == "megatron-core 0.16.1 (stated by the target)."
    detected = FileReading().with_target_release(Target(mcore=OWN, is_detected=True), is_stated=True)
    assert line_of(detected) == "megatron-core 0.16.1 (of this machine, which is the target)."
    open_ = FileReading().with_target_release(Target(), is_stated=True)
    assert line_of(open_) == "No release of megatron-core is known: the target states none."
    for reading in (stated, detected, open_):
        assert not reading.is_release_installed
        assert reading.with_rehearsed_release("0.19.2") == reading


@pytest.mark.parametrize("newer", [None, NEWER])
def test_a_rehearsal_names_the_release_that_it_imported_where_nothing_states_one(newer, monkeypatch):
    monkeypatch.setattr(file_reading, "find_newer_megatron", lambda: newer)
    reading = FileReading().with_target_release(HERE, is_stated=False)
    assert reading.is_release_installed
    assert (
        line_of(reading.with_rehearsed_release("0.19.2"))
        == "megatron-core 0.19.2 (the newest at hand, as no target states one)."
    )
