"""Parts of a grid that only `make test-all` runs."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["slow"]


def slow(*values: Any) -> Any:
    """Return the values of one case, marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)
