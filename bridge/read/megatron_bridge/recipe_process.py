"""`reading_of_process`: the container of a recipe as Megatron Bridge itself makes it, in another process, on request.

It runs the recipe, and what the recipe imports; a checkpoint's config may be downloaded. The container is
written as the YAML that Megatron Bridge saves with a run, and read as such a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bridge.errors import RunConfigError
from bridge.precision import strict_yaml
from bridge.preflight.file_reading import FileReading
from bridge.read.megatron_bridge import run
from bridge.read.megatron_bridge.library import Library
from bridge.read.megatron_bridge.values import Function

OPTION = "--ask-megatron-bridge"
MOST_SECONDS = 600
PROGRAM = """
import importlib, runpy, sys
place, function, path = sys.argv[1:]
names = runpy.run_path(place) if place.endswith(".py") else vars(importlib.import_module(place))
names[function]().to_yaml(path)
"""
"""What the process runs: a recipe of a module or of a file, saved to a path."""
FAILED = (
    "{option}: {function} of {place} makes no container here; {reason}. "
    "Drop the option: the file is read by its syntax then."
)
MADE = "Megatron Bridge itself made the container: {function} of {place}, in a process of its own."


def reading_of_process(library: Library, function: Function, path: Path) -> FileReading:
    """Return what the container says of a run that a recipe makes when it is called without arguments.

    Args:
        library: The source of Megatron Bridge, which the process imports where one is at hand.
        function: The recipe.
        path: The file that is read.

    Raises:
        RunConfigError: Megatron Bridge cannot be imported, or the recipe fails.
    """
    place = function.module.name or str(path.resolve())
    facts = {"function": function.node.name, "place": place}
    with TemporaryDirectory() as folder:
        saved = Path(folder) / "run_config.yaml"
        reason = _called(library, [place, function.node.name, str(saved)])
        if not saved.is_file():
            raise RunConfigError(FAILED.format(option=OPTION, reason=reason, **facts))
        data = strict_yaml.read_bytes(saved, error=RunConfigError)
    text = strict_yaml.decoded(data, str(saved), error=RunConfigError)
    (whole, *_) = strict_yaml.load_all(text, str(saved), error=RunConfigError) or ({},)
    reading = run.read(whole, path)
    return replace(reading, read_too=(MADE.format(**facts), *reading.read_too))


def _called(library: Library, words: list[str]) -> str:
    """Run the process; return why it failed, as a clause: the last line of its errors."""
    variables = dict(os.environ)
    if library.root is not None:
        places = (str(library.root), variables.get("PYTHONPATH", ""))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    command = [sys.executable, "-c", PROGRAM, *words]
    try:
        done = subprocess.run(  # noqa: S603  on request
            command,
            capture_output=True,
            text=True,
            env=variables,
            timeout=MOST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {MOST_SECONDS} seconds"
    lines = done.stderr.strip().splitlines()
    if not lines:
        return f"it ended with {done.returncode}"
    return lines[-1].rstrip(".")
