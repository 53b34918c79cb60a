"""Files and folders that are no log: each is refused in one sentence that names what is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.errors import UnreadFileError
from bridge.read.logs.files import READABLE_LOGS, read_logs

OTHER = {
    "notes.txt": b"the run went well\n",
    "empty.log": b"",
    "settings.json": b'{"model": {"num_layers": 2}}',
    "list.json": b"[1, 2, 3]",
    "torn.json": b'{"lm loss": {"values"',
    "table.csv": b"name,size\na,1\n",
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_file_is_refused_with_the_formats_that_are_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(OTHER[name])
    with pytest.raises(UnreadFileError) as refused:
        read_logs(path)
    assert str(refused.value) == f"{path}: no run is read from it. Give {READABLE_LOGS}."


def test_an_empty_folder_and_an_absent_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadFileError, match="no run is read from it"):
        read_logs(tmp_path)
    with pytest.raises(UnreadFileError, match="cannot be read: No such file"):
        read_logs(tmp_path / "absent.log")


def test_a_history_with_no_step_above_zero_has_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_text("_step,lm loss\n0,3.0\n")
    with pytest.raises(UnreadFileError, match="must have a training loss"):
        read_logs(path)


def test_a_log_whose_run_has_made_no_step_yet_has_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("-------- arguments --------\n  bf16 ... True\n------ end of arguments ------\n")
    with pytest.raises(
        UnreadFileError, match=r"a log of Megatron-LM must have a training loss .* got the metrics none\."
    ):
        read_logs(path)
