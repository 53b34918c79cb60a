"""For each rule a run that breaks it and one that differs from it by as little as possible and does not, by topic."""

from importlib import import_module
from pathlib import Path

TOPICS = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in ("__init__", "runs"))
CASES = {name: runs for topic in TOPICS for name, runs in import_module(f"tests.rules.cases.{topic}").CASES.items()}
