"""A file or a script of a framework, read as the commands read it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from bridge.front.loader import load_run
from bridge.preflight.run import Run


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[..., Run]:
    """Return a function that writes a file and returns its run as `check` has it."""

    def read(text: str, name: str, *overrides: str) -> Run:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return load_run(overrides, config_file=path, strict=False)

    return read
