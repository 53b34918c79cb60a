"""`read_container_from_process`: the container of a recipe as Megatron Bridge itself makes it.

On request, another process imports and runs the recipe. It may download the config of a checkpoint.
It writes the container as the YAML that Megatron Bridge saves with a run. This file is read as any
saved container.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from bridge.errors import RunConfigError
from bridge.preflight.file_reading import FileReading
from bridge.read.megatron_bridge import saved_container
from bridge.read.megatron_bridge.source_library import Library
from bridge.read.megatron_bridge.values import Function

ASK_OPTION = "--ask-megatron-bridge"
TIMEOUT_SECONDS = 600
PROCESS_PROGRAM = """
import importlib, runpy, sys
location, function, path = sys.argv[1:]
if location.endswith(".py"):
    names = runpy.run_path(location)
else:
    names = vars(importlib.import_module(location))
names[function]().to_yaml(path)
"""
"""The program of the process. It calls a recipe of a module or of a file, and saves its container."""
RECIPE_FAILED = (
    "{option}: {function} of {place} makes no container here; {reason}. "
    "Drop the option: the file is read by its syntax then."
)
CONTAINER_MADE = (
    "Megatron Bridge itself made the container: {function} of {place}, in a process of its own."
)


def read_container_from_process(library: Library, function: Function, path: Path) -> FileReading:
    """Return the run of the container that a recipe makes if it is called without arguments.

    Args:
        library: The source of Megatron Bridge. The process imports it if it is found.
        function: The recipe.
        path: The file that is read.

    Raises:
        RunConfigError: Megatron Bridge cannot be imported, or the recipe fails.
    """
    location = function.module.name or str(path.resolve())
    facts = {"function": function.node.name, "place": location}
    with TemporaryDirectory() as folder:
        saved = Path(folder) / "run_config.yaml"
        reason = _run_process(library, [location, function.node.name, str(saved)])
        if not saved.is_file():
            raise RunConfigError(RECIPE_FAILED.format(option=ASK_OPTION, reason=reason, **facts))
        container = saved_container.load_first_document(saved)
    if not isinstance(container, Mapping):
        container = {}
    reading = saved_container.read_saved_container(container, path)
    return reading.with_first_note(CONTAINER_MADE.format(**facts))


def _run_process(library: Library, arguments: list[str]) -> str:
    """Run the process, and return why it may have failed: the last line of its errors.

    Args:
        library: The source of Megatron Bridge, which goes before other packages.
        arguments: The module or file of the recipe, the name of its function, and the path to save to.
    """
    variables = dict(os.environ)
    if library.root is not None:
        python_paths = (str(library.root), variables.get("PYTHONPATH", ""))
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, python_paths))
    command = [sys.executable, "-c", PROCESS_PROGRAM, *arguments]
    try:
        completed = subprocess.run(  # noqa: S603  on request
            command,
            capture_output=True,
            text=True,
            env=variables,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {TIMEOUT_SECONDS} seconds"
    lines = completed.stderr.strip().splitlines()
    if not lines:
        return f"it ended with {completed.returncode}"
    return lines[-1].rstrip(".")
