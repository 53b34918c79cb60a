"""Each way in which a run is not what its recipe asks for is named by the audit, in both backends where it exists."""

from __future__ import annotations

import json

import pytest

from tests.audit.sabotage import SABOTAGES, end_of
from tests.megatron.test_te_cpu import fresh, needs_te


def assert_caught(name: str, error: str) -> None:
    """The audit ended the run with the sentence of this sabotage."""
    assert error.startswith("audit: step "), f"{name}: {error or 'trained to its end'}"
    assert SABOTAGES[name].message in error, f"{name}: {error}"


@pytest.mark.parametrize("name", [name for name, one in SABOTAGES.items() if "emulated" in one.backends])
def test_a_sabotaged_emulated_run_is_caught(name):
    assert_caught(name, end_of(name, "emulated"))


@needs_te
@pytest.mark.slow
def test_each_sabotage_of_transformer_engines_python_is_caught(tmp_path):
    fresh("tests.audit.sabotage", tmp_path / "ends.json")
    for name, error in json.loads((tmp_path / "ends.json").read_text()).items():
        assert_caught(name, error)
