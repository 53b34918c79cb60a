"""Fixtures of the numerics tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bridge.runtime.numerics import native, use

sys.path.append(str(Path(__file__).parents[3] / "scripts"))  # the reference quantisers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def selection_restored() -> Iterator[None]:
    """Put the choice between torch and the kernel back as it was."""
    native.get_kernel_choice()
    before = native._selection
    yield
    native._selection = before


@pytest.fixture(params=["torch", "native"])
def path(request: pytest.FixtureRequest, selection_restored: None) -> str:
    """Run the test in plain torch, and with the C kernel."""
    problem = use(request.param)
    if problem is not None:
        pytest.skip(f"needs a C compiler: {problem}")
    return str(request.param)


@pytest.fixture
def both_paths(selection_restored: None) -> tuple[str, str]:
    """Let the test compare the two implementations itself, with `use`."""
    problem = use("native")
    if problem is not None:
        pytest.skip(f"needs a C compiler: {problem}")
    return ("torch", "native")
