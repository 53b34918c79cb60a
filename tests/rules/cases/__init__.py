"""For each rule a run that breaks it and one that differs from it by as little as possible and does not, by topic."""

from importlib import import_module
from pathlib import Path

FOLDER = Path(__file__).parent
TOPICS = sorted(f"{path.parent.name}.{path.stem}" for path in FOLDER.glob("*/[!_]*.py"))
CASES = {name: runs for topic in TOPICS for name, runs in import_module(f"tests.rules.cases.{topic}").CASES.items()}
