"""The files of a run folder that are damaged, or that another version wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.errors import RunConfigError
from bridge.runtime.audit.quantisation import QUANTISATION_FILE, QuantisationRow, write_rows
from bridge.runtime.audit.run_folder import RunFolder

ROW = QuantisationRow(
    step=1,
    layer=1,
    module="linear_fc1",
    operand="input",
    format="e4m3",
    amax=1.0,
    scale=None,
    underflow=0.0,
    saturated=0.0,
    sqnr_db=31.5,
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("step,", "step,mean,"),
        (",31.5,", ",31.5,31.5,"),
        ("linear_fc1", "x" * 200_000),
        ("31.5", "many"),
    ],
    ids=["unknown column", "cell without a column", "cell without an end", "text for a number"],
)
def test_a_damaged_table_of_quantisation_is_one_sentence(before: str, after: str, tmp_path: Path) -> None:
    path = tmp_path / QUANTISATION_FILE
    write_rows(path, [ROW])
    assert RunFolder(tmp_path).quantisation[0].sqnr_db == 31.5
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(RunConfigError) as caught:
        _ = RunFolder(tmp_path).quantisation
    assert str(caught.value).startswith(f"{path}: must be a table as the training command writes it (")
