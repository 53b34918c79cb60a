"""The page of frameworks is what `scripts/frameworks.py` writes of the tables."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_frameworks_is_that_of_the_tables() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "frameworks.py", "--check"], check=True)
