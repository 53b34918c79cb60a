"""Each run that is not what its recipe asks for is named by the audit, in both backends where it exists.

python -m tests.runtime.audit.test_sabotage     makes all runs and writes the table of docs/howto/is-it-really-fp8.md
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests import warm
from tests.runtime.audit.sabotage import BOTH, SABOTAGES, end_of
from tests.runtime.megatron.test_te_cpu import ROOT, fresh, needs_te

PAGE = ROOT / "docs" / "howto" / "is-it-really-fp8.md"
BEGIN, END = "<!-- the table of tests/runtime/audit/test_sabotage.py -->", "<!-- end of the sabotages -->"


def ends(backend: str, processes: int, folder: Path) -> dict[str, str]:
    """Make the sabotaged runs of a backend with so many processes; return the error of each."""
    names = [name for name, one in SABOTAGES.items() if backend in one.backends and one.processes == processes]
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"backend": backend, "names": names}))
    if backend == "te_cpu":
        fresh("tests.runtime.audit.sabotage", plan, processes=processes)
    else:
        for done in warm.launch(["python", "-m", "tests.runtime.audit.sabotage", plan], processes=processes, cwd=ROOT):
            assert done.returncode == 0, done.stderr[-4000:]
    (own, *others) = (json.loads((folder / f"ends-{rank}.json").read_text()) for rank in range(processes))
    assert all(other == own for other in others)
    return own


def sentence_of(name: str, error: str) -> str:
    """Return the sentence of an error that names a sabotage."""
    assert error.startswith("audit: step "), f"{name}: {error or 'trained to its end'}"
    found = [line.strip() for line in error.splitlines() if SABOTAGES[name].message in line]
    assert found, f"{name}: {error}"
    return found[0]


def assert_caught(name: str, backend: str, error: str) -> None:
    """The audit ended the run with the sentence of this sabotage, which the page shows."""
    found = row_of(name, backend, error)
    assert any(line.startswith(found) for line in PAGE.read_text(encoding="utf-8").splitlines()), found


def row_of(name: str, backend: str, error: str) -> str:
    """Return the row of the page; without the layers that a gather gave garbage to, which vary."""
    sentence = sentence_of(name, error)
    if SABOTAGES[name].processes > 1:
        sentence = sentence.partition(": ")[0]
    return f"| {name} | {backend} | {sentence}"


ALONE = [name for name, one in SABOTAGES.items() if "emulated" in one.backends and one.processes == 1]


@pytest.mark.parametrize("name", ALONE)
def test_a_sabotaged_emulated_run_is_caught(name):
    assert_caught(name, "emulated", end_of(name, "emulated"))


def test_sabotaged_emulated_runs_in_two_processes_are_caught(tmp_path):
    for name, error in ends("emulated", 2, tmp_path).items():
        assert_caught(name, "emulated", error)


@needs_te
@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_each_sabotage_of_transformer_engines_python_is_caught(processes, tmp_path):
    for name, error in ends("te_cpu", processes, tmp_path).items():
        assert_caught(name, "te_cpu", error)


def test_the_page_has_each_sabotage_in_each_backend():
    """The tests above compare the sentences."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [tuple(line.strip("| ").split(" | ")[:2]) for line in table.splitlines() if line.startswith("| ")][1:]
    assert rows == [(name, backend) for name, one in SABOTAGES.items() for backend in BOTH if backend in one.backends]


def write_table() -> None:
    """Write the sentence of each sabotage in each backend into the page."""
    found = {}
    for backend in BOTH:
        for processes in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                for name, error in ends(backend, processes, Path(folder)).items():
                    found[name, backend] = row_of(name, backend, error)
    rows = [found[name, backend] for name in SABOTAGES for backend in BOTH if (name, backend) in found]
    text = "\n".join(["| Sabotage | Backend | Sentence of the audit |", "|---|---|---|", *(f"{row} |" for row in rows)])
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    write_table()
